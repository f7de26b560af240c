"""What happens in one round: local training, and the door from clients to server."""

from jaxpfl.federated.accumulators import Compensated, FixedPoint
from jaxpfl.federated.adaptive_clipping import next_clip_norm
from jaxpfl.federated.client import BoundedByExample, ClientFn, Examples
from jaxpfl.federated.evaluation import correct_examples
from jaxpfl.federated.local_training import LocalTraining
from jaxpfl.federated.mesh import CLIENTS, client_mesh
from jaxpfl.federated.optimizers import optimizer
from jaxpfl.federated.private_sum import Door, DoorState, private_sum

__all__ = [
    "CLIENTS",
    "BoundedByExample",
    "ClientFn",
    "Compensated",
    "Door",
    "DoorState",
    "Examples",
    "FixedPoint",
    "LocalTraining",
    "client_mesh",
    "correct_examples",
    "next_clip_norm",
    "optimizer",
    "private_sum",
]
