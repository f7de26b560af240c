"""Proves that a program's results depend on clients only through noisy sums.

Its inputs are labelled (`labels`), and the labels are followed through every equation
(`analysis`, `rules`); what remains on the outputs decides.
"""

from typing import Any, NamedTuple

import jax

from jaxpfl.errors import InformationLeak
from jaxpfl.federated.flow.analysis import Analysis, Steps, because, what
from jaxpfl.federated.flow.labels import Draws, Key, Kind, Noise, shared, uses
from jaxpfl.federated.mesh import PyTree


class InformationFlow(NamedTuple):
    """A program's proof; public.

    Attributes:
      equations: the number of those of the program that were followed.
      noisy: outputs that depend on clients, each by noisy sums; none of a plan without noise.
      constants: all that counts as public because the program holds it: names and kinds of values
        that the client function captures, and kinds of numbers with the lines where they enter the
        program. No values.
      bounded_by_client: the client function bounds each example itself, and the program does not
        clip.
      alone: operations of the client function that were not tried side by side (`flow.lanes`), with
        their lines. If there are any, one client is computed after the other.
    """

    equations: int
    noisy: tuple[str, ...]
    constants: tuple[str, ...]
    bounded_by_client: bool
    alone: tuple[str, ...] = ()


class Labelled(NamedTuple):
    """The inputs of a program to check: each a pytree of arrays or shapes.

    Attributes:
      public: a broadcast, or other values that everyone may know.
      clip_norm: the round's; float32 scalar.
      clients: the cohort's data.
      noise_key: typed; all noise that is not shared must follow from it.
      secrets: other secrets, and no client's.
      noise: noise of unit scale that several rounds share; None = there is none.
    """

    public: PyTree
    clip_norm: Any
    clients: PyTree
    noise_key: Any
    secrets: PyTree
    noise: Any = None


def check_program(
    program: Any, given: Labelled, steps: Steps, *, clips: bool = True, private: bool = True
) -> InformationFlow:
    """Proves of any traceable function of `Labelled` that it tells nothing but noisy sums.

    Args:
      clips: contributions must be clipped to the round's clip norm; otherwise the client function
        bounds them, and any bound will do.
      private: the plan has noise. Without, the outputs are the exact sums, as the plan says.
    """
    traced, results = jax.make_jaxpr(program, return_shape=True)(given)
    analysis = Analysis(steps)
    size = 0 if given.noise is None else given.noise.size
    labels = Labelled(
        (Kind.PUBLIC, None),
        (Kind.PUBLIC, None),
        (Kind.PRIVATE, None),
        (Kind.KEY, Key(("noise",))),
        (Kind.SECRET, None),
        (Kind.NOISE, Noise((Draws(("shared",), 0, size),), None)),
    )
    parts = zip(given, labels, strict=True)
    of_leaves = [label for part, label in parts for _ in jax.tree.leaves(part)]
    values = [
        analysis.rules.public("input", place)
        if label[0] is Kind.PUBLIC
        else analysis.rules.value(label, "input", place)
        for place, label in enumerate(of_leaves)
    ]
    if clips:
        before = len(jax.tree.leaves(given.public))
        analysis.clip_norm = values[before].token
    outputs = analysis.closed(traced, values)
    names = [
        jax.tree_util.keystr(path) or "the result"
        for path, _ in jax.tree_util.tree_leaves_with_path(results)
    ]
    values_of = dict(zip(names, outputs, strict=True))
    noisy = Kind.BOUNDED if analysis.local else Kind.RELEASED
    for name, value in values_of.items() if private else ():
        if value.kind is Kind.KEY:
            key, drawn = value.detail, analysis.drawn
            # It is bound to the sum, and no noise is drawn from it.
            if key.bound is not None and all(p[: len(key.path)] != key.path for p in drawn):
                continue
        if value.kind not in (Kind.PUBLIC, noisy):
            raise InformationLeak(
                f"{name} depends on {what(value)} otherwise than by a noisy sum{because(value)}"
            )
    twice = shared(uses(outputs)) if private else None
    if twice is not None:
        raise InformationLeak(
            "two sums of the release have the same noise, so that their difference has none: "
            f"coordinates {twice.start} to {twice.stop} of one draw"
        )
    return InformationFlow(
        len(analysis.equations),
        tuple(name for name, value in values_of.items() if value.kind is noisy),
        tuple(sorted(analysis.constants)),
        not clips,
    )
