"""The loop over rounds, the same for a new run, a resumed run, and a run without privacy.

    for each round r:
        step                                   its releases are charged on the disk BEFORE any
                                               client's data is read, and recorded there BEFORE the
                                               step sees them (`federated.release.releaser`)
        publish round r - 1                    `observers`
        at intervals: checkpoint               written while the next rounds run (`checkpoint`)

After a crash the ledger can be ahead of the metrics, and the metrics ahead of the checkpoint. A
resumed run therefore repeats the rounds after its checkpoint. With the stored secret a repeated
round makes the same release at no further cost; if its result differs nevertheless, it is another
release, and the releaser charges it. The cost of the run is therefore read from its ledger.

Rounds count from 1: round r leads from the state after r - 1 rounds to the state after r.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, Interrupted
from jaxpfl.experiments.engine.cost import OWN
from jaxpfl.experiments.engine.observers import Observers
from jaxpfl.experiments.engine.on_round import last_kept
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Result, Tracking, mark_of
from jaxpfl.experiments.records.cautions import of_rounds
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.federated.mesh import leads
from jaxpfl.federated.release.releaser import Releaser
from jaxpfl.models.base import named_leaves, require_same_leaves, schema
from jaxpfl.privacy.keys import INITIAL_STATE, training_root
from jaxpfl.progress import Progress
from jaxpfl.signals import caught_signals

_AGAIN = (
    "charges of later rounds on the ledger: {}. These rounds are made again, with the same cohorts "
    "and noise and at no further cost, or charged anew where data, versions or machine have changed"
)


@dataclass
class Loop:
    """The rounds of a run, with checkpoints and public metrics.

    Where several processes share the run, all carry out its rounds. Process 0 alone has the files,
    and decides with which state the rounds begin, whether they go on, and what their result is.
    """

    run: Run
    tracking: Tracking

    def __post_init__(self) -> None:
        evaluated = self.tracking.evaluate or self.tracking.sentences
        if evaluated and self.run.algorithm.params is None:
            raise InputError(
                f"{self.run.algorithm.name!r} trains no model, so nothing can be evaluated: leave "
                "out the evaluation"
            )

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
            plan = algorithm.queries[0].plan
            mark = f" ({mark_of(run.stamp)})" if run.stamp else ""
            shown = self.tracking.progress and leads()
            how: dict[str, Any] = {"progress": shown, "step": "round"}
            if plan.unit == "client":
                how["clients"] = round(plan.denominator)
            self._bar = Progress(algorithm.name + mark, total=algorithm.rounds, **how)
            stack.enter_context(self._bar)
            stack.enter_context(run)
            evaluate = self.tracking.evaluate
            run.begin(None if evaluate is None else evaluate.name)
            state, done = self._going_on(stack)
            releaser = None
            if done < algorithm.rounds:
                releaser = run.releaser(warn=self._warn, done=done)
            goes_on = decide(
                "the first round", partial(self._before, stack, state, done, releaser), signals
            )
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
                goes_on = decide(
                    f"the end of round {done}",
                    partial(self._after, state, metrics, done, failure),
                    signals,
                )
            fields, leaves, kept = decide("the result", partial(self._end, state, done), signals)
            state = _tree(state, leaves)
            params = None if algorithm.params is None else algorithm.params(state)
            if kept is not None:
                params = _tree(params, kept)
            lists = {name: tuple(fields[name]) for name in ("cautions", "table")}
            return Result(**{**fields, **lists}, out=run.path, state=state, params=params)

    def _going_on(self, stack: ExitStack) -> tuple[Any, int]:
        """State and rounds to go on from."""
        state = initial_state(self.run.algorithm, self.run.setting.seed)
        begin = partial(self._begin, stack, state)
        leaves, done = decide("the state that the rounds go on from", begin)
        return _tree(state, leaves), done

    def _begin(self, stack: ExitStack, state: Any) -> tuple[list[Any], int]:
        folder, run = self.run.path / "checkpoints", self.run
        checkpoints = Checkpoints(folder, run=run.id, private=not run.stamp)
        self._checkpoints = stack.enter_context(checkpoints)
        state, self._best, done = self._start(checkpoints, self._bar, state)
        self._bar.begin(done)
        return jax.tree.leaves(state), done

    def _before(
        self,
        stack: ExitStack,
        state: Any,
        done: int,
        releaser: Releaser | None,
        signals: list[list[int]],
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
        self,
        state: Any,
        metrics: Mapping[str, Any],
        done: int,
        failure: BaseException | None,
        signals: list[list[int]],
    ) -> bool:
        """Publishes and saves a round, or those before a failure; whether the next one follows."""
        run, observers, checkpoints = self.run, self._observers, self._checkpoints
        observers.publish()
        if failure is None:
            observers.observe(done, metrics, state)
            if any(signals):
                message = self._interrupted(f"after round {done}")
                failure = Interrupted(max(signals)[0], message)
        self._failure = failure
        stop = observers.stopped or done == run.algorithm.rounds or failure is not None
        if done != self._saved and (stop or done % self.tracking.checkpoint_every == 0):
            # What is published was charged to a ledger that is still there.
            run.ledger.require_unchanged()
            observers.publish()
            observers.metrics.sync()
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
        self, state: Any, done: int, signals: list[list[int]]
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
        fields: dict[str, Any] = {
            "run": run.id,
            "privacy": cost.statement(),
            "metrics": {**observers.latest(shown), "epsilon": epsilons[OWN]},
            "rounds": done,
            "kept": best_round,
            "evaluated_on": evaluated_on,
            "epsilons": epsilons,
            "cautions": tuple(of_rounds(records[: shown + 1], evaluated_on or "")),
            "table": (),
        }
        result = Result(**fields, out=run.path, state=state, params=kept)
        fields["privacy"] = run.end(result, stopped=observers.stopped).privacy
        if self._failure is not None:
            raise self._failure
        return fields, jax.tree.leaves(state), None if best_round is None else jax.tree.leaves(kept)

    def _start(self, checkpoints: Checkpoints, bar: Progress, state: Any) -> tuple[Any, Any, int]:
        """State, kept parameters and rounds to go on from, which the ledger must cover."""
        run, algorithm = self.run, self.run.algorithm
        last = checkpoints.rounds()[-1:]
        records = read_lines(run.path / "metrics.jsonl")[: last[0] + 1 if last else 0]
        keeps, params = last_kept(records) is not None, algorithm.params
        like = (state, params(state)) if keeps and params is not None else state
        restored = checkpoints.restore(like, warn=bar.message)
        finished = run.finished
        if finished is not None and (restored is None or restored.round < finished):
            raise CorruptFile(
                f"{checkpoints.directory}: the run is finished and its secret is gone, so no round "
                "can be repeated, but its last checkpoint is missing or damaged"
            )
        done = 0
        if restored is not None:
            done = restored.round
            run.ledger.verify(restored.ledger_head)
        again = sum(charge.run == run.id and charge.round > done for charge in run.ledger.charges)
        if restored is not None or again:
            bar.message(
                f"resumed after round {done}" + (f"; {_AGAIN.format(again)}" if again else "")
            )
        if restored is None:
            return state, None, 0
        state, best = restored.state if keeps else (restored.state, None)
        return state, best, done

    def _warn(self, message: str) -> None:
        self._bar.message(f"warning: {message}")

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
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise InputError(
            f"step of {name!r} must return (state, metrics), metrics a dictionary, found {kinds}"
        )
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
