"""What a compiled program says of itself: memory, collectives, transfers, types of products."""

import math
import re
from collections.abc import Iterator
from typing import Any

from jax.interpreters import partial_eval

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\(", re.MULTILINE)
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_WIDE = {"s64": 8, "u64": 8, "f64": 8, "c64": 8}
_CALLED = {"cublas": "__cublas", "cudnn": "__cudnn", "triton": "__triton"}
# A host transfer in XLA's text.
_TRANSFERS = ("outfeed", "infeed", "send", "recv")
_CALLBACK = re.compile(r'custom_call_target="[^"]*callback')


def _arrays(shape: str) -> Iterator[tuple[str, int]]:
    for dtype, sizes in _ARRAY.findall(shape):
        number = 1
        for size in filter(None, sizes.split(",")):
            number *= int(size)
        yield dtype, number * (_BYTES.get(dtype) or _WIDE.get(dtype) or 4)


def text_of(compiled: Any) -> str:
    """The program after all optimisations, in the form of one device."""
    return compiled.as_text()


def collectives(text: str) -> dict[str, list[int]]:
    """The bytes of each collective's result on one device, by kind, largest first.

    Those of an asynchronous pair are counted where it ends.
    """
    found: dict[str, list[int]] = {}
    for shape, operation in _INSTRUCTION.findall(text):
        kind = operation.removesuffix("-done")
        if kind in _COLLECTIVES and not operation.endswith("-start"):
            found.setdefault(kind, []).append(sum(size for _, size in _arrays(shape)))
    return {kind: sorted(sizes, reverse=True) for kind, sizes in sorted(found.items())}


def transfers(text: str) -> int:
    """How many instructions exchange data with the host, calls of Python functions included."""
    found = [operation.split("-")[0] for _, operation in _INSTRUCTION.findall(text)]
    return sum(name in _TRANSFERS for name in found) + len(_CALLBACK.findall(text))


def library_calls(text: str) -> dict[str, int]:
    """How often a GPU program calls a library, by name."""
    found = {name: text.count(f'custom_call_target="{mark}') for name, mark in _CALLED.items()}
    return {name: count for name, count in found.items() if count}


def live(jaxpr: Any) -> Any:
    """The program without what no result needs, which compilers leave out, too.

    JAX does not look into loops of unknown length: `products` asks for each of their bodies.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    kept, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return kept


def products(jaxpr: Any, trips: tuple[int, ...] = ()) -> dict[str, float]:
    """Floating point operations of all matrix products and convolutions, by the operands' type.

    They are of all devices together, and of the type that is asked for: a TPU computes a float32
    product of default precision in bfloat16.

    Args:
      jaxpr: as `jax.stages.Traced.jaxpr` has it. A scan counts as often as it runs.
      trips: how often loops whose length is not known run, from the outermost inwards; more deeply
        nested ones count once.
    """
    found: dict[str, float] = {}
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner, times = trips, 1
        if name == "dot_general":
            _add(found, equation, _contracted(equation))
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
            _add(found, equation, math.prod(kernel) // outputs)
        elif name == "scan":
            times = params["length"]
        elif name == "while":
            times, inner = (trips[0], trips[1:]) if trips else (1, ())
        elif name == "shard_map":
            times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        bodies = map(live, _inside(params)) if name == "while" else _inside(params)
        parts = [products(each, inner) for each in bodies]
        if name == "cond":  # one branch runs; the most expensive one counts
            parts = sorted(parts, key=lambda part: sum(part.values()))[-1:]
        for part in parts:
            for dtype, number in part.items():
                found[dtype] = found.get(dtype, 0.0) + times * number
    return found


def _add(found: dict[str, float], equation: Any, contracted: int) -> None:
    dtype = str(equation.invars[0].aval.dtype)
    number = 2.0 * math.prod(equation.outvars[0].aval.shape) * contracted
    found[dtype] = found.get(dtype, 0.0) + number


def _contracted(equation: Any) -> int:
    ((axes, _), _) = equation.params["dimension_numbers"]
    return math.prod(equation.invars[0].aval.shape[axis] for axis in axes)


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """The programs inside an equation."""
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def memory(compiled: Any) -> dict[str, int]:
    """Bytes on one device; donated arguments, whose memory the result takes, count once."""
    found = compiled.memory_analysis()
    sizes = {
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
    }
    return {**sizes, "in_all": sum(sizes.values())}


def cost(compiled: Any) -> dict[str, float]:
    """Operations and bytes of one device as the compiler counts them; loops count once."""
    found = compiled.cost_analysis() or {}
    wanted = {"flops": "flops", "bytes": "bytes accessed"}
    return {name: float(found[key]) for name, key in wanted.items() if key in found}
