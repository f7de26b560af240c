"""The products of a loss with its weights, found in its program and opened up.

Where a loss of one example multiplies a matrix of weights W [I, O] by a vector x [I], y = x W, the
gradient of W is x' dy, with dy the loss's slope along y. A tap, zeros added to y, has the gradient
dy. With x and dy [O] available, the gradient's norm, and its weighted sum over examples, can be had
without the gradient itself:

    loss(weights, example)  ->  loss(the other weights, taps, example), and the x of each product

A weight is opened up if it is used once, in one product with one vector: as it is or transposed, at
the top of the program or within a `jit`. Any other weight is left alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal


@dataclasses.dataclass(frozen=True)
class Product:
    """The one product that a weight is used in.

    Attributes:
      weight: its place among the loss's weights.
      path: the equation's number in the program, within a `jit` after the number of that. Not the
        equation itself, because calls of one function share its equations.
      equation: of the program.
      place: the weight's place among the equation's two operands.
      axis: the weight's axis that is summed over.
      transposed: whether the operand is the weight's transpose.
    """

    weight: int
    path: tuple[int, ...]
    equation: Any
    place: int
    axis: int
    transposed: bool

    @property
    def tap(self) -> jax.ShapeDtypeStruct:
        """The shape of y, as the program has it."""
        aval = self.equation.outvars[0].aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    @property
    def of_a_vector(self) -> bool:
        """Whether the weight multiplies one vector, and not several."""
        shape = self.equation.invars[self.place].aval.shape
        return self.tap.size == shape[1 - self.axis]

    def as_weight(self, gradient_IxO: jax.Array) -> jax.Array:
        """The gradient in the weight's own order of axes."""
        return gradient_IxO.T if (self.axis == 1) != self.transposed else gradient_IxO


class Opened(NamedTuple):
    """A loss whose products are opened up.

    Attributes:
      products: one for each weight that is left out.
      others: the places of all other weights.
      loss: `(others, taps, example) -> (loss, factors)`, where the weights of the products are
        constants, and factors are the x of each product, with axes of one.
    """

    products: list[Product]
    others: list[int]
    loss: Callable[..., tuple[jax.Array, list[jax.Array]]]


def opened(
    loss: Callable[[Sequence[jax.Array], Any], jax.Array],
    weights: Sequence[jax.Array],
    example: Any,
) -> Opened:
    """Opens up the products of a loss with single vectors, for an example of arrays or shapes."""
    program = jax.make_jaxpr(loss)(list(weights), example)
    number = len(weights)
    uses = _Uses()
    uses.read(program.jaxpr, {program.jaxpr.invars[i]: (i, False) for i in range(number)}, ())
    products = [
        uses.products[i]
        for i in range(number)
        if uses.times.get(i) == 1 and i in uses.products and uses.products[i].of_a_vector
    ]
    left_out = {product.weight for product in products}
    others = [i for i in range(number) if i not in left_out]

    def opened_loss(given, taps, example):
        values = dict(zip(others, given, strict=True))
        arguments = [values.get(i, weights[i]) for i in range(number)]
        tapped = {p.path: (p.place, tap) for p, tap in zip(products, taps, strict=True)}
        factors: dict[tuple[int, ...], jax.Array] = {}
        arguments += jax.tree.leaves(example)
        (value,) = _run(program.jaxpr, program.consts, arguments, tapped, factors, ())
        return value, [factors[product.path] for product in products]

    return Opened(products, others, opened_loss)


class _Uses:
    """Counts the uses of weights, and collects the products."""

    def __init__(self) -> None:
        self.times: dict[int, int] = {}
        self.products: dict[int, Product] = {}

    def read(
        self, program: Jaxpr, weights: dict[Any, tuple[int, bool]], path: tuple[int, ...]
    ) -> None:
        """Reads a program; `weights` has its variables that are weights, and whether transposed."""

        def weight_of(variable: Any) -> tuple[int, bool] | None:
            return None if isinstance(variable, Literal) else weights.get(variable)

        for index, equation in enumerate(program.eqns):
            name = equation.primitive.name
            operands = [weight_of(variable) for variable in equation.invars]
            if not any(operands):
                continue
            if name == "transpose" and equation.params["permutation"] == (1, 0) and operands[0]:
                weight, transposed = operands[0]
                weights[equation.outvars[0]] = (weight, not transposed)
            elif name in ("jit", "pjit"):
                inner = equation.params["jaxpr"].jaxpr
                inside = {v: w for v, w in zip(inner.invars, operands, strict=True) if w}
                self.read(inner, inside, (*path, index))
            else:
                for place, operand in enumerate(operands):
                    if operand:
                        self._used(equation, place, *operand, (*path, index))
        for result in filter(None, map(weight_of, program.outvars)):
            # A weight that a `jit` returns is not followed.
            self.times[result[0]] = 2

    def _used(
        self, equation: Any, place: int, weight: int, transposed: bool, path: tuple[int, ...]
    ) -> None:
        self.times[weight] = self.times.get(weight, 0) + 1
        if equation.primitive.name != "dot_general":
            return
        sums, batches = equation.params["dimension_numbers"]
        types = {v.aval.dtype for v in (*equation.invars, *equation.outvars)}
        if batches != ((), ()) or len(sums[place]) != 1 or types != {jnp.dtype("float32")}:
            return
        if len(equation.invars[place].aval.shape) != 2:
            return
        if weight in self.products or any(p.path == path for p in self.products.values()):
            # If two weights are multiplied with each other, one remains a weight.
            return
        axis = sums[place][0]
        self.products[weight] = Product(weight, path, equation, place, axis, transposed)


def _run(
    program: Jaxpr,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    tapped: Mapping[tuple[int, ...], tuple[int, jax.Array]],
    factors: dict[tuple[int, ...], jax.Array],
    path: tuple[int, ...],
) -> list[Any]:
    """Evaluates a program with taps on its products, and notes the products' other factors."""
    values = dict(zip(program.constvars, constants, strict=True))
    values |= dict(zip(program.invars, arguments, strict=True))

    def value_of(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for index, equation in enumerate(program.eqns):
        operands, here = [value_of(variable) for variable in equation.invars], (*path, index)
        if any(product[: len(here)] == here and product != here for product in tapped):
            inner = equation.params["jaxpr"]
            results = _run(inner.jaxpr, inner.consts, operands, tapped, factors, here)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*operands, **parameters)
            results = results if equation.primitive.multiple_results else [results]
        if here in tapped:
            place, tap = tapped[here]
            factors[here] = operands[1 - place]
            results = [results[0] + tap]
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(variable) for variable in program.outvars]
