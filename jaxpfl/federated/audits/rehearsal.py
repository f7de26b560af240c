"""A round without clients: its programs are traced on made-up shapes, not compiled and not run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.federated.flow.check import InformationFlow
from jaxpfl.federated.mesh import PyTree
from jaxpfl.federated.release.information_flow import check_client, check_release
from jaxpfl.federated.release.preparation import prepared
from jaxpfl.federated.release.prepared_query import opened
from jaxpfl.federated.release.query import Query, arrays, read_columns, require_room
from jaxpfl.federated.release.releaser import Released


@dataclass(frozen=True)
class QuerySize:
    """The traffic and the memory of a query; sizes in bytes."""

    label: str
    down: int  # what a client receives in a round
    up: int  # what it sends
    bucket: int  # the largest bucket of clients' examples
    side_by_side: int  # the clients whose computations are in memory at a time, on all devices
    sums: int  # the running sums, on all devices


@dataclass(frozen=True)
class Rehearsed:
    """The traffic and the memory of an algorithm's rounds; `state` is the server's, in bytes."""

    state: int
    queries: tuple[QuerySize, ...]


def column(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A made-up column of examples of this shape and dtype, which holds none."""
    return np.empty((0, *shape), dtype)


def size_of(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def ask(
    query: Query, broadcast: PyTree, columns: Mapping[str, np.ndarray]
) -> tuple[QuerySize, PyTree]:
    """Traces a query's client function and its sum over a bucket; returns sizes and a contribution.

    The flow of information is checked in the client function alone: the door may be of any size.
    The columns are made up (`column`); `query.prepare` is not applied.

    Raises:
      InformationLeak: as `information_flow.check_client`.
      InputError: the contribution is not a tree of float arrays, or a bucket cannot be split.
      TypeError, ValueError: the client function does not fit the columns.
    """
    columns = {name: columns[name] for name in query.columns or columns}
    require_room(query, columns, elsewhere=True)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), broadcast)
    door, client = opened(query, shapes, columns)
    if not query.plan.unchecked:
        check_client(query, client)
    door.programs(shapes, columns)
    replicas, up = query.execution.replicas, size_of(client.contribution)
    # An accumulator holds pairs of numbers.
    sizes = up, size_of(door.bucket(columns)), door.chunk * replicas, 2 * up * replicas
    return QuerySize(query.label, size_of(shapes), *sizes), client.contribution


def check_information_flow(
    query: Query, clients: Population, broadcast: PyTree = ()
) -> InformationFlow:
    """Proves a query's flow of information as before its first charge, without a release.

    Nothing is compiled, run or charged. After the query's `prepare`, only shapes of the clients and
    the broadcast are used. Raises as `information_flow.check_release`, and `InputError` if the
    query does not fit the data.
    """
    columns = read_columns(query, prepared(query, clients))
    broadcast = arrays(query, broadcast)
    door, client = opened(query, broadcast, columns)
    return check_release(query, door, client, broadcast, columns)


def rehearse(
    algorithm_of: Callable[..., Any], columns: Mapping[str, np.ndarray], *shapes: PyTree
) -> Rehearsed:
    """Traces the first round of an algorithm whose step can be traced: init, queries and server.

    `algorithm_of` makes it from arrays of `shapes`, such as parameters to start from. The clients'
    columns are made up (`column`).
    """
    queries: list[QuerySize] = []

    def release(query: Query, broadcast: PyTree = (), clip_norm: Any = None) -> Released:
        size, contribution = ask(query, broadcast, columns)
        queries.append(size)
        next_norm = jnp.float32(query.plan.clip_norm) if clip_norm is None else clip_norm
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), contribution)
        return Released(zeros, next_norm)

    def first_round(key: jax.Array, *arrays: PyTree) -> Any:
        algorithm = algorithm_of(*arrays)
        state = algorithm.init(key)
        algorithm.step(state, release, 1)
        return state

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(first_round, key, *shapes)
    return Rehearsed(size_of(state), tuple(queries))
