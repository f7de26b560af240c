"""Proves of a release's program that nothing of the clients leaves it but by the noisy sum.

`check_release` runs before a query is first charged (`release.prepared_query`). It reads two
programs, as JAX traces them. That of ONE client must compute from its operands alone: callbacks,
collectives, rules of its own under vmap and whatever is not known are refused. Of the door's, as
`release.releaser` opens it, inputs are labelled, and the labels followed through every equation
(`flow_labels`). An output may depend on the clients only through these six steps, in this order:

| step              | what is required of it, in the program that was traced                      |
|-------------------|-----------------------------------------------------------------------------|
| the client's own  | it does nothing but compute; whatever it returns is private                 |
| `clip_factors`    | the bound is the round's clip norm, which is public                         |
| `scaled`          | a contribution is multiplied by its own factor, row by row                  |
| `bound_to_bits`   | the noise's key follows from a secret key and the checksum of what is summed|
| `standard_normal` | a draw for each coordinate, with such a key, and with each key once         |
| `rounded_sum`     | noise of a public size is added to sums of such products, on all coordinates|

Steps are recognised by where their functions are defined. That each does what its name says, that
one client moves a sum of scaled contributions by at most S, and that the noise has the plan's size
is not proven here: other tests hold it. The noise's key depends on the exact sum by its checksum
alone, as the output of a pseudorandom function (see `release.door`); this is the only dependence
on clients that is allowed without noise, together with a release's name, which is made likewise.

Not seen: how long a program takes, and what a client function captured when it was made: numbers
and arrays of its closure are constants of the program, and count as public. The report lists them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.errors import InformationLeak
from jaxpfl.federated.flow.captured import captured
from jaxpfl.federated.flow.following import Following, because, require_followed, what
from jaxpfl.federated.flow.labels import (
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
from jaxpfl.federated.release.door import Door, Keys, Summed
from jaxpfl.federated.release.query import Query

PyTree = Any


class InformationFlow(NamedTuple):
    """What was proven of a program; public.

    Attributes:
      equations: the number of those of the door that were followed.
      noisy: outputs that depend on clients, each by noisy sums; none of a plan without noise.
      constants: what counts as public because the program holds it: names and kinds of what the
        client function captures, and shapes and dtypes of arrays. No values.
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


def check_release(
    query: Query, door: Door, client: Any, broadcast: PyTree, columns: Mapping[str, Any]
) -> InformationFlow:
    """Proves that a query's release tells nothing of the clients but by its noisy sum.

    Nothing is compiled or run, but traced: at every rung of the ladder, with the chunk that is run.

    Args:
      client: the client function as traced for one client.
      broadcast, columns: only shapes and dtypes are used.

    Raises:
      InformationLeak: an output depends on the clients in another way, or an equation cannot be
        followed; the sentence names the equation and its line.
    """
    plan, held = query.plan, {*captured(query.client_fn), *check_client(query, client)}
    noise = None
    if plan.private and plan.correlation != "independent":
        noise = jax.ShapeDtypeStruct((door.coordinates,), np.float32)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), broadcast)
    buckets = [door.bucket(columns, rung) for rung in query.cohort.rungs]
    # At least two, so that what the first one adds is an input of the second.
    given = Labelled(shapes, _array(), [*buckets, buckets[0]], release_keys(), noise)

    def release(given: Labelled) -> Summed:
        return door(given.public, given.clients, given.clip_norm, given.keys, given.noise)

    found = check_program(release, given, clips=plan.unit == "client", private=plan.private)
    return found._replace(constants=tuple(sorted({*held, *found.constants})))


def check_client(query: Query, client: Any) -> list[str]:
    """The first half of `check_release`: returns shapes and dtypes of the arrays that it holds."""
    constants: dict[int, str] = {}
    try:
        require_followed(client.jaxpr, constants)
    except InformationLeak as error:
        raise InformationLeak(
            f"the client function of query {query.label!r}: {error}. Take it out; or run it with "
            "Plan.without_privacy(..., unchecked=True), which says of everything that it is not "
            "private"
        ) from None
    return list(constants.values())


def check_program(
    program: Any, given: Labelled, *, clips: bool = True, private: bool = True
) -> InformationFlow:
    """The second half of `check_release`, for any function of `Labelled` that can be traced.

    Args:
      clips: contributions must be clipped to the round's clip norm; otherwise the client function
        bounds them, and any bound will do.
      private: the plan has noise. Without, the outputs are the exact sums, as the plan says.

    Raises:
      InformationLeak: as `check_release`.
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
    if private:
        _check_outputs(following, dict(zip(names, outputs, strict=True)))
    return InformationFlow(
        len(following.equations),
        tuple(name for name, each in zip(names, outputs, strict=True) if each.kind is RELEASED),
        tuple(sorted(set(following.constants.values()))),
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
