"""What one client computes: a pure function from a broadcast and its own examples.

The engine (`federated.door`) vmaps, scans and shards client functions; they are
written for ONE client and never see another's data.
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
      steps: int32 scalar, how many leading steps need to be run. It is at least the number of
        steps that hold a real example of this client (clients that run side by side share the
        largest), so a step without real examples must leave the result unchanged.
    """

    batches: dict[str, jax.Array]
    mask: jax.Array
    steps: jax.Array


# (broadcast, examples, key) -> contribution: a pytree of float arrays whose shapes do not
# depend on the data. Use a hashable callable (a plain function or a frozen dataclass): equal
# client functions share one compilation.
ClientFn = Callable[[PyTree, Examples, jax.Array], PyTree]


class BoundedByExample(Protocol):
    """A client function that bounds what each single example adds to its contribution.

    Its contribution is a sum over the client's examples; adding or removing any one of them moves
    it by at most `example_bound` in L2 norm, whatever the data. Under `Plan(unit="example")` the
    door does not clip a client's whole contribution and relies on this bound, which therefore is
    part of the privacy guarantee and must be tested on adversarial neighbours.

    Attributes:
      example_bound: the L2 bound, in the contribution's units.
    """

    @property
    def example_bound(self) -> float: ...

    def __call__(self, broadcast: PyTree, examples: Examples, key: jax.Array) -> PyTree: ...
