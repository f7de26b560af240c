"""A run's secret: on the disk before its first use, private, and deleted when the run ends.

    private/secret.json      16 bytes as four words; mode 0600

With it, a run that was killed draws the cohorts and the noise of its rounds again, to the same bits
and at no further cost. Without it nobody can. A finished run no longer needs it, so it is deleted.
"""

from pathlib import Path

import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.privacy.secret import Secret


def saved_secret(
    path: Path, *, reproducible_seed: int | None = None, purpose: str = "", begun: bool = False
) -> Secret:
    """The secret saved in `path`, else a new one, saved before its first use.

    Args:
      reproducible_seed: draws it from this seed, for tests: the run is NOT private.
      purpose: keeps two runs of one seed apart.
      begun: whether the run must have one already.

    Raises:
      CorruptFile: there is none, though the run has begun, or the file holds no secret.
      InputError: the saved one follows from a seed and this run is to be private, or the reverse.
    """
    reproducible = reproducible_seed is not None
    if path.exists():
        return _read(path, reproducible)
    if begun:
        raise CorruptFile(
            f"{path}: is missing, so the run cannot go on: its noise cannot be drawn again. The "
            "releases it has made stay in its ledger; begin another run with another --out"
        )
    secret = (
        Secret() if reproducible_seed is None else Secret.reproducible(reproducible_seed, purpose)
    )
    words = np.frombuffer(secret.words, np.uint32).tolist()
    files.private_directory(path.parent)
    record = {"words": words, "reproducible": reproducible}
    files.write_json(path, record, mode=0o600)
    return secret


def forget(path: Path) -> None:
    """Deletes a secret that is no longer needed; it may be gone already."""
    if path.exists():
        path.unlink()
        files.fsync_path(path.parent)


def run_id(secret: Secret) -> str:
    """The run's name in ledgers: public, a digest that reveals nothing of the secret."""
    return secret.digest("run", "")[:12]


def _read(path: Path, reproducible: bool) -> Secret:
    record = files.read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("reproducible"), bool):
        raise CorruptFile(f"{path}: holds no secret, which is four words of 32 bits")
    if record.get("reproducible") != reproducible:
        raise InputError(
            f"{path}: the run began with reproducible_noise = {record.get('reproducible')}, now it "
            f"is given {reproducible}: resume it with the value that it began with"
        )
    try:
        return Secret(np.array(record.get("words"), np.uint32).tobytes())
    except (InputError, OverflowError, TypeError, ValueError):
        raise CorruptFile(f"{path}: holds no secret, which is four words of 32 bits") from None
