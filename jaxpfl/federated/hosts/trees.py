"""Pytrees of arrays as processes send them: the structure as JSON, the leaves as bytes.

No code is sent. A container is named by module and class, and must be one that this process has
loaded and JAX knows as a container: another name is refused, and nothing imported or called.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef, default_registry

from jaxpfl.errors import InputError

PyTree = Any


def described(tree: PyTree, what: str) -> dict[str, Any]:
    """The structure, and the leaves' shapes and dtypes, in JSON's types; for `shapes_of`.

    A tree, called `what`, with a container or a key that cannot be told in JSON is refused.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = [[list(np.shape(leaf)), str(leaf.dtype)] for leaf in leaves]
    description = {"containers": _containers(structure), "leaves": shapes}
    with contextlib.suppress(InputError, TypeError):
        if jax.tree.structure(shapes_of(json.loads(json.dumps(description)))) == structure:
            return description
    raise InputError(
        f"{what} must be made of tuples, lists, dictionaries by text or number, and NamedTuples "
        "and registered dataclasses at the top level of a module, so that other processes can be "
        f"told of it, found {structure}"
    )


def shapes_of(description: dict[str, Any]) -> PyTree:
    """The tree that was `described`, of `jax.ShapeDtypeStruct`; refuses any other description."""
    try:
        leaves = [jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for shape, d in description["leaves"]]
        return jax.tree.unflatten(_structure(description["containers"]), leaves)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        message = f"another process sent what is no tree of known containers: {error}"
        raise InputError(message) from error


def content_of(leaves: Sequence[Any]) -> bytes:
    """The bytes of arrays, one after the other."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in leaves)


def received(shapes: Sequence[Any], receive: Callable[[int], bytes]) -> list[np.ndarray]:
    """The arrays of these shapes of which `receive` returns the `content_of`, by its size."""
    sizes = [shape.size * shape.dtype.itemsize for shape in shapes]
    content, edges = receive(sum(sizes)), np.cumsum(sizes)
    return [
        np.frombuffer(content[end - size : end], shape.dtype).reshape(shape.shape)
        for shape, size, end in zip(shapes, sizes, edges, strict=True)
    ]


def _containers(structure: Any) -> Any:
    """None for a leaf; a container's module, name, metadata (such as keys) and children."""
    node = structure.node_data()
    if node is None:
        return None
    kind, about = node
    children = [_containers(child) for child in structure.children()]
    return [kind.__module__, kind.__qualname__, about, children]


def _structure(containers: Any) -> Any:
    if containers is None:
        return jax.tree.structure(0)
    module, name, about, children = containers
    # Only looked up: an attribute of a module may import others.
    kind: Any = type(None) if name == "NoneType" else sys.modules[module]
    for part in () if name == "NoneType" else name.split("."):
        kind = vars(kind)[part]
    parts = [_structure(child) for child in children]
    if kind is not dict:
        about = _tuples(about)
    elif len(about) != len(parts):
        raise ValueError(f"a dictionary has {len(parts)} values and {len(about)} keys")
    # It refuses a class that is no container.
    return PyTreeDef.from_node_data_and_children(default_registry, (kind, about), parts)


def _tuples(about: Any) -> Any:
    return tuple(map(_tuples, about)) if isinstance(about, list) else about
