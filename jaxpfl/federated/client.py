"""What one client computes: a pure function from a broadcast and its own examples.

A client function is written for ONE client and never sees the data of another. `federated.door`
vmaps, scans and shards it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

PyTree = Any


class Examples(NamedTuple):
    """One client's examples, padded to a static shape.

    Attributes:
      batches: {column: array [steps, batch, ...]}.
      mask: bool [steps, batch], True where the row is a real example.
      steps: int32 scalar, how many leading steps must be run. Clients that run side by side share
        the largest number, so that a step without real examples must not change the result.
    """

    batches: dict[str, jax.Array]
    mask: jax.Array
    steps: jax.Array


# (broadcast, examples, key) -> contribution: a pytree of float arrays whose shapes do not depend on
# the data. It must be hashable (a plain function or a frozen dataclass), because equal client
# functions share one compilation.
ClientFn = Callable[[PyTree, Examples, jax.Array], PyTree]


class BoundedByExample(Protocol):
    """A client function that bounds each single example's share of its contribution.

    Adding or removing any one example moves the contribution, a sum over the client's examples, by
    at most `example_bound` in L2 norm, whatever the data. The contribution of no examples is
    exactly zero, and examples may be computed in several blocks whose contributions are added.
    Under `Plan(unit="example")` the door does not clip contributions and relies on this bound. It
    is therefore part of the privacy guarantee and must be tested on adversarial neighbours.

    Attributes:
      example_bound: the L2 bound, in the contribution's units.
    """

    @property
    def example_bound(self) -> float: ...

    def __call__(self, broadcast: PyTree, examples: Examples, key: jax.Array) -> PyTree: ...
