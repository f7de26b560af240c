"""Client functions: pure functions of a broadcast, one client's examples and its own key.

They depend on nothing else. A number that depends on other clients, such as the size of the largest
of those that are computed together, could carry their data past the clip, and no test finds every
such function. So a client function is not handed any such thing. It has one of two forms:

| form     | written as                                    | what it is handed                |
|----------|-----------------------------------------------|----------------------------------|
| by steps | `ClientSteps(init, step, finish)`, or an      | one batch at a time, of the      |
|          | object with these three methods               | cohort's public batch size       |
| whole    | a function `(broadcast, examples, key)`       | all batches in one public shape, |
|          |                                               | and the client's number of steps |

By steps, the engine loops, and a step after a client's last one leaves its state as it was. Clients
with few examples then take little memory and time. A whole function always gets
`CohortSpec.max_steps` batches: it may read them in any order, and pays for all of them.

`contribution` computes either form for ONE client. The engine vmaps, scans and shards it. The
function is traced for one client before that, so that it never sees arrays of several.
"""

from collections.abc import Callable, Hashable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, partial
from types import MethodType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InformationLeak, InputError

PyTree = Any
Batch = dict[str, jax.Array]


class Examples(NamedTuple):
    """All of one client's examples, as a whole client function gets them.

    Attributes:
      batches: {column: array [max_steps, batch, ...]}, zeros where there is no example.
      mask: bool [max_steps, batch], True where the row is a real example.
      steps: int32 scalar, the client's own number of steps, up to its last example.
    """

    batches: Batch
    mask: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class ClientSteps:
    """A client function by steps, made of three functions.

    Attributes:
      init: `(broadcast, key) -> state`, any pytree of arrays.
      step: `(broadcast, state, batch, mask, key) -> state`, of the same shapes and dtypes, with
        `batch` {column: array [batch, ...]} and `mask` bool [batch], True where the row is a real
        example. Each step has a key of its own. A client has as many steps as it has batches, times
        its epochs; none without examples.
      finish: `(broadcast, state) -> contribution`, a pytree of float arrays.
    """

    init: Callable[[PyTree, jax.Array], PyTree]
    step: Callable[[PyTree, PyTree, Batch, jax.Array, jax.Array], PyTree]
    finish: Callable[[PyTree, PyTree], PyTree]


@runtime_checkable
class Stepping(Protocol):
    """The methods of `ClientSteps`; any object with them is a client function, too."""

    def init(self, broadcast: PyTree, key: jax.Array, /) -> PyTree: ...

    def step(
        self, broadcast: PyTree, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array, /
    ) -> PyTree: ...

    def finish(self, broadcast: PyTree, state: PyTree, /) -> PyTree: ...


@runtime_checkable
class Stateful(Protocol):
    """A client function that keeps a state of each client between the rounds it takes part in.

    By steps, its methods are `init(broadcast, client_state, key)`, `step` and `finish` as in
    `ClientSteps`, and `keep(broadcast, state, sent) -> client_state`. There `state` is the one that
    `finish` gets, and `sent` is the contribution as it was added up, after the clip. Whole, it is
    called as `(broadcast, client_state, examples, key) -> (contribution, client_state)`.

    A client gets its own state alone, and it never leaves the client. Who takes part does not
    depend on states, so that a round costs what it costs without them. A client whose contribution
    is not finite, which counts as zero, keeps the state that it had.
    """

    def client_state(self, broadcast: PyTree, /) -> PyTree:
        """The state of a client that takes part for the first time: a pytree of arrays."""


# It must be hashable (plain functions or a frozen dataclass), because client functions that are the
# same (`Static`) share one compilation. A contribution's shapes must not depend on the data.
ClientFn = Stepping | Stateful | Callable[..., PyTree]


@runtime_checkable
class BoundedByExample(Protocol):
    """A client function that bounds each single example's share of its contribution.

    Adding or removing any one example moves the contribution, a sum over the client's examples, by
    at most `example_bound` in L2 norm, in the contribution's units, whatever the data. The
    contribution of no examples is exactly zero, and examples may be computed in several blocks
    whose contributions are added.
    Under `Plan(unit="example")` the door does not clip contributions and relies on this bound. It
    is therefore part of the privacy guarantee and must be tested on adversarial neighbours.

    "At most" is of exact sums. The function adds up examples' shares in float32, in any order, by
    steps those of each batch first, and rounds each of them at most four times before. One that
    rounds less may have an attribute `roundings`: see `federated.release.example_rounding`.
    """

    @property
    def example_bound(self) -> float: ...


def contribution(
    client_fn: ClientFn,
    broadcast: PyTree,
    examples: Examples,
    key: jax.Array,
    longest: jax.Array | None = None,
) -> PyTree:
    """One client's contribution, of its first round if the client function keeps states.

    Args:
      examples: by steps, of at least as many steps as are run.
      longest: how many steps are run, at least the client's own, so that clients can be computed
        side by side. By steps, the others change nothing. None = the client's own number.
    """
    client_state = first_state(client_fn, broadcast)
    return computed(client_fn, broadcast, client_state, examples, key, longest)[0]


def first_state(client_fn: ClientFn, broadcast: PyTree) -> PyTree:
    """The state of a client that takes part for the first time; None if none is kept."""
    keeps = isinstance(client_fn, Stateful)
    return client_part(client_fn, "client_state", broadcast) if keeps else None


def computed(
    client_fn: ClientFn,
    broadcast: PyTree,
    client_state: PyTree,
    examples: Examples,
    key: jax.Array,
    longest: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """One client's contribution, and its state after the last step, for `next_state`."""
    own = (client_state,) if isinstance(client_fn, Stateful) else ()
    if not isinstance(client_fn, Stepping):
        result = client_part(client_fn, "__call__", broadcast, *own, examples, key)
        # As in `keys_of`: otherwise random draws are repeated wherever clip and sum use them.
        result = jax.lax.optimization_barrier(result)
        return result if isinstance(client_fn, Stateful) else (result, None)

    # Of the start and of each step: before the loop, for the reason of `keys_of`, and together,
    # because JAX takes 10 ms to lower a fold of each shape.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(1 + len(examples.mask)))
    words_SxW = jax.random.key_data(keys)

    def key_of(index: Any) -> jax.Array:
        return jax.random.wrap_key_data(words_SxW[index], impl=jax.random.key_impl(key))

    def advance(index: jax.Array, state: PyTree) -> PyTree:
        batch = {name: column[index] for name, column in examples.batches.items()}
        own = key_of(1 + index)
        stepped = client_part(client_fn, "step", broadcast, state, batch, examples.mask[index], own)
        if longest is None:
            return stepped
        # A choice and no product with zero: the others' steps may compute NaN from padding.
        taken = index < examples.steps
        return jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped, state)

    start = client_part(client_fn, "init", broadcast, *own, key_of(0))
    # A traced bound, so that steps that nobody has are not run.
    last = examples.steps if longest is None else longest
    state = jax.lax.fori_loop(0, last, advance, start)
    return client_part(client_fn, "finish", broadcast, state), state


def keys_of(key: jax.Array, words_Cx2: Any) -> jax.Array:
    """The data of clients' own keys: the query's, into which the two words of each are folded.

    They are made before the loop of clients, behind a barrier. Otherwise XLA for CPUs computes a
    key again for each element that a client draws, and exponentially often if it splits its key.
    """

    def own(words_2: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, words_2[0]), words_2[1])

    return jax.lax.optimization_barrier(jax.random.key_data(jax.vmap(own)(words_Cx2)))


def next_state(client_fn: ClientFn, broadcast: PyTree, last: PyTree, sent: PyTree) -> PyTree:
    """A client's state for its next round, from `computed`'s `last` and what was added up."""
    if not isinstance(client_fn, Stepping):
        return last
    return client_part(client_fn, "keep", broadcast, last, sent)


class Static:
    """A client function, or a model, as a static argument of compiled functions.

    Functions whose holders are equal share one program. An object's own `==` is never asked: it may
    call different functions equal, as a dataclass's does with `field(compare=False)`. Equal are

    | the same object          | whatever it is                                                |
    | dataclasses of one class | that hold nothing but fields, all of which are equal in this  |
    |                          | sense, so that a sweep over equal settings compiles once      |
    | tuples, bound methods    | likewise: their items; their object, and the function         |
    | plain numbers and texts  | of one type, and equal in all bits                            |
    """

    __slots__ = ("_content", "_hash", "function")

    def __init__(self, function: Any) -> None:
        self.function, self._content = function, _content(function)
        self._hash = hash(self._content)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Static) and self._content == other._content)

    def __hash__(self) -> int:
        return self._hash


class _Itself:
    """Equal for the same object alone, which lives as long as this."""

    __slots__ = ("_object",)

    def __init__(self, object_: Any) -> None:
        self._object = object_

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


def _content(value: Any) -> Hashable:
    """Equal for values that are the same, see `Static`."""
    kind: Any = type(value)
    if kind in (bool, int, str, bytes):
        return kind, value
    if kind is float:
        return kind, value.hex()  # because -0.0 == 0.0
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if kind is MethodType:
        return kind, _Itself(value.__func__), _content(value.__self__)
    # None, a dictionary, or a pair of it and a dictionary of slots.
    attributes: Any = object.__getstate__(value)
    if isinstance(value, tuple) and attributes is None:
        return kind, *map(_content, value)
    # Another constructor, as of a class that is written in C, may put more into an object.
    if is_dataclass(value) and kind.__new__ is object.__new__:
        parts = attributes if isinstance(attributes, tuple) else (attributes,)
        own = [field.name for field in fields(value)]
        # Attributes that follow from the others, once they are first read.
        of_class = [item for base in kind.__mro__ for item in vars(base).items()]
        derived = {name for name, item in of_class if isinstance(item, cached_property)}
        if {name for part in parts for name in part or ()} - derived <= {*own}:
            return kind, *[_content(getattr(value, name, MISSING)) for name in own]
    return _Itself(value)


def client_part(client_fn: Any, method: str, *operands: Any) -> PyTree:
    """Calls a method of a client function; all that clients do goes through here."""
    return compiled_part(Static(client_fn), method, *operands)


# Compiled by itself, so that each method is traced for the shapes of one client, and once. The
# check of the flow of information then reads the program that runs, and a function that is vmapped
# cannot look at its tracers to find the other clients.
@partial(jax.jit, static_argnums=(0, 1))
def compiled_part(static: Static, method: str, *operands: Any) -> PyTree:
    """`client_part`, as the check of the flow of information knows it."""
    return getattr(static.function, method)(*operands)


@jax.custom_batching.custom_vmap
def of_one_client(number: jax.Array) -> jax.Array:
    """The number; of clients that run side by side, one that is larger than any batch.

    If they shared the widest one's width, a client would change how the others' updates are
    rounded, and so move the sum by more than its own clipped contribution.
    """
    return number


@of_one_client.def_vmap
def _of_several_clients(
    axis_size: int, in_batched: list[bool], numbers: jax.Array
) -> tuple[jax.Array, bool]:
    return jnp.full((), jnp.iinfo(numbers.dtype).max, numbers.dtype), False


RULES = (_of_several_clients,)
"""Our only rules for clients side by side; they mix none. The check of the flow follows them."""


class TracedClient(NamedTuple):
    """A client function as JAX traces it: shapes of its contribution and its state."""

    jaxpr: Any
    contribution: PyTree
    client_state: PyTree


def traced(client_fn: ClientFn, label: str, broadcast: PyTree, examples: Examples) -> TracedClient:
    """Traces the client function for one client.

    Raises:
      InformationLeak: it uses a collective over clients or devices.
      InputError: it takes other arguments or looks up another column, a step or a round returns
        another state, or the contribution is not a tree of float arrays.
    """
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry4x32"))
    own = "client_state, " if isinstance(client_fn, Stateful) else ""
    whose = f"the client function of query {label!r}"
    if isinstance(client_fn, Stepping):
        wanted = {"init": f"(broadcast, {own}key)", "step": "(broadcast, state, batch, mask, key)"}
        wanted |= {"finish": "(broadcast, state)"}
        wanted |= {"keep": "(broadcast, state, sent)"} if own else {}
        for method, arguments in wanted.items():
            function = getattr(client_fn, method, None)
            checks.arguments(f"{method} of {whose}", function, arguments)
    else:
        checks.arguments(whose, client_fn, f"(broadcast, {own}examples, key)")

    def one_round(broadcast: PyTree, client_state: PyTree, examples: Examples, key: Any) -> Any:
        sent, last = computed(client_fn, broadcast, client_state, examples, key)
        return sent, next_state(client_fn, broadcast, last, sent) if own else None

    before = jax.eval_shape(partial(first_state, client_fn), broadcast)
    leaves, extended = jax.tree.leaves(before), jax.dtypes.extended
    if own and not (leaves and not any(jnp.issubdtype(leaf.dtype, extended) for leaf in leaves)):
        raise InputError(
            f"client_state of query {label!r} must be a tree of arrays of numbers: keep "
            "jax.random.key_data of a key"
        )
    try:
        if isinstance(client_fn, Stepping):
            init, step = (partial(client_part, client_fn, name) for name in ("init", "step"))
            own_state = () if before is None else (before,)
            first = jax.eval_shape(init, broadcast, *own_state, key)
            batch, mask = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
                (examples.batches, examples.mask),
            )
            stepped = jax.eval_shape(step, broadcast, first, batch, mask, key)
            _require_equal(f"step of {whose}", "init", first, stepped)
        # `one_round` is new in each call, so that JAX caches nothing of it.
        program = jax.jit(one_round).trace(broadcast, before, examples, key)
    except KeyError as error:
        if len(error.args) != 1 or error.args[0] in examples.batches:
            raise
        columns = f"its examples have the columns {', '.join(sorted(examples.batches))}"
        missing = f"looks up {error.args[0]!r}, which is not there"
        raise InputError(f"{whose} {missing}: {columns}") from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        leak = "asks other clients or devices by a collective (psum and the like)"
        raise InformationLeak(f"{whose} {leak}: {str(error).splitlines()[0]}") from error
    except TypeError as error:
        if "not a valid JAX type" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"{whose} must return a tree of float arrays: {reason}") from error
    contribution, after = program.out_info
    _require_equal(f"a round of {whose}", "client_state", before, after)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(contribution)]
    if not kinds or not all(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        kind = ", ".join(map(str, kinds)) or "no array"
        raise InputError(f"{whose} must return a tree of float arrays, found {kind}")
    return TracedClient(program.jaxpr, contribution, before)


def _require_equal(what: str, first: str, before: PyTree, after: PyTree) -> None:
    wanted, returned = (
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", state)
        for state in (before, after)
    )
    if jax.tree.flatten(wanted) != jax.tree.flatten(returned):
        expected = f"a state like that of {first}, {wanted}"
        raise InputError(f"{what} must return {expected}, found {returned}")
