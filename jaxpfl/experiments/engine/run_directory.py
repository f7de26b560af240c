"""One run: the only holder of its secret, which opens its ledger, stores and resumes.

    run.json                 what the run is, written before its first charge; a resumed run must be
                             of the same config, seed, queries, start, prior runs, clients, ledger
    private/secret.json      16 bytes as four words, mode 0600, until the run is finished
    private/dropped.json     how many rows of the clients' table lacked a value, if any lacked one
    private/rounds.jsonl     true cohort sizes, padding waste and times
    result.json              statement and last metrics, written when the run stops
    others                   see `observers`, `records.checkpoint` and `release.client_states`

Every system asks its clients through a `Run`. A killed one needs its secret to draw the cohorts and
the noise of its rounds again, bit for bit and at no further cost. Nobody else can, and nobody at
all once the run is finished. Of processes that share a run, 0 alone has files, secret and ledger.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm, require_affordable
from jaxpfl.data.population import Population
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError
from jaxpfl.experiments.engine.cost import Cost, stamped
from jaxpfl.experiments.engine.setting import Result, Setting, stamp_of
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.federated.hosts.shared_rounds import releaser
from jaxpfl.federated.mesh import leads
from jaxpfl.federated.release.identity import environment
from jaxpfl.federated.release.query import read_columns, require_population
from jaxpfl.federated.release.releaser import OtherProcesses, Releaser
from jaxpfl.models.base import Checking
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.signals import at_once

_RECORD = {"run": str, "stamp": str, "evaluation": str | None, "ledger_head": str, "origin": str}


class Run(AbstractContextManager["Run"]):
    """A run in a directory, whose lock the caller holds; as a context, it holds the ledger open.

    Args:
      population: the PRIVATE clients; the record has a keyed digest of them, so that a resumed run
        must have the same.
      ledger: file that is charged before every release; `budget` limits all of it.
      resume: continues the run in the directory; otherwise such a run is refused.
      ask: makes what is asked of the clients, such as embeddings, which may take long. It is called
        by `releaser`. None asks the population itself.

    Attributes:
      id: the run's public name in ledgers, a digest that reveals nothing about its secret.
      finished: the number of rounds of a finished run, or None.
      stamp: NOT PRIVATE and why, or ""; read back from `run.json`, so that it never disappears.
      record: the content of `run.json`; empty until `begin` has written it.
      ledger, cost: the open ledger, and what the run has spent of it. These three are of process 0.
    """

    record: dict[str, Any]
    ledger: Any = None  # `Ledger`
    cost: Cost

    def __init__(
        self,
        path: Path,
        algorithm: Algorithm,
        population: Population,
        setting: Setting,
        *,
        ledger: str | Path,
        budget: Budget | None = None,
        resume: bool = False,
        ask: Callable[[], Population] | None = None,
    ) -> None:
        check_queries(algorithm)
        if ask is None:
            check_clients(algorithm, population)
        self.path, self.algorithm, self.population = path, algorithm, population
        self.setting = setting
        self._ledger_path, self._budget, self._ask = ledger, budget, ask
        self._open, self._secret = ExitStack(), None
        identified = decide(f"the run of {algorithm.name!r}", partial(self._identified, resume))
        self.id, self.stamp, self.finished = identified

    def _identified(self, resume: bool) -> tuple[str, str, int | None]:
        """The run's id, its stamp, and its rounds if it is finished, by its files."""
        path, algorithm, setting = self.path, self.algorithm, self.setting
        self._secret_path = files.private_directory(path / "private") / "secret.json"
        # What an earlier attempt wrote.
        begun, self.record = path / "run.json", {}
        if begun.exists():
            self.record = files.read_record(begun, _RECORD)
            expected = _described(algorithm, setting)
            for name in sorted(expected.keys() | ({"start"} & self.record.keys())):
                if self.record.get(name) != expected.get(name):
                    what = f"the field {name!r} of the run is not what it was when the run began"
                    how = "resume the run as it began, or choose another --out"
                    raise InputError(f"{begun}: {what}; {how}")
            if not resume:
                raise InputError(f"{path}: holds a run already; resume it or choose another --out")
        place, finished = path / "result.json", None
        result = files.read_record(place, {"rounds": int}) if place.exists() else {"rounds": 0}
        if result.get("stopped") or result["rounds"] >= algorithm.rounds:
            finished = result["rounds"]
        else:
            terms: Any = {"purpose": algorithm.name, "run": self.record.get("run")}
            terms["reproducible_seed"] = setting.seed if setting.reproducible_noise else None
            self._secret = saved_secret(self._secret_path, **terms)
        if self.record:
            return self.record["run"], self.record["stamp"], finished
        if self._secret is None:
            raise CorruptFile(f"{path}: holds result.json, but its run.json is missing")
        plans, reproducible = (q.plan for q in algorithm.queries), setting.reproducible_noise
        return self._secret.public_name, stamp_of(plans, reproducible=reproducible), finished

    def __enter__(self) -> "Run":
        if leads():
            unit = self.algorithm.queries[0].plan.unit
            ledger = Ledger(self._ledger_path, self.population, budget=self._budget, unit=unit)
            self.ledger = self._open.enter_context(ledger)
            self.cost = Cost(ledger, self.algorithm, self.id, self.setting.prior)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, evaluation: str | None = None) -> None:
        """Writes `run.json`, with the name of the `evaluation` data, unless an earlier attempt did.

        The ledger's head before the first charge identifies it on resume: one that was cut off
        would understate the cost. A finished run, which others begin with, needs its clients, too.
        """
        decide("the record of the run", partial(self._begin, evaluation))

    def _begin(self, evaluation: str | None) -> None:
        origin = self.ledger.digest(f"origin {self.id}", self.population.origin)
        if self.record:
            self.ledger.verify(self.record["ledger_head"])
            if origin != self.record["origin"]:
                raise InputError(
                    f"{self.path}: the clients are not those with which the run began, have other "
                    "data, or come in another order: resume it with the same, or choose another "
                    "--out; nothing was charged"
                )
            return
        queries = self.algorithm.queries
        # All rounds together, so that the charge of one seldom needs a composition.
        self.ledger.fits(self.algorithm.event())
        self.record = {
            "run": self.id,
            "private": not self.stamp,
            "stamp": self.stamp,
            "statement": self.cost.planned(),
            "note": self.setting.note,
            **_described(self.algorithm, self.setting),
            "plan": queries[0].plan.to_dict(),
            "captured": {query.label: query.captured for query in queries},
            "evaluation": evaluation,
            "unit": self.population.unit,
            "population": self.population.name,
            "origin": origin,
            "ledger_head": self.ledger.head,
            "devices": jax.device_count(),
            "backend": jax.default_backend(),
            "environment": environment(),
            "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
        }
        if self.population.dropped:
            files.write_json(self.path / "private/dropped.json", {"rows": self.population.dropped})
        files.write_json(self.path / "run.json", self.record)

    def releaser(
        self, *, warn: Callable[[str], None] = lambda message: None, done: int = 0
    ) -> Releaser | None:
        """Asks the clients, after `done` rounds; None for a finished run, whose secret is gone.

        With an `ask`, the releases of a single round are all made, or none beyond the budget.
        """
        if self.finished is not None:
            return None
        if self._ask is not None and self.algorithm.rounds == 1:
            decide("the budget", lambda: require_affordable(self.algorithm, self.ledger, self.id))
        clients = self.population
        if self._ask is not None:
            # Nothing is charged yet, and there is no round to finish.
            with at_once():
                clients = self._ask()
            check_clients(self.algorithm, clients)
        private = self.path / "private"

        def make(others: OtherProcesses | None) -> Releaser:
            rounds = self._open.enter_context(open(private / "rounds.jsonl", "a", encoding="utf-8"))
            began = time.monotonic()

            def log(record: dict[str, Any]) -> None:
                """Records true cohort size, padding waste and time, which depend on the clients."""
                content = files.jsonable({**record, "seconds": time.monotonic() - began})
                rounds.write(json.dumps(content) + "\n")
                rounds.flush()

            return Releaser(
                clients,
                self.ledger,
                self._secret,
                run=self.id,
                name=self.algorithm.name,
                queries=self.algorithm.queries,
                warn=warn,
                observe=log,
                processes=others,
                states=(private / "client_states", done),
            )

        return releaser(make, clients, self.algorithm.queries)

    def end(self, result: Result, *, stopped: bool = False) -> Result:
        """Writes `result.json`, deletes a finished run's secret, and returns the result as stated.

        If the ledger was changed from outside, nothing is written or deleted. A run that `on_round`
        has stopped is a finished one.
        """
        rounds, statement = result.rounds, result.privacy
        result = replace(result, privacy=self.stated(statement, rounds, stopped=stopped))
        fields = ("rounds", "kept", "privacy", "epsilons", "evaluated_on", "metrics")
        record = {"run": self.id, "private": not self.stamp, "stopped": stopped}
        record |= {name: getattr(result, name) for name in fields}
        # With the numbers that the programs hold, which only their trace has shown.
        queries = [query for query in self.ledger.queries if query["run"] == self.id]
        record["captured"] = {query["label"]: query["captured"] for query in queries}
        self.ledger.require_unchanged()
        files.write_json(self.path / "result.json", record)
        if stopped or rounds == self.algorithm.rounds:
            forget_secret(self._secret_path, self.ledger)
        return result

    def stated(self, statement: str, rounds: int, *, stopped: bool = False) -> str:
        """The statement of a run after these rounds, perhaps its last ones."""
        if rounds < self.algorithm.rounds:
            statement += f", after {rounds} of {self.algorithm.rounds} rounds"
        if stopped and not self.stamp:
            # The rounds' own epsilon is that of rounds whose number was chosen beforehand.
            promised = self.record["statement"].partition(", unit")[0]
            statement += f"; stopped by its own results: only {promised} was certain beforehand"
        return stamped(statement, self.stamp, self.setting.note)


# What a run without a round writes, also of its start, and the folders of its pictures.
_BEGINNING = {"config.yaml", "run.json", "run.lock", "attempts.jsonl", "begun_in", "secret.json"}
_BEGINNING |= {"ledger.jsonl", "ledger.jsonl.key", "vocabulary.json"}
_BEGINNING |= {"metrics.jsonl", "result.json", "report.html", "tensorboard", "plots"}


@contextmanager
def first_attempt(directory: Path, ledgers: Sequence[Path]) -> Iterator[None]:
    """`files.exclusive`, which leaves nothing of a run that is refused before any work or charge.

    What was there before stays. Everything stays if there is more than the beginning of one run, if
    a record cannot be read, or if one of its ledgers, or one in the directory, has its charges.
    """
    with files.exclusive(directory):
        before = set(directory.rglob("*"))
        try:
            yield
        except CorruptFile:
            raise
        except (InputError, BudgetExhausted):
            with suppress(InputError, OSError):
                _remove_beginning(directory, before, ledgers)
            raise


def _remove_beginning(directory: Path, before: set[Path], ledgers: Sequence[Path]) -> None:
    """Removes what is new in the directory, file by file, or nothing, as `first_attempt` says."""
    paths = sorted({*directory.rglob("*")} - before, reverse=True)
    for path in paths:
        began = not _BEGINNING.isdisjoint((path.name, path.parent.name))
        another = path.name == "run.lock" and path.parent != directory
        if another or not (path.is_dir() or began or path.stat().st_size == 0):
            return
    metrics = [line for path in directory.rglob("metrics.jsonl") for line in read_lines(path)]
    if any(line.get("round") != 0 for line in metrics):
        return
    runs = {files.read_record(path, {"run": str})["run"] for path in directory.rglob("run.json")}
    charges = [one.run for path in ledgers if runs for one in Ledger.read(path).charges]
    own = any(Ledger.read(path).charges for path in directory.rglob("ledger.jsonl"))
    if own or not runs.isdisjoint(charges):
        return
    for path in paths:
        path.rmdir() if path.is_dir() else path.unlink()


def _described(algorithm: Algorithm, setting: Setting) -> dict[str, Any]:
    queries = []
    for query in algorithm.queries:
        cohort = asdict(query.cohort)
        # It may follow from the devices. Releases on others are other releases, and are charged.
        del cohort["clients_per_bucket"]
        queries.append({"label": query.label, "plan": query.plan.to_dict(), "cohort": cohort})
    record = {"label": algorithm.name, "config": setting.config, "seed": setting.seed}
    record |= {"prior": setting.prior, "queries": queries}
    return files.jsonable(record if setting.start is None else {**record, "start": setting.start})


def check_queries(algorithm: Algorithm) -> None:
    """Refuses queries that no one run can ask."""
    name, queries = algorithm.name, algorithm.queries
    for shared, values in (
        ("protect the same unit, found client and example", {q.plan.unit for q in queries}),
        ("simulate the same larger population, or none", {q.plan.simulates for q in queries}),
    ):
        if len(values) > 1:
            raise InputError(f"all queries of {name!r} must {shared}")
    for query in queries:
        slots, replicas = query.cohort.capacity, query.execution.replicas
        if slots % replicas:
            shared = "the number of devices that share a cohort, or of copies of the model on them"
            what = f"clients_per_bucket = {slots} must be a multiple of {replicas}"
            raise InputError(f"{what}, {shared}")


def check_clients(algorithm: Algorithm, clients: Population) -> None:
    """Refuses data that does not fit the queries or the model, before any charge."""
    for query in algorithm.queries:
        require_population(query, clients)
        if query.prepare is None:
            columns = read_columns(query, clients)
            if isinstance(query.client_fn, Checking):
                query.client_fn.check(columns)


def saved_secret(
    path: Path, *, reproducible_seed: int | None, purpose: str, run: str | None = None
) -> RunSecret:
    """Returns the secret stored in `path`; of a new run (`run` is None) makes it, and stores it.

    One that follows from a `reproducible_seed` is for tests: the run is NOT private.
    """
    reproducible = reproducible_seed is not None
    if path.exists():
        record = files.read_record(path, {"reproducible": bool, "words": list})
        words = record["words"]
        if record["reproducible"] != reproducible:
            values = f"{record['reproducible']}, found {reproducible}: resume it as it began"
            raise InputError(f"{path}: the run began with reproducible_noise = {values}")
        if len(words) != 4 or not all(type(word) is int and 0 <= word < 2**32 for word in words):
            raise CorruptFile(f"{path}: holds no secret, which is four words of 32 bits")
        secret = RunSecret(np.array(words, np.uint32).tobytes())
        if run not in (None, secret.public_name):
            why = "this file or the record of the run was replaced"
            raise InputError(f"{path}: holds the secret of another run than {run}: {why}")
        return secret
    if run is not None:
        lost = "is missing, so the run cannot be continued: its noise cannot be drawn again"
        kept = "Its releases stay in the ledger; start another run with another --out"
        raise CorruptFile(f"{path}: {lost}. {kept}")
    seed = reproducible_seed
    secret = RunSecret() if seed is None else RunSecret.reproducible(seed, purpose)
    words = np.frombuffer(secret.words, np.uint32).tolist()
    files.private_directory(path.parent)
    files.write_json(path, {"words": words, "reproducible": reproducible}, mode=0o600)
    return secret


def forget_secret(path: Path, ledger: Ledger) -> None:
    """Deletes a run's secret, if it exists; not where others changed the ledger: `CorruptFile`."""
    if path.exists():
        ledger.require_unchanged()
        path.unlink()
        files.fsync_path(path.parent)
