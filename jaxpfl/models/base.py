"""The interface of a model, pure functions over a plain pytree of parameters, and what many share.

A model is a frozen dataclass of public settings; one that is out of range raises `InputError`.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.core import Tracer

from jaxpfl import checks
from jaxpfl.errors import InputError

PAD = -1
"""Padding of token rows in every model, tokeniser and file: an id that no vocabulary has.

0 is a real token of published vocabularies (GPT-2's "!"), and padding with end-of-text would hide
the ends of texts from the loss. Models look up `maximum(tokens, 0)` in the embedding table and mask
the result, because JAX would read the last row at index -1.
"""

OOV = 3
"""The id, in a word vocabulary, of all words that it does not have (`text.Vocabulary`)."""

Params = Any
"""Nested dict of float32 arrays."""

Batch = dict[str, Array]
"""Columns, each [batch, ...]."""

Metrics = dict[str, Array]
"""Float32 sums: "loss_sum" (nats), "correct" (top-1) and "count" (targets).

A model of one's own (`models.own`) has "NAME_sum" for each metric in place of "correct", one of
several labels also "by_score", the counts of `average_precision`.
"""


class Model(Protocol):
    """The functions that federated algorithms call; all are pure and may be jitted and vmapped.

    `columns` names the columns of a batch that the model reads; None = all numeric ones.
    """

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...] | None: ...

    def init(self, key: Array) -> Params:
        """Parameters drawn from a typed key."""
        ...

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean loss over the real targets of a batch, and the sums that it follows from.

        The mean is a float32 scalar, 0 with zero gradients when no target is real.

        Args:
          mask: bool [batch], True for a real example. Any other example contributes exactly zero to
            the loss, the metrics and the gradient, whatever values it has (NaN too).
        """
        ...

    def evaluate(self, params: Params, batch: Batch, mask: Array) -> Metrics:
        """The metrics of `loss`, to be summed over batches and given to `summarise`."""
        ...


class LossModel:
    """A model whose metrics are computed beside its loss; see `Model`."""

    columns: tuple[str, ...] | None
    loss: Callable[[Params, Batch, Array], tuple[Array, Metrics]]

    def evaluate(self, params: Params, batch: Batch, mask: Array) -> Metrics:
        """The sums of `loss`."""
        return self.loss(params, batch, mask)[1]


class TokenModel(LossModel):
    """A model of the column "tokens", whose `config` has its name and its number of token ids."""

    columns = ("tokens",)
    config: Any

    @property
    def name(self) -> str:
        return self.config.model_type

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def check_length(self, length: int) -> None:
        """Refuses rows of more tokens than the model has positions."""
        if length > (most := self.config.positions):
            raise InputError(f"a row must have at most {most} tokens, found {length}")


class NetworkModel(LossModel):
    """A model whose network is a Flax NNX module.

    The module is split once into a graph definition and a nested dict of float32 arrays; every call
    builds it anew from the arrays it is given, so no call can change the parameters of another.
    """

    _network: Callable[[Array], nnx.Module]
    """From a typed key to the network with parameters drawn from it."""

    @cached_property
    def _graphdef(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: self._network(jax.random.key(0))))[0]

    def _merged(self, params: Params) -> Any:
        return nnx.merge(self._graphdef, params)

    def init(self, key: Array) -> Params:
        return split(self._network(key))[1]


class Classifier(LossModel):
    """A model of one label per example, int32 "label" [B], which reads one other column first."""

    columns: tuple[str, ...] = ("image", "label")
    classes: int
    image_shape: tuple[int, int, int]
    logits: Callable[[Params, Array], Array]
    """Float32 logits [B, classes] of inputs [B, ...]."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of an example in the first of `columns`."""
        return self.image_shape

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the columns do not fit the settings."""
        self.check_inputs(columns)
        self.check_labels(columns)

    def check_inputs(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if what is read, besides labels, has another shape."""
        name, shape = self.columns[0], tuple(self.input_shape)
        actual = tuple(columns[name].shape[1:])
        if actual != shape:
            expected = f"the model reads {name!r} of shape {list(shape)}"
            raise InputError(f"{expected}, the data has {list(actual)}")

    def check_labels(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the labels are none of the classes."""
        require_below(columns, "label", "classes", self.classes)
        label = np.asarray(columns["label"])
        if label.dtype.kind not in "iub" or (len(label) and label.min() < 0):
            raise InputError("the column 'label' must hold whole numbers from 0")

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean of `loss_of` over the real examples."""
        inputs, labels = (batch[name] for name in self.columns)
        real = jnp.expand_dims(mask, tuple(range(1, inputs.ndim)))
        return self.loss_of(self.logits(params, jnp.where(real, inputs, 0)), labels, mask)

    def loss_of(self, logits_BxC: Array, labels: Array, mask: Array) -> tuple[Array, Metrics]:
        """Cross-entropy, its mean over the real examples and its sums."""
        return masked_loss(logits_BxC, labels, mask)


@runtime_checkable
class Checking(Protocol):
    """A model, or what clients compute, that is checked on the data before a charge."""

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError`, which names no value, if it does not fit columns [examples, ...]."""
        ...


@runtime_checkable
class Augmenting(Protocol):
    """A model whose training examples are changed at random before each step, as images are."""

    def augment(self, batch: Batch, key: Array) -> Batch:
        """The batch with other values, drawn from a typed key; padding stays padding."""
        ...


def require_below(columns: Mapping[str, Any], name: str, setting: str, limit: int) -> None:
    """Raises `InputError` if a column in memory, or mapped from a file, has a value >= `limit`.

    A compiled program would read such a label or id as another one, or as none, and train on it.
    Rows of token ids are not read: their vocabulary is checked.
    """
    column = columns[name]
    has_values = isinstance(column, np.ndarray) or hasattr(column, "located")
    if has_values and len(column) and column.max() >= limit:
        expected = f"{name!r} must hold 0 .. {limit - 1}, because {setting} = {limit}"
        raise InputError(f"{expected}, found larger values")


def split(module: nnx.Module) -> tuple[nnx.GraphDef, Params]:
    """Splits a network into its graph definition and a nested dict of arrays."""
    graphdef, state = nnx.split(module)
    return graphdef, nnx.to_pure_dict(state)


def negative_log_likelihood(logits_NxV: Array, targets_N: Array) -> Array:
    """Cross-entropy in nats, float32 [N], of integer targets; finite for finite logits."""
    logits_NxV = logits_NxV.astype(jnp.float32)
    # Comparing instead of indexing makes the gradient a fused select instead of a scatter, which is
    # slow on CPUs.
    classes_V = jnp.arange(logits_NxV.shape[-1], dtype=targets_N.dtype)
    is_target_NxV = classes_V[None, :] == targets_N[:, None]
    picked_N = jnp.sum(jnp.where(is_target_NxV, logits_NxV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_NxV, axis=-1) - picked_N


def masked_loss(
    logits_NxV: Array, targets_N: Array, real_N: Array, *, oov: int | None = None
) -> tuple[Array, Metrics]:
    """Mean cross-entropy over the targets where `real_N` is True, and the metric sums.

    The loss is 0, with a zero gradient, when no target is real. A tie for the highest logit goes to
    the lowest class. XLA removes the top-1 computation where its result is not used.

    Args:
      oov: the class of words out of the vocabulary, if there is one: a target like any other that
        never counts as correct, because it is no word.
    """
    nll_N = jnp.where(real_N, negative_log_likelihood(logits_NxV, targets_N), 0.0)
    # On CPUs an argmax takes seven times as long as these comparisons.
    earlier_NxV = jnp.arange(logits_NxV.shape[1])[None, :] < targets_N[:, None].astype(jnp.int32)
    picked_Nx1 = jnp.take_along_axis(logits_NxV, targets_N[:, None], axis=1)
    hits_N = jnp.where(earlier_NxV, logits_NxV < picked_Nx1, logits_NxV <= picked_Nx1).all(1)
    hits_N = jnp.logical_and(hits_N, targets_N >= 0)
    if oov is not None:
        hits_N = jnp.logical_and(hits_N, targets_N != oov)
    loss_sum = jnp.sum(nll_N)
    count = jnp.sum(real_N, dtype=jnp.float32)
    correct = jnp.sum(jnp.logical_and(hits_N, real_N), dtype=jnp.float32)
    sums = {"loss_sum": loss_sum, "correct": correct, "count": count}
    return loss_sum / jnp.maximum(count, 1.0), sums


def summarise(metrics: Metrics) -> dict[str, float]:
    """Turns metric sums into "loss" (nats per target), "perplexity", "accuracy" and "count".

    A model of one's own has the mean of each "NAME_sum" in place of perplexity and accuracy, and a
    model of several labels `average_precision`, too. A mean of nothing is NaN.
    """
    sums = {name: float(value) for name, value in metrics.items() if name != "by_score"}
    count, loss_sum = sums.pop("count"), sums.pop("loss_sum")

    def share(total: float) -> float:
        return total / count if count > 0 else math.nan

    loss = share(loss_sum)
    if "correct" not in sums:
        means = {name.removesuffix("_sum"): share(total) for name, total in sums.items()}
        if "by_score" in metrics:
            means["average_precision"] = average_precision(np.asarray(metrics["by_score"]))
        return {"loss": loss, **means, "count": count}
    perplexity = math.inf if loss >= 700 else math.exp(loss)
    accuracy = share(sums["correct"])
    return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy, "count": count}


def average_precision(counts_2xCxT: np.ndarray) -> float:
    """The mean over C classes of the average precision: that of scikit-learn, 0 without examples.

    Args:
      counts_2xCxT: for each class and bin of scores, the lowest bin first, how many examples
        without the class, and with it, have such a score.

    Precision times the rise of recall is summed over the bins' lower ends.
    """
    without_CxT, with_CxT = np.cumsum(counts_2xCxT[..., ::-1], -1, dtype=np.float64)
    precision_CxT = with_CxT / np.maximum(with_CxT + without_CxT, 1)
    rises_CxT = np.diff(with_CxT, prepend=0) / np.maximum(with_CxT[:, -1:], 1)
    return float(np.mean(np.sum(precision_CxT * rises_CxT, -1)))


def traced_platform() -> str:
    """The platform that a program is traced for: "cpu", "gpu" or "tpu".

    Inside a `shard_map`, what counts is the mesh's devices, which need not be available.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def columns_read(model: Model, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the columns that a model reads, in data with these columns."""
    return tuple(columns) if model.columns is None else tuple(model.columns)


def require_room(model: Model) -> None:
    """Raises `InputError` if a model's parameters exceed the memory, without allocating them."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    checks.fits_memory(f"a model of {count_parameters(shapes):,} parameters", size)


def require_model(model: object) -> None:
    """Refuses an object that is no model, such as its class or its name, before it is called."""
    if isinstance(model, type) or not callable(getattr(model, "init", None)):
        actual = model.__name__ if isinstance(model, type) else type(model).__name__
        hint = "jaxpfl.models, with its settings, or of jaxpfl.models.from_functions or from_flax"
        raise InputError(f"model must be one of {hint}, found {actual}")


def initialised(model: Model, key: Array) -> Params:
    """`model.init(key)`, once it is known that this machine has room for the parameters.

    While a program is traced, which allocates nothing, any size will do: a dry run may be for a run
    of another machine.
    """
    if not is_traced(key):
        require_room(model)
    return model.init(key)


def updated(optimizer: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """`optimizer.update`: optax mixes integers and floats in places; its results are float32."""
    with jax.numpy_dtype_promotion("standard"):
        return optimizer.update(gradients, state, params)


def descended(
    settings: Any,
    steps: int,
    params: Params,
    moments: Any,
    gradients: Any,
    scale: Array | float = 1.0,
) -> tuple[Params, Any]:
    """Returns parameters and the optimiser's state after one of `steps` steps.

    Args:
      settings: have `optimizer(steps)`, and the bound `clip_norm` of the L2 norm of `scale` times
        the gradients; None for no bound.
    """
    # Scale and clipping in one factor: XLA fuses one product with the moments' update, while
    # clipping as a step of its own passes over all parameters twice more.
    factor = scale
    if settings.clip_norm is not None:
        norm = optax.tree.norm(gradients) * scale
        factor = scale * settings.clip_norm / jnp.maximum(norm, settings.clip_norm)
    gradients = jax.tree.map(lambda leaf: leaf * factor, gradients)
    updates, moments = updated(settings.optimizer(steps), gradients, moments, params)
    return optax.apply_updates(params, updates), moments


def is_traced(tree: Any) -> bool:
    """Whether an array of the tree belongs to a program that is being traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def count_parameters(params: Params) -> int:
    """Number of scalars in a pytree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def require_same_leaves(stored: Mapping[str, Any], like: Mapping[str, Any], where: str) -> None:
    """Raises `InputError`, which names a leaf, if the `schema` of stored leaves differs."""
    expected = schema(like)
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            leaf = f"leaf {name!r}" if name else "the whole"
            actual = f"found {stored.get(name)}, expected {expected.get(name)}"
            raise InputError(f"{where}: {leaf}: {actual}")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by name; raises `InputError` if two have the same name."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    if len(leaves) != len(jax.tree_util.tree_leaves(tree)):
        raise InputError("two leaves of a tree have the same name: a dictionary key holds a '.'")
    return leaves


def schema(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The dtype and shape of each leaf, or the type of one that is no array, as JSON data."""
    kinds = {name: getattr(leaf, "dtype", type(leaf).__name__) for name, leaf in leaves.items()}
    return {name: [str(kinds[name]), list(np.shape(leaf))] for name, leaf in leaves.items()}
