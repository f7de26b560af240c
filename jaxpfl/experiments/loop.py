"""The loop over rounds: one for a fresh run, a resumed one, and the one without privacy beside it.

    for each round r:
        charge the ledger                      on the disk BEFORE any client's data is read
        sample, pack, step                     a function of (seed, noise key, r) alone
        write the metrics of round r - 1       the device never waits for the host
        every so often: evaluate, checkpoint

What a crash can leave behind is a ledger ahead of the metrics, and metrics ahead of the
checkpoint. A resumed run therefore replays the rounds after its checkpoint. With the saved noise
key a replayed round makes the same release, which costs nothing more: the ledger charges a (run,
round) once, and the recorded output hash proves that it was the same. Where the hash differs (other
hardware, another number of devices), a second release was made and it is charged again.

Rounds count from 1: round r leads from the state after r - 1 rounds to the state after r.
"""

import dataclasses
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from dp_accounting import DpEvent

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.cohort import Cohort
from jaxpfl.data.population import Population
from jaxpfl.data.prefetch import prefetch
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments import files, total
from jaxpfl.experiments.checkpoint import Checkpoints, Restored
from jaxpfl.experiments.environment import environment, noise_root_in
from jaxpfl.experiments.evaluate import Pending, Scores
from jaxpfl.experiments.tracking import MetricsFile, PrivateLog, Progress, TensorBoard, jsonable
from jaxpfl.privacy.keys import (
    key_from_words,
    key_to_words,
    noise_root,
    training_root,
)
from jaxpfl.privacy.ledger import Budget, Ledger

# Addresses the model's start among the training keys; rounds have the small numbers.
_INIT = 2**32 - 1

NOT_PRIVATE = "NOT PRIVATE: trained without privacy"
REPRODUCIBLE = "NOT PRIVATE: the noise can be drawn again from the seed (reproducible_noise)"


@dataclass(frozen=True)
class Result:
    """What a run ends with; all of it is public.

    Attributes:
      privacy: the statement: (epsilon, delta), unit, adjacency, accountant.
      metrics: the last round's public metrics, the last evaluation among them.
      rounds: rounds done.
      out: the run directory.
      params: the trained model's parameters, on the device.
    """

    privacy: str
    metrics: dict[str, Any]
    rounds: int
    out: Path
    params: Any = field(repr=False)


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT came; the run was checkpointed and can be resumed."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True)
class Tracking:
    """What a run looks at while it trains, and how often it saves itself.

    Attributes:
      evaluate: scores parameters on public data, or None.
      evaluate_every: rounds between two evaluations; before the first round and after the last
        there always is one.
      sentences: `(params, round) -> sentences`, drawn at each evaluation, or None.
      checkpoint_every: rounds between two checkpoints; after the last round there always is one.
      shown: whether progress goes to stderr.
    """

    evaluate: Scores | None = None
    evaluate_every: int = 10
    sentences: Callable[[Any, int], list[str]] | None = None
    checkpoint_every: int = 10
    shown: bool = True


@dataclass(frozen=True)
class _Late:
    """A round that was dispatched and whose metrics are not yet fetched."""

    round: int
    due: bool
    metrics: dict[str, jax.Array]
    evaluation: Pending | None
    sentences: list[str] | None


class Loop:
    """One run in one directory, whose lock the caller holds.

    Args:
      algorithm, population: what is trained, on whom.
      directory: the run directory.
      ledger: file charged before every round.
      budget: hard limit of the whole ledger, or None.
      seed: of the model's start.
      reproducible_noise: draws noise and cohorts from `seed`: NOT private.
      tracking: evaluation and checkpoints.
      resume: continues what is in `directory`, else refuses to touch an earlier run.
      config: the resolved config, part of the run's identity.
      label: what the ledger's entries are called.
      before: what the run released on the same clients before its rounds, and charged; epsilons
        and statements are those of everything together.
      before_what: names that, in statements.
      start: identifies the parameters that the run starts from, part of the run's identity; None
        for the model's own.
      note: a sentence that everything the run writes about its privacy ends with.
      resumed_as: the directory to resume after an interruption; None for `directory`.
      noise_purpose: keeps the reproducible noise of several runs of one seed apart.

    Raises:
      InputError: the data does not fit the plan or model, or the directory holds another run.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        *,
        directory: Path,
        ledger: str | Path,
        budget: Budget | None,
        seed: int,
        reproducible_noise: bool,
        tracking: Tracking,
        resume: bool,
        config: Mapping[str, Any],
        label: str = "fed_avg",
        before: DpEvent | None = None,
        before_what: str = "the choice of the corpus (FreD)",
        start: str | None = None,
        note: str = "",
        resumed_as: Path | None = None,
        noise_purpose: str | None = None,
    ) -> None:
        _check(algorithm, population)
        started = (directory / "run.json").exists()
        if started and not resume:
            raise InputError(f"{directory}: holds a run already; resume it or choose another --out")
        self.algorithm = algorithm
        self.population = population
        self.directory = directory
        self.tracking = tracking
        self.seed = seed
        self.label = label
        self.before = before
        self.before_what = before_what
        self.note = note
        self._resumed_as = directory if resumed_as is None else resumed_as
        plan = algorithm.plan
        self.stamp = "" if plan.private else NOT_PRIVATE
        if plan.private and reproducible_noise:
            self.stamp = REPRODUCIBLE
        private = files.private_directory(directory / "private")
        self.noise_key = saved_noise_key(
            private / "noise_key.json",
            seed,
            reproducible_noise,
            purpose=noise_purpose,
        )
        identity = {
            "config": config,
            "plan": plan.to_dict(),
            "cohort": dataclasses.asdict(algorithm.cohort),
            "model": algorithm.model.name,
            "seed": seed,
        }
        if start is not None:
            identity["start"] = start
        self.run_id = _run_id(identity, self.noise_key)
        self._environment = environment()
        self._noise_root = noise_root_in(self._environment, identity, self.noise_key)
        self._cohort_seed = _cohort_seed(seed, self.noise_key)
        self._shown: dict[str, str] = {}
        self._begin(identity, started)
        self._ledger_path, self._budget = ledger, budget

    def run(self) -> Result:
        """Does the rounds that are left; see the head of this file.

        Raises:
          BudgetExhausted: the next round does not fit; the rounds before are saved.
          Interrupted: SIGTERM or SIGINT came; the rounds so far are saved.
        """
        plan, every = self.algorithm.plan, self.tracking.checkpoint_every
        with ExitStack() as stack:
            signals = stack.enter_context(_caught_signals())
            title = f"{self.label} (NOT PRIVATE)" if self.stamp else self.label
            self._progress = stack.enter_context(
                Progress(
                    title,
                    rounds=plan.rounds,
                    clients=plan.clients_per_round,
                    shown=self.tracking.shown,
                )
            )
            self.ledger = stack.enter_context(
                Ledger(self._ledger_path, self.population.fingerprint, budget=self._budget)
            )
            checkpoints = Checkpoints(
                self.directory / "checkpoints", run=self.run_id, private=not self.stamp
            )
            state, done = self._start(checkpoints)
            saved = done
            self._open_files(stack, done)
            late = None if done else self._observe(0, {}, state)
            failure: BaseException | None = None
            while done < plan.rounds and failure is None:
                try:
                    state, metrics = self._round(done + 1, state)
                except BudgetExhausted as error:
                    failure = error
                else:
                    # If this raises, round `done` may not be released: nothing of it is saved.
                    self._record(late)
                    done += 1
                    late = self._observe(done, metrics, state)
                if signals and failure is None:
                    again = f"jaxpfl resume {self._resumed_as}"
                    failure = Interrupted(
                        signals[0], f"interrupted after round {done}; go on with: {again}"
                    )
                stop = failure is not None or done == plan.rounds
                if done != saved and (stop or done % every == 0):
                    self._record(late)
                    late = None
                    self._metrics.sync()
                    checkpoints.save(done, state, ledger_head=self.ledger.head)
                    saved = done
            self._record(late)
            result = self._finish(state, done)
            if failure is not None:
                raise failure
            return result

    def _begin(self, identity: dict[str, Any], started: bool) -> None:
        """Writes `run.json`, or refuses a directory that another config or plan began."""
        path = self.directory / "run.json"
        if started:
            begun = files.read_json(path).get("run")
            if begun != self.run_id:
                raise InputError(
                    f"{path}: is of run {begun}, expected {self.run_id}: the config, the plan or "
                    "the noise key is not the one this run began with"
                )
            self._require_environment(path)
            return
        plan = self.algorithm.plan
        record = {
            "run": self.run_id,
            "label": self.label,
            "private": not self.stamp,
            "stamp": self.stamp,
            "statement": self._statement(plan.rounds),
            "note": self.note,
            **identity,
            "unit": self.population.unit,
            "population": self.population.name,
            "devices": jax.device_count(),
            "backend": jax.default_backend(),
            "environment": self._environment,
            "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
        }
        files.write_atomically(path, json.dumps(jsonable(record), indent=1) + "\n")

    def _require_environment(self, path: Path) -> None:
        """Correlated noise is one draw for many rounds: all of them must be computed alike."""
        begun = files.read_json(path).get("environment")
        if self.algorithm.plan.noise != "independent" and begun != self._environment:
            raise InputError(
                f"{path}: the noise of this run is correlated between rounds, so it goes on only "
                f"where it began: on {begun}, found {self._environment}"
            )

    def _start(self, checkpoints: Checkpoints) -> tuple[Any, int]:
        """The state to go on from and the rounds behind it; the ledger must lead up to it."""
        state = initial_state(self.algorithm, self.seed)
        restored: Restored | None = checkpoints.restore(state, warn=self._progress.message)
        if restored is None:
            self.ledger.verify()
            return state, 0
        # A ledger cut off after the checkpoint would be charged too little.
        self.ledger.verify(restored.ledger_head)
        state = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), restored.state, state
        )
        self._progress.message(f"resumed after round {restored.round}")
        return state, restored.round

    def _open_files(self, stack: ExitStack, done: int) -> None:
        self._metrics = MetricsFile(self.directory / "metrics.jsonl")
        stack.callback(self._metrics.close)
        self._tensorboard = TensorBoard(
            self.directory / "tensorboard", resumed_after=done if done else None
        )
        stack.callback(self._tensorboard.close)
        self._private = PrivateLog(self.directory / "private")
        stack.callback(self._private.close)
        self._progress.begin(done)

    def _round(self, round: int, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        """One round: charged first, then sampled, packed and dispatched."""
        began = time.monotonic()
        plan, algorithm = self.algorithm.plan, self.algorithm
        self.ledger.charge(plan.round_event(round), self.label, run=self.run_id, round=round)
        cohort_clients = plan.sample(self._cohort_seed, round)
        cohort = Cohort(
            self.population,
            cohort_clients,
            algorithm.cohort,
            # Secret like the cohort: shuffles are addressed by index, and with a public seed the
            # removal of one client would reorder the others' batches for all to compute.
            seed=self._cohort_seed,
            round=round,
            shards=algorithm.shards,
        )
        keys = plan.keys(training_root(self._cohort_seed), self._noise_root, round)
        with prefetch(cohort) as buckets:
            state, metrics = algorithm.step(state, buckets, keys)
        self._private.append(
            {
                "round": round,
                "clients": len(cohort_clients),
                "padding_waste": cohort.stats.padding_waste,
                "seconds": time.monotonic() - began,
            }
        )
        return state, metrics

    def _observe(self, round: int, metrics: dict[str, jax.Array], state: Any) -> _Late:
        """Starts what is to be recorded of `round`, without waiting for the device."""
        tracking = self.tracking
        due = round % tracking.evaluate_every == 0 or round == self.algorithm.plan.rounds
        params = self.algorithm.params(state)
        return _Late(
            round,
            due,
            metrics,
            tracking.evaluate(params) if due and tracking.evaluate else None,
            tracking.sentences(params, round) if due and tracking.sentences else None,
        )

    def _record(self, late: _Late | None) -> None:
        """Fetches and writes one round's public metrics, and charges a release made twice."""
        if late is None:
            return
        round, plan = late.round, self.algorithm.plan
        fetched = jax.device_get(late.metrics)
        record: dict[str, Any] = {"round": round}
        if self.stamp:
            record["private"] = False
        for name, value in sorted(fetched.items()):
            record[name] = _hex(value) if name == "output_hash" else value
        if late.due:
            # Not every round: exact accounting takes about as long as a round does.
            record["epsilon"] = total.epsilon(plan, self.before, round, self._made_again())
        if late.evaluation is not None:
            record["evaluation"] = late.evaluation.result()
        if late.sentences is not None:
            record["sentences"] = late.sentences
        record = jsonable(record)
        recorded = self._metrics.recorded(round)
        if recorded is not None and recorded.get("output_hash") == record.get("output_hash"):
            # The same release; the lines after it stay, to be compared with.
            record = recorded
        self._charge_if_released_again(round, record)
        self._metrics.append(round, record)
        shown = _flat(record)
        prefix = "NOT_PRIVATE/" if self.stamp else ""
        self._tensorboard.scalars(round, {prefix + name: value for name, value in shown.items()})
        if record.get("epsilon") is not None and round:
            # Of the latest evaluation, which may be some rounds ago.
            self._shown["epsilon"] = f"{record['epsilon']:.4g} at round {round}"
        for name in ("perplexity", "accuracy"):
            if f"evaluation/{name}" in shown:
                self._shown[name] = f"{shown[f'evaluation/{name}']:.4g}"
        self._progress.update(round, self._shown)

    def _charge_if_released_again(self, round: int, record: dict[str, Any]) -> None:
        """Charges all recorded rounds from here on, if this one came out otherwise than recorded.

        All of them: what is recorded of the later ones is dropped now, and they follow from this
        one. In epochs, a client took part in one round of each.
        """
        before = self._metrics.recorded(round)
        if before is None or before.get("output_hash") == record.get("output_hash"):
            return
        self._progress.message(
            f"warning: round {round} was replayed and its output is not the one recorded before "
            "the crash (other hardware, devices or versions?): a second release of it and of the "
            "recorded rounds after it, charged again"
        )
        plan, charged = self.algorithm.plan, set()
        number = round
        while (before := self._metrics.recorded(number)) is not None:
            epoch = (number - 1) // plan.rounds_per_epoch if plan.sampling == "epochs" else number
            if epoch not in charged:
                charged.add(epoch)
                self.ledger.charge(
                    plan.released_again_event(),
                    f"{self._again_label} in place of {before.get('output_hash')}",
                    run=self.run_id,
                    round=number,
                )
            number += 1

    @property
    def _again_label(self) -> str:
        return f"{self.label} released again"

    def _made_again(self) -> list[DpEvent]:
        """The events of this run's rounds that were released a second time."""
        return [
            charge.event
            for charge in self.ledger.charges
            if charge.run == self.run_id and charge.label.startswith(self._again_label)
        ]

    def _finish(self, state: Any, done: int) -> Result:
        """Writes `result.json` and returns what the run came to."""
        plan = self.algorithm.plan
        metrics: dict[str, Any] = {}
        for round in range(done + 1):
            metrics.update(self._metrics.recorded(round) or {})
        # Those of the last evaluation may be older than the last round.
        again = self._made_again()
        metrics["epsilon"] = total.epsilon(plan, self.before, done, again)
        statement = self._statement(done, again)
        if done < plan.rounds:
            statement += f", after {done} of {plan.rounds} rounds"
        if self.stamp and not statement.startswith("NOT PRIVATE"):
            statement = f"{self.stamp}; it would be {statement}"
        if self.note:
            statement += f"; {self.note}"
        record = {
            "run": self.run_id,
            "rounds": done,
            "private": not self.stamp,
            "privacy": statement,
            "metrics": metrics,
        }
        files.write_atomically(
            self.directory / "result.json", json.dumps(jsonable(record), indent=1) + "\n"
        )
        params = self.algorithm.params(state)
        return Result(statement, metrics, done, self.directory, params)

    def _statement(self, rounds: int, again: Sequence[DpEvent] = ()) -> str:
        return total.statement(self.algorithm.plan, self.before, rounds, self.before_what, again)


def initial_state(algorithm: Algorithm, seed: int) -> Any:
    """The state before round 1, a function of the seed."""
    return algorithm.init(jax.random.fold_in(training_root(seed), _INIT))


def _check(algorithm: Algorithm, population: Population) -> None:
    """Refuses data that does not fit, before round 1 and before any charge."""
    plan = algorithm.plan
    if plan.unit != "client":
        raise InputError(f"a run protects clients, found a plan with unit = {plan.unit!r}")
    if len(population) != plan.population:
        raise InputError(
            f"the plan is for a population of {plan.population} clients, the data has "
            f"{len(population)}: an epsilon is only true for its own population"
        )
    slots = algorithm.cohort.clients_per_bucket
    if slots % algorithm.shards:
        raise InputError(
            f"clients_per_bucket = {slots} must be a multiple of the {algorithm.shards} devices "
            "that share a cohort"
        )
    for name in algorithm.model.columns:
        if name not in population.columns:
            found = ", ".join(sorted(population.columns)) or "none"
            raise InputError(f"the model reads a column {name!r}, the data has: {found}")


def _cohort_seed(seed: int, noise_key: jax.Array) -> int:
    """The seed of the sampler: the config's seed and the secret noise key together.

    Amplification by sampling holds only while nobody knows who took part, and the config's seed
    is public.
    """
    words = key_to_words(noise_key)
    return int.from_bytes(hashlib.sha256(f"cohorts {seed} {words}".encode()).digest()[:16], "big")


def saved_noise_key(
    path: Path, seed: int, reproducible: bool, *, purpose: str | None = None
) -> jax.Array:
    """A noise key: the one saved in `path`, else a new one, saved before its first use.

    Args:
      purpose: keeps two keys of one run apart where they follow the seed.
    """
    if path.exists():
        return key_from_words(files.read_json(path)["words"])
    key = noise_root(reproducible_seed=seed if reproducible else None)
    if purpose is not None:
        number = hashlib.sha256(f"noise for {purpose}".encode()).digest()[:4]
        key = jax.random.fold_in(key, int.from_bytes(number, "big"))
    record = {"words": jsonable(key_to_words(key))}
    files.write_atomically(path, json.dumps(record) + "\n", mode=0o600)
    return key


def _run_id(identity: dict[str, Any], noise_key: jax.Array) -> str:
    described = json.dumps(jsonable(identity), sort_keys=True)
    words = json.dumps(jsonable(key_to_words(noise_key)))
    return hashlib.sha256(f"{described}\n{words}".encode()).hexdigest()[:12]


def _hex(words: np.ndarray) -> str:
    return "".join(f"{int(word):08x}" for word in np.asarray(words).reshape(-1))


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, nested ones under `name/inner`."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers.update(_flat(value, f"{prefix}{name}/"))
        elif isinstance(value, float):
            numbers[f"{prefix}{name}"] = value
    return numbers


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a round ends and is saved; a second one is not held."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        restore()

    for number in numbers:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        restore()
