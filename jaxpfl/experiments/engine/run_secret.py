"""A run's secret: stored before its first use, readable by its owner only, deleted at the end.

    private/secret.json      16 bytes as four words; mode 0600

A killed run needs it to draw the cohorts and the noise of its rounds again, bit for bit and at no
further cost. Nobody else can draw them, and nobody at all once the run is finished.
"""

from pathlib import Path

import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import RunSecret


def saved_secret(
    path: Path, *, reproducible_seed: int | None, purpose: str, run: str | None = None
) -> RunSecret:
    """Returns the secret stored in `path`; if there is none, makes one and stores it.

    Args:
      reproducible_seed: derives the secret from this seed, for tests: the run is NOT private.
      purpose: gives two runs with one seed different secrets.
      run: the name, which ends with `run_id`, of a run that has begun; None for a new run.

    Raises:
      CorruptFile: the secret of a run that has begun is missing, or the file is damaged.
      InputError: it is the secret of another run, or one of the two uses a seed and one does not.
    """
    reproducible = reproducible_seed is not None
    if path.exists():
        secret = _read(path, reproducible)
        if run is not None and not run.endswith(run_id(secret)):
            raise InputError(
                f"{path}: holds the secret of another run than {run}: this file or the record of "
                "the run was replaced"
            )
        return secret
    if run is not None:
        raise CorruptFile(
            f"{path}: is missing, so the run cannot go on: its noise cannot be drawn again. Its "
            "releases stay in the ledger; start another run with another --out"
        )
    secret = (
        RunSecret()
        if reproducible_seed is None
        else RunSecret.reproducible(reproducible_seed, purpose)
    )
    words = np.frombuffer(secret.words, np.uint32).tolist()
    files.private_directory(path.parent)
    record = {"words": words, "reproducible": reproducible}
    files.write_json(path, record, mode=0o600)
    return secret


def forget(path: Path, ledger: Ledger) -> None:
    """Deletes a secret, if it exists.

    Args:
      ledger: the run's, open.

    Raises:
      CorruptFile: the ledger or the run directory was changed from outside. The secret stays: it
        may be that of another run by now.
    """
    if path.exists():
        ledger.require_unchanged()
        path.unlink()
        files.fsync_path(path.parent)


def run_id(secret: RunSecret) -> str:
    """The run's public name in ledgers: a digest that reveals nothing about the secret."""
    return secret.digest("run", "")[:12]


def _read(path: Path, reproducible: bool) -> RunSecret:
    record = files.read_record(path, {"reproducible": bool, "words": list})
    if record["reproducible"] != reproducible:
        raise InputError(
            f"{path}: the run began with reproducible_noise = {record['reproducible']}, found "
            f"{reproducible}: resume it with its first value"
        )
    words = record["words"]
    if len(words) != 4 or not all(type(word) is int and 0 <= word < 2**32 for word in words):
        raise CorruptFile(f"{path}: holds no secret, which is four words of 32 bits")
    return RunSecret(np.array(words, np.uint32).tobytes())
