"""LoRA's adapters split from the base, and joined with it; see `models.decoder.lora`."""

from typing import Any

from jaxpfl.models.base import Params

_LEAVES = ("a", "b")


def split(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adapters {projection: {"a", "b"}}, and the parameters without them."""
    adapters, base = {}, {}
    for name, part in params["layers"].items():
        base[name] = {leaf: value for leaf, value in part.items() if leaf not in _LEAVES}
        if "a" in part:
            adapters[name] = {leaf: part[leaf] for leaf in _LEAVES}
    return adapters, dict(params) | {"layers": base}


def join(adapters: Params, base: Params) -> dict[str, Any]:
    """The inverse of `split`."""
    layers = {name: dict(part) | adapters.get(name, {}) for name, part in base["layers"].items()}
    return dict(base) | {"layers": layers}
