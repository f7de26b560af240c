"""Models of one's own, from two functions (initial parameters, a loss for each example) or Flax.

    model = from_functions(init, loss, metrics)
    model = from_flax(module, loss, metrics, inputs={"image": example})

It is checked by shapes alone (`OwnModel.check`) before anything is charged. The functions need not
know which examples of a batch are real: padding is left out afterwards.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NoReturn

import flax.linen as linen
import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import nnx
from flax.core import unfreeze
from jax import Array

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.models.base import Batch, LossModel, Metrics, Params, columns_read, split

_RESERVED = ("loss", "count")
_NO_STATE = (
    "What it keeps follows from all examples of a batch together, padding included, and would "
    "leave the client beside its parameters: use GroupNorm or LayerNorm in place of BatchNorm"
)
_NO_RANDOM = (
    "draws random numbers when it is called, which scores and padding must not depend on: leave "
    "dropout out, or make it deterministic; clipping and noise regularise already"
)


@dataclass(frozen=True)
class OwnModel(LossModel):
    """A model of pure functions, see `from_functions`; `columns` None = all numeric ones."""

    init_fn: Callable[[Array], Params]
    loss_fn: Callable[[Params, Batch], Array]
    metrics_fn: Callable[[Params, Batch], Mapping[str, Array]] | None
    name: str
    columns: tuple[str, ...] | None

    def init(self, key: Array) -> Params:
        """The parameters that `init_fn` draws, which must be a tree of float32 arrays."""
        params = self.init_fn(key)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        wrong = [
            f"{jax.tree_util.keystr(path) or 'the whole'} is {_described(leaf)}"
            for path, leaf in leaves
            if getattr(leaf, "dtype", None) != jnp.float32
        ]
        if wrong or not leaves:
            actual = wrong[0] if wrong else "no array"
            raise self._unfit("init", "return a tree of float32 arrays", actual)
        return params

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean loss over the real examples, and the sums of it and of each own metric."""
        some = jnp.any(mask)
        # Without any real example, even a gradient that is not a number must count as zero.
        params = jax.tree.map(lambda p: jnp.where(some, p, jax.lax.stop_gradient(p)), params)
        batch = _padded_with_real(batch, mask)
        losses_B = self._values("loss", self._call("loss", self.loss_fn, params, batch), batch)
        if not jnp.issubdtype(losses_B.dtype, jnp.floating):
            raise self._unfit("the loss", "be a float for each example", str(losses_B.dtype))
        count = jnp.sum(mask, dtype=jnp.float32)
        loss_sum = _sum(losses_B, mask)
        sums = {"loss_sum": loss_sum, **self._own_sums(params, batch, mask), "count": count}
        return loss_sum / jnp.maximum(count, 1.0), sums

    def check(self, columns: Mapping[str, Any]) -> None:
        """Traces all functions, and the gradient, on the shapes of data; computes nothing.

        `InputError` says which function does not fit the columns, arrays [examples, ...] or their
        shapes, or returns what is no value for each example.
        """
        batch = {}
        for name in columns_read(self, columns):
            if name not in columns:
                self._refuse_missing("the model", name, columns)
            dtype = jax.dtypes.canonicalize_dtype(columns[name].dtype)
            batch[name] = jax.ShapeDtypeStruct((3, *columns[name].shape[1:]), dtype)
        mask = jax.ShapeDtypeStruct((3,), jnp.bool_)
        try:
            params = jax.eval_shape(self.init, _key())
            jax.eval_shape(jax.grad(self.loss, has_aux=True), params, batch, mask)
        except InputError as error:
            # Raised anew, without the note on its traceback that JAX adds to every exception.
            raise InputError(str(error)) from error.__cause__

    def _own_sums(self, params: Params, batch: Batch, mask: Array) -> Metrics:
        if self.metrics_fn is None:
            return {}
        metrics = self._call("metrics", self.metrics_fn, params, batch)
        if not isinstance(metrics, Mapping):
            expected = "return a dictionary with an array [batch] for each name"
            raise self._unfit("metrics", expected, _described(metrics))
        for name in metrics:
            if not isinstance(name, str) or not name or name in _RESERVED:
                raise self._unfit("metrics", "have names other than 'loss' and 'count'", repr(name))
        return {
            f"{name}_sum": _sum(self._values(f"metric {name!r}", values, batch), mask)
            for name, values in metrics.items()
        }

    def _call(self, what: str, function: Callable, params: Params, batch: Batch) -> Any:
        """Calls one of the functions; what does not fit the batch becomes one sentence."""
        try:
            return function(params, dict(batch))
        except InputError:
            raise
        except KeyError as error:
            if len(error.args) != 1 or error.args[0] in batch:
                raise
            self._refuse_missing(what, error.args[0], batch)
        except (TypeError, ValueError, IndexError) as error:
            columns = ", ".join(f"{name} {_described(values)}" for name, values in batch.items())
            reason = f"cannot be computed of a batch of {columns}: {_first_line(error)}"
            raise InputError(f"{what} of model {self.name!r} {reason}") from error

    def _refuse_missing(self, what: str, name: Any, columns: Mapping[str, Any]) -> NoReturn:
        actual = f"but a batch has only: {', '.join(sorted(columns)) or 'none'}"
        what = f"{what} of model {self.name!r} reads the field {name!r}"
        raise InputError(f"{what}, {actual}") from None

    def _unfit(self, what: str, expected: str, actual: str) -> InputError:
        return InputError(f"{what} of model {self.name!r} must {expected}, found {actual}")

    def _values(self, what: str, values: Any, batch: Batch) -> Array:
        """`values` as an array, one for each example of the batch."""
        size = len(next(iter(batch.values())))
        shape = getattr(values, "shape", None)
        if shape != (size,):
            mean = " (a mean or sum over the batch?)" if shape == () else ""
            expected = f"be an array with one value for each of the {size} examples of a batch"
            raise self._unfit(what, f"{expected}, shape ({size},)", _described(values) + mean)
        return values


def from_functions(
    init: Callable[[Array], Params],
    loss: Callable[[Params, Batch], Array],
    metrics: Callable[[Params, Batch], Mapping[str, Array]] | None = None,
    *,
    name: str = "own model",
    columns: Sequence[str] | None = None,
) -> OwnModel:
    """A model of one's own, for every algorithm that trains one, and for `jaxpfl.Evaluator`.

    All functions are pure JAX. A batch is a dictionary of the clients' columns [batch, ...]. What
    is returned for an example must depend on that example alone: padding is left out afterwards.

    Args:
      init: `(key) -> params`, a tree of float32 arrays.
      loss: `(params, batch) -> float array [batch]`, the loss of each example; its mean over the
        real examples is minimised.
      metrics: `(params, batch) -> {name: array [batch]}`, of numbers or booleans; their means over
        the evaluation data are shown under these names. None: the loss alone is shown.
      name: names the model in messages.
      columns: the fields that a batch needs to hold; None = all numeric columns of the clients.

    A model that does not fit the data is refused later, before anything is charged.
    """
    checks.arguments("init", init, "(key)")
    checks.arguments("loss", loss, "(params, batch)")
    return OwnModel(init, loss, metrics, name, None if columns is None else tuple(columns))


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

    Raises:
      InputError: the module keeps a state, such as nn.BatchNorm's means, or draws random numbers
        when it is called, or cannot be called with these inputs.
    """
    examples = [
        jax.ShapeDtypeStruct((1, *jnp.shape(example)), jax.dtypes.canonicalize_dtype(example.dtype))
        for example in inputs.values()
    ]
    is_linen = isinstance(module, linen.Module)
    made: Any = module if is_linen else _made(module)
    name = name or type(made).__name__
    try:
        init, apply = _of_linen(made, name, examples) if is_linen else _of_nnx(module, made, name)
        jax.eval_shape(apply, jax.eval_shape(init, _key()), *examples)
    except flax_errors.InvalidRngError as error:
        raise InputError(f"{name}: {_NO_RANDOM}") from error
    except InputError:
        raise
    except (TypeError, ValueError, flax_errors.FlaxError) as error:
        shapes = ", ".join(map(_described, examples))
        problem = f"cannot be called with inputs of {shapes}: {_first_line(error)}"
        raise InputError(f"{name}: {problem}") from error

    def outputs(params: Params, batch: Batch) -> Array:
        return apply(params, *(batch[column] for column in inputs))

    return from_functions(
        init,
        lambda params, batch: loss(outputs(params, batch), batch),
        None if metrics is None else lambda params, batch: metrics(outputs(params, batch), batch),
        name=name,
        columns=columns,
    )


def _of_linen(
    module: linen.Module, name: str, examples: Sequence[Any]
) -> tuple[Callable, Callable]:
    """The functions that initialise and apply a module without state."""
    _refuse_state(name, jax.eval_shape(module.init, _key(), *examples).keys() - {"params"})

    def init(key: Array) -> Params:
        zeros = [jnp.zeros(example.shape, example.dtype) for example in examples]
        return unfreeze(module.init(key, *zeros)).get("params", {})

    return init, lambda params, *given: module.apply({"params": params}, *given)


def _of_nnx(make: Callable, module: nnx.Module, name: str) -> tuple[Callable, Callable]:
    """As `_of_linen`, for the module that a function makes."""
    graphdef, state = nnx.split(module)
    if nnx.to_flat_state(nnx.filter_state(state, nnx.RngState)):
        raise InputError(f"{name}: {_NO_RANDOM}")
    others = nnx.to_flat_state(nnx.filter_state(state, nnx.Not(nnx.Param)))
    _refuse_state(name, {type(variable).__name__ for _, variable in others})
    return (
        lambda key: split(make(nnx.Rngs(key)))[1],
        lambda params, *given: nnx.merge(graphdef, params)(*given),
    )


def _made(make: Any) -> nnx.Module:
    """The module that a function makes, without values."""
    actual = type(make).__name__
    if isinstance(make, nnx.Module):
        actual += ", which exists already: its parameters cannot be drawn from a seed"
    elif callable(make):
        try:
            module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
            if isinstance(module, nnx.Module):
                return module
            actual = f"a function that makes {type(module).__name__}"
        except TypeError as error:
            actual += f", which cannot be called with nnx.Rngs: {_first_line(error)}"
    expected = "a flax.linen.Module, or lambda rngs: Net(rngs=rngs) of an nnx.Module"
    raise InputError(f"module must be {expected}, found {actual}")


def _refuse_state(name: str, kinds: Set[str]) -> None:
    if kinds:
        raise InputError(f"{name}: keeps a state, {', '.join(sorted(kinds))}. {_NO_STATE}")


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _padded_with_real(batch: Batch, mask: Array) -> Batch:
    """The batch with its first real example in place of padding.

    Padding could have any value, and a loss may have no gradient even at zeros.
    """
    first = jnp.argmax(mask)

    def padded(values: Array) -> Array:
        real = mask.reshape(-1, *[1] * (values.ndim - 1))
        return jnp.where(real, values, jax.lax.dynamic_index_in_dim(values, first, keepdims=True))

    return {name: padded(jnp.asarray(values)) for name, values in batch.items()}


def _sum(values_B: Array, mask: Array) -> Array:
    return jnp.sum(jnp.where(mask, values_B, jnp.zeros_like(values_B)), dtype=jnp.float32)


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
