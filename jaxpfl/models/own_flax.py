"""Models of one's own, from a Flax module: Linen, or NNX."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import nnx
from flax.core import unfreeze
from jax import Array

from jaxpfl.errors import InputError
from jaxpfl.models.base import Batch, Params, split
from jaxpfl.models.own import OwnModel, from_functions

_NO_STATE = (
    "What it keeps follows from all examples of a batch together, padding included, and would "
    "leave the client beside its parameters: use GroupNorm or LayerNorm in place of BatchNorm"
)
_NO_RANDOM = (
    "draws random numbers when it is called, which scores and padding must not depend on: leave "
    "dropout out, or make it deterministic; clipping and noise regularise already"
)


def from_flax(
    module: Any,
    loss: Callable[[Array, Batch], Array],
    metrics: Callable[[Array, Batch], Mapping[str, Array]] | None = None,
    *,
    inputs: Mapping[str, Any],
    name: str = "",
    columns: Sequence[str] | None = None,
) -> OwnModel:
    """A model whose network is a Flax module without state; see `from_functions`.

    Args:
      module: a `flax.linen.Module`, or a function that makes an `nnx.Module`,
        `lambda rngs: Net(rngs=rngs)`.
      loss: `(outputs, batch) -> float array [batch]`, of what the module returns.
      metrics: `(outputs, batch) -> {name: array [batch]}`, or None.
      inputs: the columns that the module is called with, in the order of its arguments, each with
        one example, or its `jax.ShapeDtypeStruct`: `{"image": jnp.zeros((28, 28, 1))}`.
      name: names the model in messages; default: that of the module.
      columns: as of `from_functions`.

    Raises:
      InputError: the module keeps a state, such as nn.BatchNorm's means, or draws random numbers
        when it is called, or cannot be called with these inputs.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise InputError(
            "inputs must name the columns that the module reads, with one example of each, such as "
            f"{{'image': jnp.zeros((28, 28, 1))}}, found {type(inputs).__name__}"
        )
    examples = [
        jax.ShapeDtypeStruct((1, *jnp.shape(each)), jax.dtypes.canonicalize_dtype(each.dtype))
        for each in inputs.values()
    ]
    is_linen = isinstance(module, linen.Module)
    made: Any = module if is_linen else _made(module)
    name = name or type(made).__name__
    try:
        init, apply = _linen(made, name, examples) if is_linen else _nnx(module, made, name)
        key = jax.eval_shape(lambda: jax.random.key(0))
        jax.eval_shape(apply, jax.eval_shape(init, key), *examples)
    except flax_errors.InvalidRngError as error:
        raise InputError(f"{name}: {_NO_RANDOM}") from error
    except InputError:
        raise
    except (TypeError, ValueError, flax_errors.FlaxError) as error:
        shapes = ", ".join(f"{each.dtype}{list(each.shape)}" for each in examples)
        raise InputError(
            f"{name}: cannot be called with inputs of {shapes}: {_first_line(error)}"
        ) from error

    def outputs(params: Params, batch: Batch) -> Array:
        return apply(params, *(batch[each] for each in inputs))

    return from_functions(
        init,
        lambda params, batch: loss(outputs(params, batch), batch),
        None if metrics is None else lambda params, batch: metrics(outputs(params, batch), batch),
        name=name,
        columns=columns,
    )


def _linen(module: linen.Module, name: str, examples: Sequence[Any]) -> tuple[Callable, Callable]:
    """The functions that initialise and apply a module without state."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(module.init, key, *examples)
    _refuse_state(name, variables.keys() - {"params"})

    def init(key: Array) -> Params:
        zeros = [jnp.zeros(each.shape, each.dtype) for each in examples]
        return unfreeze(module.init(key, *zeros)).get("params", {})

    return init, lambda params, *given: module.apply({"params": params}, *given)


def _made(make: Any) -> nnx.Module:
    """The module that a function makes, without values."""
    found = type(make).__name__
    if isinstance(make, nnx.Module):
        found += ", which exists already: its parameters cannot be drawn from a seed"
    elif callable(make):
        try:
            module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
            found = f"a function that makes {type(module).__name__}"
            if isinstance(module, nnx.Module):
                return module
        except TypeError as error:
            found = f"{found}, which cannot be called with nnx.Rngs: {_first_line(error)}"
    raise InputError(
        "module must be a flax.linen.Module or a function that makes an nnx.Module, "
        f"lambda rngs: Net(rngs=rngs), found {found}"
    )


def _nnx(make: Callable, module: nnx.Module, name: str) -> tuple[Callable, Callable]:
    """As `_linen`, of the module that a function makes."""
    graphdef, state = nnx.split(module)
    if nnx.to_flat_state(nnx.filter_state(state, nnx.RngState)):
        raise InputError(f"{name}: {_NO_RANDOM}")
    others = nnx.to_flat_state(nnx.filter_state(state, nnx.Not(nnx.Param)))
    _refuse_state(name, {type(each).__name__ for _, each in others})

    def init(key: Array) -> Params:
        return split(make(nnx.Rngs(key)))[1]

    return init, lambda params, *given: nnx.merge(graphdef, params)(*given)


def _refuse_state(name: str, kinds: Set[str]) -> None:
    if kinds:
        raise InputError(f"{name}: keeps a state, {', '.join(sorted(kinds))}. {_NO_STATE}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
