"""The phases of a study whose rounds ask clients, and what asks them.

phases/run.json         which run and config the phases are of
private/secret.json     until the last phase is there
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxpfl import files
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.phases import Arrays, Phases
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.federated.query import Query
from jaxpfl.federated.release import Releaser
from jaxpfl.privacy.ledger import Ledger

_LAST = "corpus.json"


@dataclass(frozen=True)
class Releases:
    """A context manager; it closes the ledger.

    Attributes:
      phases: what the rounds made.
      run: its name in the ledger.
      ledger: of the clients; None where nobody is asked.
      releaser: asks them; None where nobody is asked, or nothing is left to ask.
    """

    phases: Phases
    run: str
    ledger: Ledger | None = None
    releaser: Releaser | None = None
    secret: Path | None = None

    @classmethod
    def without_clients(cls, directory: Path, described: str) -> Self:
        """For a study that asks nobody."""
        run = _hash(described)
        return cls(Phases(directory / "phases", run), run)

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
        """For a study whose rounds ask `query`.

        Args:
          described: the config: phases of another one are refused.
          name: what the ledger's entries are called.
        """
        try:
            folder = directory / "phases"
            note, secret_path = folder / "run.json", directory / "private" / "secret.json"
            begun = files.read_json(note) if note.exists() else None
            if begun is not None and begun.get("config") != _hash(described):
                raise InputError(f"{note}: is of another config than the one that is carried out")
            if (folder / _LAST).exists() and begun is not None:
                run = str(begun["run"])
                return cls(Phases(folder, run, ledger), run, ledger, None, secret_path)
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
                files.write_atomically(note, json.dumps(record) + "\n")
            elif begun.get("run") != run:
                raise InputError(
                    f"{note}: is of run {begun.get('run')}, the secret in private/ of another: one "
                    "of them was replaced"
                )
            releaser = Releaser(clients, ledger, secret, run=run, name=name, queries=(query,))
            return cls(Phases(folder, run, ledger), run, ledger, releaser, secret_path)
        except BaseException:
            ledger.close()
            raise

    def keep(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """As `phases`; what was released is confirmed before it is stored."""

        def confirmed() -> Arrays:
            made = make()
            if self.releaser is not None:
                self.releaser.confirm()
            return made

        return self.phases(name, confirmed)

    def ask(self, step: Callable, state: Any, round: int) -> tuple[Any, Any]:
        """Runs a step; its releases are confirmed when it returns."""
        if self.releaser is None:
            return step(state, missing, round)
        found = self.releaser.step(step, state, round)
        self.releaser.confirm()
        return found

    def end(self) -> None:
        """Forgets the secret: everything that was released is in the phases."""
        if self.secret is not None:
            forget(self.secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.ledger is not None:
            self.ledger.close()


def missing(*_: Any, **__: Any) -> Any:
    """In the clients' place where everything was released: whatever is missing stays so."""
    raise CorruptFile("the run's folder phases/ lacks a phase: `jaxpfl resume` makes it again")


def _hash(described: str) -> str:
    return hashlib.sha256(described.encode()).hexdigest()[:12]
