"""The gradient of one example's loss, cut in two: small arrays first, large gradients from them.

A weight that multiplies N vectors of an example, y_n = x_n W, has the gradient sum_n x_n' dy_n, an
embedding has the sum of the rows of its gradient, and one matrix that is both has the sum of both.
The N vectors and rows are often much smaller than the matrix. So the program of the gradient is
traced and cut:

    first:  (weights, example)  ->  gradients as they are; x_n and dy_n, rows and their ids
    second: x_n and dy_n, rows and their ids  ->  the other gradients, by the program's own end

The first part is computed for many examples side by side. The second is the rest of the very same
program, so that a gradient is what it was, whatever it is made of: weights that are used twice,
repeated ids, padding. The gradient of a weight that multiplies one vector need not be formed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal


class Product(NamedTuple):
    """A gradient x' dy of two vectors."""

    weight: int  # its place among the weights
    x: Any  # variables of the gradient's program, float32
    dy: Any
    transposed: bool  # whether the weight's own order of axes is dy' x


class CutGradient(NamedTuple):
    """A gradient in two parts. Each weight is in `formed`, `products` or `late`, by its place."""

    formed: list[int]
    products: list[Product]
    late: list[int]
    entries: int  # numbers of one example that the first part returns, without the products'
    # (weights, example) -> (gradients of `formed`, (x, dy) of each product, arrays)
    first: Callable[[Sequence[jax.Array], Any], tuple[list[Any], list[Any], list[Any]]]
    # arrays -> gradients of `late`, each larger than the arrays that it is made of
    second: Callable[[Sequence[jax.Array]], list[jax.Array]]


def cut_gradient(
    loss: Callable[[Sequence[jax.Array], Any], jax.Array],
    weights: Sequence[jax.Array],
    example: Any,
    late: bool,
) -> CutGradient:
    """Cuts a gradient, for an example of arrays or shapes. Without `late`, all comes first."""
    nested = jax.make_jaxpr(jax.grad(loss))(list(weights), example)
    arguments = [*weights, *jax.tree.leaves(example)]
    # Flat: what is within a `jit` is found, too.
    program = jax.make_jaxpr(lambda *operands: _program(nested, operands))(*arguments)
    body: Any = program.jaxpr
    made = {variable: equation for equation in body.eqns for variable in equation.outvars}
    formed, products, late_weights = [], [], []
    parts: dict[Any, None] = {}
    for place, gradient in enumerate(body.outvars):
        product = _product(place, gradient, made)
        ends = dict.fromkeys(_ends(gradient, made))
        if product:
            products.append(product)
        elif late and sum(end.aval.size for end in ends) < gradient.aval.size:
            late_weights.append(place)
            parts |= ends
        else:
            formed.append(place)
    pairs = [variable for product in products for variable in (product.x, product.dy)]
    results = [*(body.outvars[place] for place in formed), *pairs, *parts]
    to_results = _between(body.eqns, (), results)
    to_late = _between(body.eqns, parts, late_gradients := [body.outvars[i] for i in late_weights])

    def first(weights: Sequence[jax.Array], example: Any) -> tuple[list[Any], list[Any], list[Any]]:
        operands = [*program.consts, *weights, *jax.tree.leaves(example)]
        values = dict(zip((*body.constvars, *body.invars), operands, strict=True))
        computed = iter(_run(to_results, values, results))
        gradients = [next(computed) for _ in formed]
        return gradients, [(next(computed), next(computed)) for _ in products], list(computed)

    def second(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return _run(to_late, dict(zip(parts, arrays, strict=True)), late_gradients)

    entries = sum(body.outvars[i].aval.size for i in formed) + sum(v.aval.size for v in parts)
    return CutGradient(formed, products, late_weights, entries, first, second)


def _product(place: int, gradient: Any, made: dict[Any, Any]) -> Product | None:
    """The gradient as a product of two vectors, if it is one."""
    equation, transposed = _maker(gradient, made), False
    while equation and equation.primitive.name == "transpose" and gradient.aval.ndim == 2:
        equation, transposed = _maker(equation.invars[0], made), not transposed
    if not equation or equation.primitive.name != "dot_general" or gradient.aval.ndim != 2:
        return None
    (sums, _), batches = equation.params["dimension_numbers"]
    x, dy = equation.invars
    types = {variable.aval.dtype for variable in (x, dy, gradient)}
    one = math.prod(x.aval.shape[axis] for axis in sums) == 1 and batches == ((), ())
    if not one or types != {jnp.dtype("float32")} or Literal in (type(x), type(dy)):
        return None
    return Product(place, x, dy, transposed)


def _ends(gradient: Any, made: dict[Any, Any]) -> list[Any]:
    """The variables of which the end of the program makes a gradient."""
    equation = _maker(gradient, made)
    name = equation.primitive.name if equation else ""
    if name == "dot_general":
        return [v for v in equation.invars if not isinstance(v, Literal)]
    if name in ("add_any", "transpose"):
        return [end for v in equation.invars for end in _ends(v, made)]
    if name == "scatter-add":
        matrix, *rows = equation.invars
        return [*_ends(matrix, made), *rows]
    if name == "broadcast_in_dim" and isinstance(equation.invars[0], Literal):
        return []
    return [gradient]


def _maker(variable: Any, made: dict[Any, Any]) -> Any:
    return None if isinstance(variable, Literal) else made.get(variable)


def _between(equations: Sequence[Any], start: Iterable[Any], results: Iterable[Any]) -> list[Any]:
    """The equations that lead from some variables to others."""
    before, needed, chosen = set(start), set(), []
    needed |= {v for v in results if not isinstance(v, Literal)} - before
    for equation in reversed(equations):
        if needed.intersection(equation.outvars):
            chosen.append(equation)
            needed |= {v for v in equation.invars if not isinstance(v, Literal)} - before
    return chosen[::-1]


def _program(program: Any, arguments: Sequence[Any]) -> list[Any]:
    variables = (*program.jaxpr.constvars, *program.jaxpr.invars)
    values = dict(zip(variables, (*program.consts, *arguments), strict=True))
    return _run(program.jaxpr.eqns, values, program.jaxpr.outvars)


def _run(equations: Iterable[Any], values: dict[Any, Any], results: Iterable[Any]) -> list[Any]:
    """Evaluates equations, those within a `jit` one by one."""

    def value_of(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in equations:
        operands = [value_of(variable) for variable in equation.invars]
        if equation.primitive.name in ("jit", "pjit"):
            made = _program(equation.params["jaxpr"], operands)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            made = equation.primitive.bind(*operands, **parameters)
            made = made if equation.primitive.multiple_results else [made]
        values.update(zip(equation.outvars, made, strict=True))
    return [value_of(variable) for variable in results]
