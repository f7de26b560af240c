"""A run that several processes of `jax.distributed` share; see `federated.hosts.processes`.

Process 0 carries out the run as if it were alone, with the devices of all. The others prepare the
same queries and clients, sum their share of each release, and receive the result. They write
nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import errors, files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.experiments.engine.setting import Result
from jaxpfl.experiments.engine.signals import Interrupted, caught_signals
from jaxpfl.federated import mesh
from jaxpfl.federated.hosts import trees
from jaxpfl.federated.hosts.processes import Group
from jaxpfl.federated.hosts.shared_rounds import Asks, SharedRounds, Tasks
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.releaser import OneRelease

# What a result says in JSON's types.
_FIELDS = (
    "run", "privacy", "metrics", "rounds", "kept", "evaluated_on", "epsilons", "cautions", "table"
)  # fmt: skip


@contextmanager
def group() -> Iterator[Group | None]:
    """The processes that share the run; None where this one is alone."""
    if not mesh.several():
        yield None
        return
    with Group() as processes:
        yield processes


def others_of(group: Group | None, asks: Asks, tasks: Tasks | None = None) -> SharedRounds | None:
    """The other processes, once all have begun; None where there are none."""
    return None if group is None else SharedRounds(group, asks, tasks)


def share_rounds(others: SharedRounds) -> dict[str, Any]:
    """Sums this process's share of each round, and returns what process 0 broadcasts at the end.

    It raises what process 0 has raised, or `RuntimeError` if that is no error of ours.
    """
    # A signal that comes to all processes stops process 0 after its round, which needs this one.
    with caught_signals():
        message = others.serve()
    if "failed" not in message:
        return message
    kind, sentence = message["failed"], message["sentence"]
    if kind == Interrupted.__name__:
        raise Interrupted(message["number"], sentence)
    error = getattr(errors, kind, None)
    if error is None:
        raise RuntimeError(f"process 0 of this run failed: {sentence}")
    raise error(sentence)


def one_release(
    ask: Callable[[SharedRounds], OneRelease], query: Query, clients: Population
) -> OneRelease:
    """The release that process 0 makes by `ask`, in all processes."""
    with Group() as processes:
        others = SharedRounds(processes, lambda *_: ((query,), clients))
        if processes.index:
            statement = share_rounds(others)
            return OneRelease(jax.device_get(others.released), **statement)
        made = ask(others.at(query.label))
        processes.tell(privacy=made.privacy, ledger=made.ledger)
        return made


def broadcast_result(group: Group, result: Result) -> None:
    """Process 0 broadcasts the result of a run."""
    fields = {name: getattr(result, name) for name in _FIELDS}
    arrays = [result.state] if result.kept is None else [result.state, result.params]
    arrays = jax.tree.map(np.asarray, arrays)
    shapes = trees.described(arrays, "the state of the algorithm after its last round")
    group.tell(**files.jsonable(fields), arrays=shapes)
    group.send(trees.content_of(jax.tree.leaves(arrays)))


def received_result(
    group: Group, outcome: dict[str, Any], algorithm: Algorithm, out: Path
) -> Result:
    """The result that process 0 broadcasts, in another process, whose `out` has no file of it."""
    shapes, structure = jax.tree.flatten(trees.shapes_of(outcome.pop("arrays")))
    leaves = map(jnp.asarray, trees.received(shapes, group.receive))
    state, *kept = jax.tree.unflatten(structure, leaves)
    params = None if algorithm.params is None else algorithm.params(state)
    params = kept[0] if kept else params
    lists = {name: tuple(outcome[name]) for name in ("cautions", "table")}
    return Result(**{**outcome, **lists}, out=out, state=state, params=params)
