"""The parameters of a finished run, read without its clients.

A run that is not finished, or whose files contradict each other, is refused: what is read here is
published with the run's statement.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan


def planned(folder: Path, config: Mapping[str, Any]) -> Plan:
    """The plan of the finished run in a folder, which must have begun with this config."""
    run = files.read_record(folder / "run.json", {"config": dict, "plan": dict})
    result = files.read_record(folder / "result.json", {"rounds": int, "stopped": bool})
    if run["config"] != config:
        raise InputError(
            f"{folder / 'run.json'}: the run began with another config than config.yaml says: "
            "one of the two was altered"
        )
    plan = Plan.from_dict(run["plan"])
    if result["rounds"] != plan.rounds and not result["stopped"]:
        raise InputError(
            f"{folder}: the run is not finished: {result['rounds']} of {plan.rounds} rounds "
            "are done; go on with `jaxpfl resume`"
        )
    return plan


def final_params(
    folder: Path,
    algorithm: Algorithm,
    seed: int,
    *,
    ledger: Path,
    privacy: str,
) -> Any:
    """The parameters that the finished run in `folder` ended with: of its last or best round.

    Args:
      algorithm: the run's own, of the plan that `planned` returns; none of its queries is asked.
      privacy: the statement of the run, which must contain what its ledger says of it and of the
        runs that it depends on.
    """
    run = files.read_record(folder / "run.json", {"run": str, "prior": list})
    result = files.read_record(folder / "result.json", {"rounds": int, "kept": int | None})
    place = folder / "checkpoints"

    def refuse(message: str) -> None:
        raise CorruptFile(message)

    assert algorithm.params is not None
    state, restored = initial_state(algorithm, seed), None
    like = state if result["kept"] is None else (state, algorithm.params(state))
    if place.is_dir():
        # An earlier checkpoint is no substitute for the last one.
        checkpoints = Checkpoints(place, run=run["run"])
        restored = checkpoints.restore(like, warn=refuse)
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
        raise CorruptFile(
            f"{path}: the charges of the run do not cost what the run's statement says, which is "
            f"{privacy!r}: one of the two was altered"
        )
