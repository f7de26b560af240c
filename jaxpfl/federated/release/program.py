"""A program that is traced once: what is checked, hashed, lowered, compiled and run is one object.

A function that is given to `jax.jit` is traced again whenever JAX finds other types, such as a weak
one. What was read before would then not be what runs. A `Program` is traced for given shapes and
dtypes, and afterwards only that trace counts: other types are refused when it is called.
"""

from functools import cached_property
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core


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
