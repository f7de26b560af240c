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

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError
from jaxpfl.experiments.engine.cost import OWN
from jaxpfl.experiments.engine.observers import Observers
from jaxpfl.experiments.engine.on_round import last_kept
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Result, Tracking, mark_of
from jaxpfl.experiments.engine.signals import Interrupted, caught_signals
from jaxpfl.experiments.records.cautions import of_rounds
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.federated.release.releaser import OtherProcesses
from jaxpfl.models.base import named_leaves, require_same_leaves, schema
from jaxpfl.privacy.keys import INITIAL_STATE, training_root
from jaxpfl.progress import Progress

_AGAIN = (
    "charges of later rounds on the ledger: {}. These rounds are made again, with the same cohorts "
    "and noise and at no further cost, or charged anew where data, versions or machine have changed"
)


@dataclass
class Loop:
    """The rounds of a run, with checkpoints and public metrics.

    Attributes:
      others: comes to the rounds with the other processes, if there are any.
    """

    run: Run
    tracking: Tracking
    others: Callable[[], OtherProcesses | None] = lambda: None

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
            late = self._interrupted("after the last round")
            signals = stack.enter_context(caught_signals(late))
            plan = algorithm.queries[0].plan
            mark = f" ({mark_of(run.stamp)})" if run.stamp else ""
            how: dict[str, Any] = {"progress": self.tracking.progress, "step": "round"}
            if plan.unit == "client":
                how["clients"] = plan.clients_per_round
            bar = Progress(algorithm.name + mark, total=algorithm.rounds, **how)
            stack.enter_context(bar)
            stack.enter_context(run)
            ledger, cost, evaluate = run.ledger, run.cost, self.tracking.evaluate
            run.begin(None if evaluate is None else evaluate.name)
            folder = run.path / "checkpoints"
            checkpoints = Checkpoints(folder, run=run.id, private=not run.stamp)
            stack.enter_context(checkpoints)
            state, best, done = self._start(checkpoints, bar)
            bar.begin(done)
            releaser = None
            if done < algorithm.rounds:
                releaser = run.releaser(
                    warn=lambda message: bar.message(f"warning: {message}"),
                    others=self.others,
                    done=done,
                )
            observers = stack.enter_context(
                Observers(run, self.tracking, bar, done=done, kept=best)
            )
            if not done:
                observers.observe(0, {}, state)
            if signals and done < algorithm.rounds:
                # What came during the set-up: nothing was asked of the clients, and nothing is.
                when = f"after round {done}" if done else "before the first round"
                raise Interrupted(signals[0], self._interrupted(when))
            saved, failure = done, None
            while done < algorithm.rounds and not observers.stopped and failure is None:
                assert releaser is not None
                try:
                    returned = releaser.step(algorithm.step, state, done + 1)
                    state, metrics = _of_step(algorithm.name, state, returned)
                except BudgetExhausted as error:
                    failure, metrics = error, {}
                else:
                    done += 1
                observers.publish()
                if failure is None:
                    observers.observe(done, metrics, state)
                    if signals:
                        message = self._interrupted(f"after round {done}")
                        failure = Interrupted(signals[0], message)
                ended = observers.stopped or done == algorithm.rounds
                stop = ended or failure is not None
                if done != saved and (stop or done % self.tracking.checkpoint_every == 0):
                    # What is published was charged to a ledger that is still there.
                    ledger.require_unchanged()
                    observers.publish()
                    observers.metrics.sync()
                    ledger.require_unchanged()
                    checkpoints.wait()  # What is forgotten must not depend on the disk's speed.
                    for states in releaser.client_states:
                        states.sync()
                        states.forget(min(checkpoints.rounds(), default=0))
                    saved_state = state if observers.kept is None else (state, observers.kept)
                    checkpoints.save(done, saved_state, ledger_head=ledger.head)
                    saved = done
            observers.publish()
            # A finished run deletes its secret, so its last checkpoint must be on the disk first.
            checkpoints.wait()
            epsilons = cost.epsilons()
            records = observers.metrics.records[: done + 1]
            best_round, params = last_kept(records), observers.kept
            shown = done if best_round is None else best_round
            if best_round is None and algorithm.params is not None:
                params = algorithm.params(state)
            evaluated_on = run.record["evaluation"]
            result = Result(
                run=run.id,
                privacy=cost.statement(),
                metrics={**observers.latest(shown), "epsilon": epsilons[OWN]},
                rounds=done,
                out=run.path,
                state=state,
                params=params,
                kept=best_round,
                evaluated_on=evaluated_on,
                epsilons=epsilons,
                cautions=tuple(of_rounds(records[: shown + 1], evaluated_on or "")),
            )
            result = run.end(result, stopped=observers.stopped)
            if failure is not None:
                raise failure
            return result

    def _start(self, checkpoints: Checkpoints, bar: Progress) -> tuple[Any, Any, int]:
        """State, kept parameters and rounds to go on from, which the ledger must cover."""
        run, algorithm = self.run, self.run.algorithm
        state, last = initial_state(algorithm, run.setting.seed), checkpoints.rounds()[-1:]
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

    def _interrupted(self, when: str) -> str:
        how = "call jaxpfl.run again with the same arguments and resume=True"
        if self.run.setting.resumed_as is not None:
            how = f"resume with: jaxpfl resume {self.run.setting.resumed_as}"
        return f"interrupted {when}; {how}"


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
