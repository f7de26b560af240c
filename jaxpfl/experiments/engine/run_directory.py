"""The directory of one run: what the run is, its secret, its result.

run.json                 what the run is, written before its first charge, compared on resume
private/secret.json      16 bytes as four words, mode 0600, until the run is finished
private/dropped.json     how many rows of the clients' table lacked a value, if any were left out
result.json              statement and last metrics, written when the run stops
others                   see `observers`, `rounds`, `records.checkpoint`, `files.lock` and
                         `federated.release.client_states`

A killed run needs its secret to draw the cohorts and the noise of its rounds again, bit for bit and
at no further cost. Nobody else can draw them, and nobody at all once the run is finished.
"""

from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.cost import stamped
from jaxpfl.experiments.engine.setting import Result, Setting, Tracking, stamp_of
from jaxpfl.federated.release.identity import environment
from jaxpfl.federated.release.query import read_columns, require_population
from jaxpfl.models.base import Checking
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import RunSecret

_RECORD = {"run": str, "stamp": str, "evaluation": str | None, "ledger_head": str, "clients": str}


class RunDirectory:
    """A run's directory, whose lock the caller holds; without `resume`, one with a run is refused.

    Attributes:
      finished: the number of rounds of a finished run, or None.
      secret: of noise and cohorts; None for a finished run.
      stamp: NOT PRIVATE and why, or ""; read back from `run.json`, so that it never disappears.
      record: the content of `run.json`; empty until an attempt has written it.
    """

    def __init__(
        self,
        path: Path,
        algorithm: Algorithm,
        population: Population,
        setting: Setting,
        *,
        resume: bool,
    ) -> None:
        self.path = path
        self._algorithm, self._population, self._setting = algorithm, population, setting
        self._secret_path = files.private_directory(path / "private") / "secret.json"
        self.record = _begun(path / "run.json", algorithm, setting)
        if self.record and not resume:
            raise InputError(f"{path}: holds a run already; resume it or choose another --out")
        self.secret = None
        self.finished = self._finished_rounds()
        if self.finished is None:
            self.secret = saved_secret(
                self._secret_path,
                reproducible_seed=setting.seed if setting.reproducible_noise else None,
                purpose=algorithm.name,
                run=self.record.get("run"),
            )
        # Keyed, and its key is deleted in the end: no guess of them can be tested.
        self._clients = self.secret and self.secret.digest("clients", population.origin)
        if self.record and self._clients not in (None, self.record["clients"]):
            raise InputError(
                f"{path}: the clients are not those with which the run began, have other data, or "
                "come in another order: resume it with the same, or choose another --out; nothing "
                "was charged"
            )
        if self.record:
            self.run_id, self.stamp = self.record["run"], self.record["stamp"]
        elif self.secret is not None:
            plans, reproducible = (q.plan for q in algorithm.queries), setting.reproducible_noise
            self.run_id = run_id(self.secret)
            self.stamp = stamp_of(plans, reproducible=reproducible)
        else:
            raise CorruptFile(f"{path}: holds result.json, but its run.json is missing")

    def begin(self, statement: str, tracking: Tracking, ledger_head: str) -> None:
        """Writes `run.json`, with the planned guarantee, unless an earlier attempt did.

        The head of the ledger before the first charge identifies the ledger on resume.
        """
        if self.record:
            return
        evaluate, queries = tracking.evaluate, self._algorithm.queries
        self.record = {
            "run": self.run_id,
            "private": not self.stamp,
            "stamp": self.stamp,
            "statement": statement,
            "note": self._setting.note,
            **_described(self._algorithm, self._setting),
            "plan": queries[0].plan.to_dict(),
            "captured": {query.label: query.captured for query in queries},
            "evaluation": None if evaluate is None else evaluate.name,
            "unit": self._population.unit,
            "population": self._population.name,
            "clients": self._clients,
            "ledger_head": ledger_head,
            "devices": jax.device_count(),
            "backend": jax.default_backend(),
            "environment": environment(),
            "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
        }
        if self._population.dropped:
            files.write_json(self.path / "private/dropped.json", {"rows": self._population.dropped})
        files.write_json(self.path / "run.json", self.record)

    def end(self, result: Result, ledger: Ledger, *, stopped: bool) -> Result:
        """Writes `result.json`, deletes a finished run's secret, and returns the result as stated.

        If the ledger was changed from outside, nothing is written or deleted. A run that `on_round`
        has stopped is a finished one.
        """
        rounds, statement = result.rounds, result.privacy
        result = replace(result, privacy=self.stated(statement, rounds, stopped=stopped))
        fields = ("rounds", "kept", "privacy", "epsilons", "evaluated_on", "metrics")
        record = {"run": self.run_id, "private": not self.stamp, "stopped": stopped}
        record |= {name: getattr(result, name) for name in fields}
        # With the numbers that the programs hold, which only their trace has shown.
        asked = [query for query in ledger.queries if query["run"] == self.run_id]
        record["captured"] = {query["label"]: query["captured"] for query in asked}
        ledger.require_unchanged()
        files.write_json(self.path / "result.json", record)
        if stopped or rounds == self._algorithm.rounds:
            forget(self._secret_path, ledger)
        return result

    def stated(self, statement: str, rounds: int, *, stopped: bool = False) -> str:
        """The statement of a run after these rounds, perhaps its last ones."""
        if rounds < self._algorithm.rounds:
            statement += f", after {rounds} of {self._algorithm.rounds} rounds"
        if stopped and not self.stamp:
            # The rounds' own epsilon is that of rounds whose number was chosen beforehand.
            promised = self.record["statement"].partition(", unit")[0]
            statement += f"; stopped by its own results: only {promised} was certain beforehand"
        return stamped(statement, self.stamp, self._setting.note)

    def _finished_rounds(self) -> int | None:
        """The rounds of a finished run; None for another."""
        path = self.path / "result.json"
        found = files.read_record(path, {"rounds": int}) if path.exists() else {"rounds": 0}
        ended = found.get("stopped") or found["rounds"] >= self._algorithm.rounds
        return found["rounds"] if ended else None


def _described(algorithm: Algorithm, setting: Setting) -> dict[str, Any]:
    record: dict[str, Any] = {
        "label": algorithm.name,
        "config": setting.config,
        "seed": setting.seed,
        "queries": [
            {"label": query.label, "plan": query.plan.to_dict(), "cohort": asdict(query.cohort)}
            for query in algorithm.queries
        ],
    }
    return files.jsonable(record if setting.start is None else {**record, "start": setting.start})


def _begun(path: Path, algorithm: Algorithm, setting: Setting) -> dict[str, Any]:
    """Returns the record that an earlier attempt wrote to `path`, if any; refuses another run's."""
    if not path.exists():
        return {}
    record = files.read_record(path, _RECORD)
    expected = _described(algorithm, setting)
    for name in sorted(expected.keys() | ({"start"} & record.keys())):
        if record.get(name) != expected.get(name):
            raise InputError(
                f"{path}: the field {name!r} of the run is not what it was when the run began; "
                "resume the run as it began, or choose another --out"
            )
    return record


def check(algorithm: Algorithm, population: Population, tracking: Tracking) -> None:
    """Refuses data that does not fit the queries or the model, before any charge."""
    name, queries = algorithm.name, algorithm.queries
    if (tracking.evaluate or tracking.sentences) and algorithm.params is None:
        raise InputError(
            f"{name!r} trains no model, so nothing can be evaluated: leave out the evaluation"
        )
    for shared, values in (
        ("protect the same unit, found client and example", {q.plan.unit for q in queries}),
        ("simulate the same larger population, or none", {q.plan.simulates for q in queries}),
    ):
        if len(values) > 1:
            raise InputError(f"all queries of {name!r} must {shared}")
    for query in queries:
        require_population(query, population)
        slots, replicas = query.cohort.capacity, query.execution.replicas
        if slots % replicas:
            raise InputError(
                f"clients_per_bucket = {slots} must be a multiple of {replicas}, the number of "
                "devices that share a cohort, or of copies of the model on them"
            )
        if query.prepare is not None:
            continue
        columns = read_columns(query, population)
        if isinstance(query.client_fn, Checking):
            query.client_fn.check(columns)


def saved_secret(
    path: Path, *, reproducible_seed: int | None, purpose: str, run: str | None = None
) -> RunSecret:
    """Returns the secret stored in `path`; if there is none, makes one and stores it.

    Args:
      reproducible_seed: derives the secret from this seed, for tests: the run is NOT private.
      run: the name, which ends with `run_id`, of a run that has begun; None for a new run.
    """
    reproducible = reproducible_seed is not None
    if path.exists():
        record = files.read_record(path, {"reproducible": bool, "words": list})
        words = record["words"]
        if record["reproducible"] != reproducible:
            raise InputError(
                f"{path}: the run began with reproducible_noise = {record['reproducible']}, found "
                f"{reproducible}: resume it with its first value"
            )
        if len(words) != 4 or not all(type(word) is int and 0 <= word < 2**32 for word in words):
            raise CorruptFile(f"{path}: holds no secret, which is four words of 32 bits")
        secret = RunSecret(np.array(words, np.uint32).tobytes())
        if run is not None and not run.endswith(run_id(secret)):
            raise InputError(
                f"{path}: holds the secret of another run than {run}: this file or the record of "
                "the run was replaced"
            )
        return secret
    if run is not None:
        raise CorruptFile(
            f"{path}: is missing, so the run cannot be continued: its noise cannot be drawn again. "
            "Its releases stay in the ledger; start another run with another --out"
        )
    seed = reproducible_seed
    secret = RunSecret() if seed is None else RunSecret.reproducible(seed, purpose)
    words = np.frombuffer(secret.words, np.uint32).tolist()
    files.private_directory(path.parent)
    files.write_json(path, {"words": words, "reproducible": reproducible}, mode=0o600)
    return secret


def forget(path: Path, ledger: Ledger) -> None:
    """Deletes a run's secret, if it exists.

    If the ledger or the run directory was changed from outside (`CorruptFile`), the secret stays:
    it may be that of another run by now.
    """
    if path.exists():
        ledger.require_unchanged()
        path.unlink()
        files.fsync_path(path.parent)


def run_id(secret: RunSecret) -> str:
    """The run's public name in ledgers: a digest that reveals nothing about the secret."""
    return secret.digest("run", "")[:12]
