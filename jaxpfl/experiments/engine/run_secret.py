"""A run's secret: on the disk before its first use, private, and deleted when the run ends.

    private/secret.json      16 bytes as four words; mode 0600

With it a killed run draws the cohorts and the noise of its rounds again, bit by bit, at no further
cost. Without it nobody can: a finished run needs it no more, so it goes.
"""

import json
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
            f"{path}: is missing, so the run cannot go on: its noise cannot be drawn again. What "
            "it has released stays in its ledger"
        )
    secret = (
        Secret() if reproducible_seed is None else Secret.reproducible(reproducible_seed, purpose)
    )
    words = np.frombuffer(secret.words, np.uint32).tolist()
    files.private_directory(path.parent)
    record = {"words": words, "reproducible": reproducible}
    files.write_atomically(path, json.dumps(record) + "\n", mode=0o600)
    return secret


def forget(path: Path) -> None:
    """Deletes a secret that is needed no more; it may be gone already."""
    if path.exists():
        path.unlink()
        files.fsync_directory(path.parent)


def run_id(secret: Secret) -> str:
    """What the run is called in ledgers: public, and tells nothing of the secret."""
    return secret.digest("run", "")[:12]


def _read(path: Path, reproducible: bool) -> Secret:
    record = files.read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("reproducible"), bool):
        raise CorruptFile(f"{path}: holds no secret of four words")
    if record.get("reproducible") != reproducible:
        raise InputError(
            f"{path}: a run begun with reproducible_noise goes on so, and no other does: the "
            f"secret there is reproducible = {record.get('reproducible')}, asked for was "
            f"{reproducible}"
        )
    try:
        return Secret(np.array(record.get("words"), np.uint32).tobytes())
    except (InputError, OverflowError, TypeError, ValueError):
        raise CorruptFile(f"{path}: holds no secret of four words") from None
