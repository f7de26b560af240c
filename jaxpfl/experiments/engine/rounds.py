"""The loop over rounds, the same for a new run, a resumed run, and a run without privacy.

    for each round r:
        step                                   its releases are charged on the disk BEFORE any
                                               client's data is read, and recorded there BEFORE the
                                               step sees them (`federated.release.releaser`)
        publish round r - 1                    `observers`
        at intervals: checkpoint               written while the next rounds run (`checkpoint`)

After a crash the ledger can be ahead of the metrics, and the metrics ahead of the checkpoint, after
which a resumed run repeats the rounds. With the stored secret a repeated round makes the same
release at no further cost; if its result differs nevertheless, it is another release, and is
charged. The cost of the run is therefore read from its ledger. Rounds count from 1.

The parameters of a finished run are read without its clients, and published with its statement: a
run that is not finished, or whose files contradict each other, is refused.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, Interrupted
from jaxpfl.experiments.engine.cost import OWN
from jaxpfl.experiments.engine.observers import Observers
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Result, Tracking, last_kept, mark_of
from jaxpfl.experiments.records.cautions import of_rounds
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.federated.mesh import leads
from jaxpfl.federated.release.releaser import Releaser
from jaxpfl.models.base import named_leaves, require_same_leaves, schema
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.keys import INITIAL_STATE, training_root
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan
from jaxpfl.progress import Progress
from jaxpfl.signals import caught_signals

Signals = list[list[int]]
"""The numbers of the signals that each process has received."""
_AGAIN = (
    "charges of later rounds on the ledger: {}. These rounds are made again, with the same cohorts "
    "and noise and at no further cost, or charged anew where data, versions or machine have changed"
)


@dataclass
class Loop:
    """The rounds of a run, with checkpoints and public metrics.

    All processes that share the run carry out its rounds. Process 0 alone has the files, and
    decides with which state the rounds begin, whether they go on, and what their result is.
    """

    run: Run
    tracking: Tracking

    def __post_init__(self) -> None:
        algorithm, evaluated = self.run.algorithm, self.tracking.evaluate or self.tracking.sentences
        if evaluated and algorithm.params is None:
            how = "trains no model to evaluate: leave out the evaluation"
            raise InputError(f"{algorithm.name!r} {how}")

    def carry_out(self) -> Result:
        """Carries out the remaining rounds; if it ends early, what was done before is saved.

        Raises:
          BudgetExhausted, Interrupted: as `jaxpfl.run`.
          CorruptFile: the ledger or the run's lock was changed from outside meanwhile; the last
            checkpoint is of an earlier round.
        """
        run, algorithm = self.run, self.run.algorithm
        with ExitStack() as stack:
            # In another process, a signal that process 0 has not heard of ends nothing.
            late = self._interrupted("after the last round") if leads() else None
            signals = stack.enter_context(caught_signals(late))
            plan, shown = algorithm.queries[0].plan, self.tracking.progress and leads()
            label = algorithm.name + (f" ({mark_of(run.stamp)})" if run.stamp else "")
            clients = round(plan.denominator) if plan.unit == "client" else None
            how: dict[str, Any] = {"progress": shown, "step": "round", "clients": clients}
            self._bar = stack.enter_context(Progress(label, total=algorithm.rounds, **how))
            stack.enter_context(run)
            evaluate = self.tracking.evaluate
            run.begin(None if evaluate is None else evaluate.name)
            state, releaser = initial_state(algorithm, run.setting.seed), None
            begin = partial(self._begin, stack, state)
            leaves, done = decide("the state that the rounds go on from", begin)
            state = _tree(state, leaves)
            if done < algorithm.rounds:
                releaser = run.releaser(
                    warn=lambda text: self._bar.message(f"warning: {text}"), done=done
                )
            first = partial(self._before, stack, state, done, releaser)
            goes_on = decide("the first round", first, signals)
            while done < algorithm.rounds and goes_on:
                assert releaser is not None
                failure, metrics = None, {}
                try:
                    returned = releaser.step(algorithm.step, state, done + 1)
                    state, metrics = _of_step(algorithm.name, state, returned)
                except BudgetExhausted as error:
                    failure = error
                else:
                    done += 1
                after = partial(self._after, state, metrics, done, failure)
                goes_on = decide(f"the end of round {done}", after, signals)
            fields, leaves, kept = decide("the result", partial(self._end, state, done), signals)
            state = _tree(state, leaves)
            params = None if algorithm.params is None else algorithm.params(state)
            if kept is not None:
                params = _tree(params, kept)
            # A tuple arrives as a list in other processes.
            fields |= {"cautions": tuple(fields["cautions"])}
            return Result(**fields, out=run.path, state=state, params=params)

    def _begin(self, stack: ExitStack, state: Any) -> tuple[list[Any], int]:
        """Leaves of the state, and rounds, to go on from, which the ledger must cover."""
        run, algorithm, bar = self.run, self.run.algorithm, self._bar
        checkpoints = Checkpoints(run.path / "checkpoints", run=run.id, private=not run.stamp)
        self._checkpoints = stack.enter_context(checkpoints)
        last = checkpoints.rounds()[-1:]
        records = read_lines(run.path / "metrics.jsonl")[: last[0] + 1 if last else 0]
        keeps, params = last_kept(records) is not None, algorithm.params
        like = (state, params(state)) if keeps and params is not None else state
        restored = checkpoints.restore(like, warn=bar.message)
        finished = run.finished
        if finished is not None and (restored is None or restored.round < finished):
            gone = "the run is finished and its secret is gone, so no round can be repeated"
            lost = f"{gone}, but its last checkpoint is missing or damaged"
            raise CorruptFile(f"{checkpoints.directory}: {lost}")
        self._best, done = None, 0
        if restored is not None:
            state, self._best = restored.state if keeps else (restored.state, None)
            done = restored.round
            run.ledger.verify(restored.ledger_head)
        again = sum(charge.run == run.id and charge.round > done for charge in run.ledger.charges)
        if restored is not None or again:
            more = f"; {_AGAIN.format(again)}" if again else ""
            bar.message(f"resumed after round {done}{more}")
        bar.begin(done)
        return jax.tree.leaves(state), done

    def _before(
        self, stack: ExitStack, state: Any, done: int, releaser: Releaser | None, signals: Signals
    ) -> bool:
        """Whether the rounds go on after those that are done."""
        self._releaser, self._saved, self._failure = releaser, done, None
        observers = Observers(self.run, self.tracking, self._bar, done=done, kept=self._best)
        self._observers = stack.enter_context(observers)
        if not done:
            observers.observe(0, {}, state)
        if any(signals) and done < self.run.algorithm.rounds:
            # What came during the set-up: nothing was asked of the clients, and nothing is.
            when = f"after round {done}" if done else "before the first round"
            raise Interrupted(max(signals)[0], self._interrupted(when))
        return not observers.stopped

    def _after(
        self, state: Any, metrics: Any, done: int, failure: BaseException | None, signals: Signals
    ) -> bool:
        """Publishes and saves a round, or those before a failure; whether the next one follows."""
        run, observers, checkpoints = self.run, self._observers, self._checkpoints
        observers.publish()
        if failure is None:
            observers.observe(done, metrics, state)
            if any(signals):
                failure = Interrupted(max(signals)[0], self._interrupted(f"after round {done}"))
        self._failure = failure
        stop = observers.stopped or done == run.algorithm.rounds or failure is not None
        if done != self._saved and (stop or done % self.tracking.checkpoint_every == 0):
            # What is published was charged to a ledger that is still there.
            run.ledger.require_unchanged()
            observers.publish()
            files.sync(observers.metrics.file)
            run.ledger.require_unchanged()
            checkpoints.wait()  # What is forgotten must not depend on the disk's speed.
            assert self._releaser is not None
            for states in self._releaser.client_states:
                states.sync()
                states.forget(min(checkpoints.rounds(), default=0))
            saved_state = state if observers.kept is None else (state, observers.kept)
            checkpoints.save(done, saved_state, ledger_head=run.ledger.head)
            self._saved = done
        return not stop

    def _end(
        self, state: Any, done: int, signals: Signals
    ) -> tuple[dict[str, Any], list[Any], list[Any] | None]:
        """The fields of the result, and the leaves of its state and of the parameters it kept."""
        # Those of the other processes end what follows the run, as this one's own do.
        signals[0].extend(number for others in signals[1:] for number in others)
        run, observers, cost = self.run, self._observers, self.run.cost
        observers.publish()
        # A finished run deletes its secret, so its last checkpoint must be on the disk first.
        self._checkpoints.wait()
        epsilons, kept = cost.epsilons(), observers.kept
        records = observers.metrics.records[: done + 1]
        best_round = last_kept(records)
        shown = done if best_round is None else best_round
        evaluated_on = run.record["evaluation"]
        cautions = tuple(of_rounds(records[: shown + 1], evaluated_on or ""))
        # The latest value of each, because not every round has all metrics.
        metrics = dict(ChainMap(*records[shown::-1])) | {"epsilon": epsilons[OWN]}
        fields: dict[str, Any] = {"run": run.id, "privacy": cost.statement(), "metrics": metrics}
        fields |= {"rounds": done, "kept": best_round, "evaluated_on": evaluated_on}
        fields |= {"epsilons": epsilons, "cautions": cautions}
        result = Result(**fields, out=run.path, state=state, params=kept)
        fields["privacy"] = run.end(result, stopped=observers.stopped).privacy
        if self._failure is not None:
            raise self._failure
        return fields, jax.tree.leaves(state), None if best_round is None else jax.tree.leaves(kept)

    def _interrupted(self, when: str) -> str:
        how = "call jaxpfl.run again with the same arguments and resume=True"
        if self.run.setting.resumed_as is not None:
            how = f"resume with: jaxpfl resume {self.run.setting.resumed_as}"
        return f"interrupted {when}; {how}"


def _tree(like: Any, leaves: Sequence[Any]) -> Any:
    """The leaves of process 0 in the structure and the places of a tree of this process."""

    def placed(leaf: Any, like: Any) -> Any:
        here = isinstance(leaf, jax.Array) or not isinstance(like, jax.Array)
        return leaf if here else jax.device_put(leaf, like.sharding)

    own, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(placed, leaves, own))


def _of_step(name: str, before: Any, returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a step has returned, which must be as `Algorithm` says."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    if len(parts) != 2 or not isinstance(parts[1], Mapping):
        form = f"metrics a dictionary, found {', '.join(type(part).__name__ for part in parts)}"
        raise InputError(f"step of {name!r} must return (state, metrics), {form}")
    for metric, value in parts[1].items():
        if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
            shown = f"{value!s:.60}".replace("\n", "")
            raise InputError(f"metric {metric!r} of {name!r} must be a number, found {shown}")
    state = f"the state that step of {name!r} returns"
    require_same_leaves(schema(named_leaves(parts[0])), named_leaves(before), state)
    return parts


def initial_state(algorithm: Algorithm, seed: int) -> Any:
    """The state before round 1, of arrays; depends on the seed alone."""
    state = algorithm.init(jax.random.fold_in(training_root(seed), INITIAL_STATE))
    leaves = jax.tree.leaves(state)
    if not leaves or not all(hasattr(leaf, "dtype") for leaf in leaves):
        raise InputError(f"init of {algorithm.name!r} must return arrays, found {state!s:.60}")
    return state


def planned(folder: Path, config: Mapping[str, Any]) -> Plan:
    """The plan of the finished run in a folder, which must have begun with this config."""
    run = files.read_record(folder / "run.json", {"config": dict, "plan": dict})
    result = files.read_record(folder / "result.json", {"rounds": int, "stopped": bool})
    if run["config"] != config:
        what = "the run began with another config than config.yaml says: one of the two was altered"
        raise InputError(f"{folder / 'run.json'}: {what}")
    plan = Plan.from_dict(run["plan"])
    if result["rounds"] != plan.rounds and not result["stopped"]:
        done = f"{result['rounds']} of {plan.rounds} rounds are done; go on with `jaxpfl resume`"
        raise InputError(f"{folder}: the run is not finished: {done}")
    return plan


def final_params(
    folder: Path, algorithm: Algorithm, seed: int, *, ledger: Path, privacy: str
) -> Any:
    """The parameters that the finished run in `folder` ended with: of its last or best round.

    The run's `algorithm` is of the plan that `planned` returns. The statement `privacy` must
    contain what the ledger says of the run and of those that it depends on.
    """
    run = files.read_record(folder / "run.json", {"run": str, "prior": list})
    result = files.read_record(folder / "result.json", {"rounds": int, "kept": int | None})
    place = folder / "checkpoints"
    assert algorithm.params is not None
    state, restored, skipped = initial_state(algorithm, seed), None, list[str]()
    like = state if result["kept"] is None else (state, algorithm.params(state))
    if place.is_dir():
        restored = Checkpoints(place, run=run["run"]).restore(like, warn=skipped.append)
    if skipped:  # an earlier checkpoint is no substitute for the last one
        raise CorruptFile(skipped[0])
    if restored is None or restored.round != result["rounds"]:
        raise CorruptFile(f"{place}: the checkpoint of the last round, {result['rounds']}, is gone")
    plan = algorithm.queries[0].plan
    check_statement(privacy, ledger, (run["run"], *run["prior"]), plan, head=restored.ledger_head)
    return algorithm.params(restored.state) if result["kept"] is None else restored.state[1]


def check_statement(
    privacy: str, path: Path, runs: Sequence[str], plan: Plan, *, head: str | None = None
) -> None:
    """Refuses a statement that does not say what the charges of these runs cost."""
    if not path.exists():
        raise CorruptFile(f"{path}: the run's ledger is missing")
    ledger = Ledger.read(path)
    ledger.verify(head)
    if not plan.private:
        return
    own = [charge.event for charge in ledger.charges if charge.run in runs]
    guarantee = Guarantee.of_events(own, plan.delta, ledger.unit, plan.accountant)
    if not own or guarantee.statement() not in privacy:
        what = f"the charges do not cost what the run's statement says, which is {privacy!r}"
        raise CorruptFile(f"{path}: {what}: one of the two was altered")
