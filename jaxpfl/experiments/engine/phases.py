"""Results of a run's phases: each is written whole, found again, and never taken for another's.

    phases/NAME.npz, phases/NAME.json       arrays; their SHA-256, and the ledger's head after them

A phase that was killed is made again. Where it releases something private, the release is the same
again, or is charged again before it is written (`Releases.keep`). A ledger that has lost the
charges of a phase that is found is refused.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.privacy.ledger import Ledger

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Phases:
    """Arrays by phase, in a folder.

    Attributes:
      folder: made at the first phase.
      run: identifies the run; the phases of another are refused.
      ledger: that the phases charge, or None where they charge nothing.
    """

    folder: Path
    run: str
    ledger: Ledger | None = None

    def __call__(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """What `make()` made, now or before; numbers and texts alone.

        Raises:
          InputError: the folder holds another run's phase.
          CorruptFile: a file was altered, or is missing; or the ledger was cut off.
        """
        stem = name.replace(" ", "_")
        note, path = self.folder / f"{stem}.json", self.folder / f"{stem}.npz"
        if not note.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            content = files.npz({key: np.asarray(value) for key, value in make().items()})
            files.write_atomically(path, content)
            record = {"run": self.run, "sha256": hashlib.sha256(content).hexdigest()}
            if self.ledger is not None:
                record["ledger_head"] = self.ledger.head
            files.write_atomically(note, json.dumps(record) + "\n")
        record = files.read_json(note)
        if record.get("run") != self.run:
            raise InputError(
                f"{note}: is of run {record.get('run')}, expected {self.run}: the config, the data "
                "or the secret is not the one this run began with"
            )
        if self.ledger is not None and not self.ledger.contains(str(record.get("ledger_head"))):
            raise CorruptFile(
                f"{self.ledger.path}: does not contain the line that it ended with after phase "
                f"{name!r}: the ledger was cut off or replaced"
            )
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != record.get("sha256"):
            raise CorruptFile(f"{path}: was altered: it fails its SHA-256")
        try:
            # Read back even when just made: a resumed run goes on from the very same arrays.
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return {key: arrays[key] for key in arrays.files}
        except (ValueError, zipfile.BadZipFile) as error:
            raise CorruptFile(f"{path}: is not a file of arrays") from error
