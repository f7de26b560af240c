"""The stored phases of a system whose rounds ask clients, and the releaser that asks them.

    artifacts/run.json         the run and the config that the artifacts belong to
    artifacts/NAME/            the result of one phase of a round, see `artifacts`
    private/secret.json        until the last artifact is stored

A phase that was interrupted is repeated. A release that it repeats is either identical, and free,
or is charged again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxpfl import files
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.run_directory import forget, run_id, saved_secret
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.releaser import Others, Releaser
from jaxpfl.privacy.ledger import Ledger

Arrays = Mapping[str, np.ndarray]

FOLDER = "artifacts"
_LAST = "corpus"
_NOTE = "run.json"


@dataclass(frozen=True)
class Releases(AbstractContextManager["Releases"]):
    """The stored phases; a context manager that closes the ledger.

    Attributes:
      releaser: asks the clients; None if no client is asked or all releases are made.
      secret: the file of the run's secret; it and the ledger are None if no client is asked.
    """

    artifacts: Artifacts
    run: str
    ledger: Ledger | None = None
    releaser: Releaser | None = None
    secret: Path | None = None

    @classmethod
    def of_clients(
        cls,
        directory: Path,
        described: str,
        clients: Population,
        *,
        name: str,
        queries: Sequence[Query],
        ledger: Ledger,
        reproducible_seed: int | None,
        others: Others | None = None,
    ) -> Self:
        """For a system whose rounds ask these queries, whose plans are alike.

        Args:
          described: the config as text; artifacts of another config are refused.
          reproducible_seed: draws noise and cohorts from this seed: NOT private.
        """
        try:
            folder, secret_path = directory / FOLDER, directory / "private" / "secret.json"
            run, releaser, seed = _begun(folder, described), None, reproducible_seed
            if run is None or not (folder / _LAST).exists():
                secret = saved_secret(secret_path, reproducible_seed=seed, purpose=name, run=run)
                if run is None:
                    run = f"{name} {run_id(secret)}"
                    folder.mkdir(parents=True, exist_ok=True)
                    files.write_json(folder / _NOTE, {"run": run, "config": _hash(described)})
                asked: Any = {"name": name, "queries": queries, "others": others}
                releaser = Releaser(clients, ledger, secret, run=run, **asked)
            plan = queries[0].plan
            private = plan.private and plan.simulates is None and seed is None
            artifacts = Artifacts(folder, run=run, ledger=ledger, private=private)
            return cls(artifacts, run, ledger, releaser, secret_path)
        except BaseException:
            ledger.close()
            raise

    @classmethod
    def without_clients(cls, directory: Path, described: str, ledger: Ledger | None = None) -> Self:
        """For what asks no client: a run without a ledger, or what reads a finished run's."""
        folder = directory / FOLDER
        run = _hash(described) if ledger is None else _begun(folder, described)
        if run is None:
            raise CorruptFile(f"{folder / _NOTE}: is missing")
        return cls(Artifacts(folder, run=run, ledger=ledger), run, ledger)

    def load_or_compute(self, name: str, compute: Callable[[], Arrays]) -> Arrays:
        """The arrays stored under `name`; else computed and stored."""
        return self.artifacts.load_or_compute(name, lambda: Artifact(arrays=compute())).arrays

    def ask(self, step: Callable, state: Any, round: int) -> tuple[Any, Any]:
        """Runs a step of an algorithm."""
        if self.releaser is None:
            return step(state, missing, round)
        return self.releaser.step(step, state, round)

    def end(self) -> None:
        """Deletes the secret, which is not needed once all releases are stored."""
        if self.secret is not None and self.ledger is not None:
            forget(self.secret, self.ledger)

    def __exit__(self, *_: object) -> None:
        if self.ledger is not None:
            self.ledger.close()


def missing(*_: Any, **__: Any) -> Any:
    """Takes the clients' place when all releases are made: a missing artifact is an error."""
    raise CorruptFile(
        f"the run's folder {FOLDER}/ lacks the artifact of a phase: `jaxpfl resume` makes it again"
    )


def _begun(folder: Path, described: str) -> str | None:
    """The run that began with this config in the folder of its artifacts; None before any did."""
    path = folder / _NOTE
    if not path.exists():
        return None
    begun = files.read_record(path, {"run": str, "config": str})
    if begun["config"] != _hash(described):
        raise InputError(
            f"{path}: the run began with another config than this one: restore config.yaml, or "
            "choose another --out"
        )
    return begun["run"]


def _hash(described: str) -> str:
    return hashlib.sha256(described.encode()).hexdigest()[:12]
