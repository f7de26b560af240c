"""What a system whose rounds ask clients has made so far, and what asks them.

    artifacts/run.json         which run and config the artifacts are of
    artifacts/NAME/            what a phase of a round made, see `artifacts`
    private/secret.json        until the last artifact is stored

A phase that was killed is carried out again. Where it releases something private, the release is
the same again, or is charged again before it is stored.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxpfl import files
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.artifacts import Artifact, Artifacts
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.federated.query import Query
from jaxpfl.federated.release import Releaser
from jaxpfl.privacy.ledger import Ledger

Arrays = Mapping[str, np.ndarray]

FOLDER = "artifacts"
_LAST = "corpus"


@dataclass(frozen=True)
class Releases:
    """A context manager; it closes the ledger.

    Attributes:
      artifacts: what the rounds made.
      run: its name in the ledger.
      ledger: of the clients; None where no client is asked.
      releaser: asks them; None where no client is asked, or nothing is left to ask.
      secret: the file of the run's secret; None where no client is asked.
    """

    artifacts: Artifacts
    run: str
    ledger: Ledger | None = None
    releaser: Releaser | None = None
    secret: Path | None = None

    @classmethod
    def without_clients(cls, directory: Path, described: str) -> Self:
        """For a system that asks no client.

        Args:
          described: the config: artifacts of another one are refused.
        """
        run = _hash(described)
        return cls(Artifacts(directory / FOLDER, run=run), run)

    @classmethod
    def of_clients(
        cls,
        directory: Path,
        described: str,
        clients: Population,
        *,
        name: str,
        query: Query,
        ledger: Ledger,
        reproducible_seed: int | None,
    ) -> Self:
        """For a system whose rounds ask `query`.

        Args:
          described: the config: artifacts of another one are refused.
          name: what the ledger's entries are called.
          reproducible_seed: draws noise and cohorts from this seed: NOT private.

        Raises:
          InputError: the directory holds another run, or one of another config.
          CorruptFile: the secret of an unfinished run is missing or was altered.
        """
        try:
            folder = directory / FOLDER
            private = query.plan.private and reproducible_seed is None
            note, secret_path = folder / "run.json", directory / "private" / "secret.json"
            begun = files.read_json(note) if note.exists() else None
            if begun is not None and begun.get("config") != _hash(described):
                raise InputError(
                    f"{note}: the run began with another config than the one that it is now "
                    "carried out with; resume it with its own, or choose another --out"
                )
            if (folder / _LAST).exists() and begun is not None:
                run = str(begun["run"])
                artifacts = Artifacts(folder, run=run, ledger=ledger, private=private)
                return cls(artifacts, run, ledger, None, secret_path)
            secret = saved_secret(
                secret_path,
                reproducible_seed=reproducible_seed,
                purpose=name,
                begun=begun is not None,
            )
            run = f"{name} {run_id(secret)}"
            if begun is None:
                folder.mkdir(parents=True, exist_ok=True)
                record = {"run": run, "config": _hash(described)}
                files.write_json(note, record)
            elif begun.get("run") != run:
                raise InputError(
                    f"{note}: is of run {begun.get('run')}, but the secret in private/ is of "
                    "another run: one of the two files was replaced"
                )
            artifacts = Artifacts(folder, run=run, ledger=ledger, private=private)
            releaser = Releaser(clients, ledger, secret, run=run, name=name, queries=(query,))
            return cls(artifacts, run, ledger, releaser, secret_path)
        except BaseException:
            ledger.close()
            raise

    def load_or_compute(self, name: str, compute: Callable[[], Arrays]) -> Arrays:
        """The arrays stored under `name`, else those of `compute()`, stored.

        What they released is confirmed before it is stored.
        """

        def confirmed() -> Artifact:
            arrays = compute()
            if self.releaser is not None:
                self.releaser.confirm()
            return Artifact(arrays=arrays)

        return self.artifacts.load_or_compute(name, confirmed).arrays

    def ask(self, step: Callable, state: Any, round: int) -> tuple[Any, Any]:
        """Runs a step; its releases are confirmed when it returns."""
        if self.releaser is None:
            return step(state, missing, round)
        found = self.releaser.step(step, state, round)
        self.releaser.confirm()
        return found

    def end(self) -> None:
        """Forgets the secret: everything that was released is stored."""
        if self.secret is not None:
            forget(self.secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ledger is not None:
            self.ledger.close()


def missing(*_: Any, **__: Any) -> Any:
    """Stands in the clients' place where everything was released: what is missing stays so."""
    raise CorruptFile(
        f"the run's folder {FOLDER}/ lacks what a phase of a round made: `jaxpfl resume` makes it "
        "again"
    )


def _hash(described: str) -> str:
    return hashlib.sha256(described.encode()).hexdigest()[:12]
