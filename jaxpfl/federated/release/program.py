"""A program that is traced once: what is checked, hashed, lowered, compiled and run is one object.

A function that is given to `jax.jit` is traced again whenever JAX finds other types, such as a weak
one. What was read before would then not be what runs. A `Program` is traced for given shapes and
dtypes, and afterwards only that trace counts: other types are refused when it is called.

Its text, as JAX lowers it for the devices of a run, is read before it is compiled, because a
primitive is not always lowered to what its name says. This finds whatever reaches outside the
program: custom calls, callbacks, channels, and draws with a state. It cannot replace the list of
primitives (`flow.lanes`): an operation that mixes lanes may be an ordinary loop here.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core

from jaxpfl.errors import InformationLeak

# JAX lowers the places of arrays, linear algebra and selection to these. Products, convolutions,
# FFT, sorts and draws need none; libraries for them are chosen when the text is compiled.
_KNOWN = re.compile(
    r"""
    Sharding | SPMDFullToShardShape | SPMDShardToFullShape | annotate_device_placement
    | xla\.sdy\.\w+ | ApproxTopK | PartialReduce
    | lapack_[a-z0-9]+_ffi
    | (cu|hip)(solver_[a-z0-9]+_ffi | sparse_gtsv2_ffi | hybrid_[a-z0-9_]+)
    | (cu|hip)_lu_pivots_to_permutation | cu_cholesky_update_ffi
    | Eigh | Qr | LuDecomposition | ProductOfElementaryHouseholderReflectors
    """,
    re.VERBOSE,
)
# As it is printed with and without a dialect's own syntax, and as a text of the user's, in quotes.
# A pattern that begins with plain letters is found thirty times as fast as one with `\b`.
_CALL = re.compile(r'custom_call(?<!\wcustom_call)"?[ \(]\s*(?:@(?:"([^"]*)"|([\w.$-]+)))?')
# Of StableHLO, MHLO and VHLO.
_OUTSIDE = re.compile(r"hlo\.(send|recv|infeed|outfeed|rng|rng_bit_generator)\b")


class Program:
    """A traced function of arrays.

    Args:
      traced: of shapes with the places of their arrays.
    """

    def __init__(self, traced: jax.stages.Traced) -> None:
        self._traced = traced

    @cached_property
    def _lowered(self) -> jax.stages.Lowered:
        return self._traced.lower()

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self._lowered.compile()

    @property
    def jaxpr(self) -> Any:
        """The program as it was traced."""
        return self._traced.jaxpr

    @property
    def text(self) -> str:
        """The program as it is lowered for its devices (StableHLO), before compilation."""
        return self._lowered.as_text()

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program; of tracers, becomes a part of what is being traced.

        Raises:
          TypeError: an argument has another shape or dtype than was traced.
        """
        leaves, structure = jax.tree.flatten(arguments)
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._compiled(*arguments)
        if structure != jax.tree.structure(self._traced.args_info[0]):
            raise TypeError(f"expected {self._traced.in_tree}, found {structure}")
        results = core.jaxpr_as_fun(self.jaxpr)(*leaves)
        return jax.tree.unflatten(self._traced.out_tree, results)


def require_known_calls(texts: Iterable[str], platform: str, label: str) -> None:
    """Refuses programs with calls, sends or receives that JAX's own operations do not need.

    Args:
      texts: StableHLO, as `jax.stages.Lowered.as_text` gives it.
      platform: that it was lowered for, as `jax.Device.platform` names it.
      label: of the query.

    Raises:
      InformationLeak: names the call.
    """
    text = "\n".join(texts)
    strange = next((repr(match[1]) for match in _OUTSIDE.finditer(text)), None)
    for match in _CALL.finditer(text):
        target = match[1] or match[2] or ""
        if not _KNOWN.fullmatch(target):
            strange = f"a custom call of {target!r}"
            break
    if strange is not None:
        raise InformationLeak(
            f"the program of query {label!r}, as it is lowered for a {platform}, has {strange}, "
            "which JAX's own operations do not need: take out what makes it"
        )
