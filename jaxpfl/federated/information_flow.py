"""Proves of a release's program that nothing of the clients leaves it but by the noisy sum.

`check_information_flow` traces the door of a query, as `federated.release` opens it, to JAX's
equations, labels its inputs, and follows the labels through every equation (`flow_labels`). An
output may depend on the clients only through these five steps, in this order:

| step              | what is required of it, in the program that was traced                      |
|-------------------|-----------------------------------------------------------------------------|
| `clip_factors`    | the bound is the round's clip norm, which is public                         |
| `scaled`          | a contribution is multiplied by its own factor, row by row                  |
| `bound_to_bits`   | the noise's key follows from a secret key and the checksum of what is summed|
| `standard_normal` | a draw for each coordinate, with such a key, and with each key once         |
| `rounded_sum`     | noise of a public size is added to sums of such products, on all coordinates|

Steps are recognised by where their functions are defined. That each does what its name says, that
one client moves a sum of scaled contributions by at most S, and that the noise has the plan's size
is not proven here: other tests hold it. The noise's key depends on the exact sum by its checksum
alone, as the output of a pseudorandom function (see `federated.door`); this is the only dependence
on clients that is allowed without noise, together with a release's name, which is made likewise.

Not seen: how long a program takes, the sizes of arrays, and arrays that a client function holds
because it was made with them: they are constants of the program, and count as public. The report
lists them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.errors import InformationLeak, InputError
from jaxpfl.federated import asked
from jaxpfl.federated.door import Keys, Summed
from jaxpfl.federated.flow_following import Following, because, what
from jaxpfl.federated.flow_labels import (
    KEY,
    NOISE,
    PRIVATE,
    PUBLIC,
    RELEASED,
    SECRET,
    Draws,
    Key,
    Kind,
    Noise,
    Value,
    shared,
    uses,
)
from jaxpfl.federated.query import Query, arrays

PyTree = Any


class InformationFlow(NamedTuple):
    """What was proven of a program; public.

    Attributes:
      equations: the number of those that were followed.
      noisy: outputs that depend on clients, each by noisy sums.
      constants: shapes and dtypes of the arrays that the program holds, which count as public.
      bounded_by_client: the client function bounds each example itself, and the door does not clip.
    """

    equations: int
    noisy: tuple[str, ...]
    constants: tuple[str, ...]
    bounded_by_client: bool


class Labelled(NamedTuple):
    """The inputs of a program to check: each a pytree of arrays or shapes.

    Attributes:
      public: a broadcast, or what else everyone may know.
      clip_norm: the round's; float32 scalar.
      clients: the cohort's data.
      keys: of the release.
      noise: of unit scale, that several rounds share; None = there is none.
    """

    public: PyTree
    clip_norm: Any
    clients: PyTree
    keys: Keys
    noise: Any = None


def check_information_flow(
    query: Query, clients: Population, broadcast: PyTree = ()
) -> InformationFlow:
    """Proves that a query's release tells nothing of the clients but by its noisy sum.

    Nothing is compiled, run or charged. Of the clients and the broadcast only shapes are used,
    after the query's `prepare`.

    Raises:
      InputError: the plan has no noise, the query does not fit the data, or this process is one of
        several.
      InformationLeak: an output depends on the clients in another way, or an equation cannot be
        followed; the sentence names the equation and its line.
    """
    plan = query.plan
    if not plan.private:
        raise InputError(f"the plan of query {query.label!r} has no noise: nothing can be proven")
    broadcast = arrays(query, broadcast)
    door, bucket = asked.traced_door(query, clients, broadcast)
    noise = None
    if plan.correlation != "independent":
        noise = jax.ShapeDtypeStruct((door.coordinates,), np.float32)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), broadcast)
    # Two buckets, so that what the first one adds is an input of the second.
    given = Labelled(shapes, _array(), [bucket, bucket], release_keys(), noise)

    def release(given: Labelled) -> Summed:
        return door(given.public, given.clients, given.clip_norm, given.keys, given.noise)

    return check_program(release, given, clips=plan.unit == "client")


def check_program(program: Any, given: Labelled, *, clips: bool = True) -> InformationFlow:
    """`check_information_flow` for any function of `Labelled` that can be traced.

    Args:
      clips: contributions must be clipped to the round's clip norm; otherwise the client function
        bounds them, and any bound will do.

    Raises:
      InformationLeak: as `check_information_flow`.
    """
    traced, results = jax.make_jaxpr(program, return_shape=True)(given)
    following = Following()
    labels = _labels(given)
    values = [
        following.rules.public("input", place)
        if label[0] is PUBLIC
        else following.rules.value(label, "input", place)
        for place, label in enumerate(jax.tree.leaves(labels, is_leaf=_is_label))
    ]
    if clips:
        before = len(jax.tree.leaves(given.public))
        following.clip_norm = values[before].token
    outputs = following.closed(traced, values)
    names = [
        jax.tree_util.keystr(path) or "the result"
        for path, _ in jax.tree_util.tree_leaves_with_path(results)
    ]
    _check_outputs(following, dict(zip(names, outputs, strict=True)))
    return InformationFlow(
        len(following.equations),
        tuple(name for name, each in zip(names, outputs, strict=True) if each.kind is RELEASED),
        tuple(sorted(following.constants.values())),
        not clips,
    )


def release_keys() -> Keys:
    """The shapes of a release's keys."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry4x32"))
    return Keys(key, key, _array((4,), np.uint32))  # pyright: ignore[reportArgumentType]


def _check_outputs(following: Following, outputs: Mapping[str, Value]) -> None:
    for name, value in outputs.items():
        if value.kind is KEY and _harmless(value.detail, following.drawn):
            continue
        if value.kind not in (PUBLIC, RELEASED):
            raise InformationLeak(
                f"{name} depends on {what(value)} otherwise than by a noisy sum{because(value)}"
            )
    twice = shared(uses(outputs.values()))
    if twice is not None:
        raise InformationLeak(
            "two sums of the release have the same noise, so that their difference has none: "
            f"coordinates {twice.start} to {twice.stop} of one draw"
        )


def _harmless(key: Key, drawn: Mapping[tuple[Any, ...], Any]) -> bool:
    """Whether a key may be published: it is bound to the sum, and no noise is drawn from it."""
    return key.bound is not None and all(path[: len(key.path)] != key.path for path in drawn)


def _labels(given: Labelled) -> PyTree:
    def all_of(tree: PyTree, label: tuple[Kind, Any]) -> PyTree:
        return jax.tree.map(lambda leaf: label, tree)

    noise = None
    if given.noise is not None:
        draws = Draws(("shared",), 0, given.noise.size)
        noise = NOISE, Noise((draws,), None)
    keys = Keys((SECRET, None), (KEY, Key(("noise",))), (SECRET, None))  # pyright: ignore
    public, clients = all_of(given.public, (PUBLIC, None)), all_of(given.clients, (PRIVATE, None))
    return Labelled(public, (PUBLIC, None), clients, keys, noise)


def _is_label(node: Any) -> bool:
    return isinstance(node, tuple) and bool(node) and isinstance(node[0], Kind)


def _array(shape: tuple[int, ...] = (), dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
