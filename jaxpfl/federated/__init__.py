"""What happens in one round: local training, and the release, the only way from clients to server.

release          charges, samples, sums, adds noise and records
query            what clients are asked, and what it may cost
one_release      `jaxpfl.release`: one noisy sum, without an algorithm
secure_release   `jaxpfl.secure_release`: clients add the noise, as under secure aggregation
door             clips, sums and adds noise; private to `release`
mesh             the devices, and where arrays are on them
identity         everything that a release depends on
information_flow proves that a release tells nothing but its noisy sum
canaries         made-up clients through the release, for audits
accumulators     how contributions are added up
client           what one client computes
local_training   a client function: some steps of SGD
clipped_gradients  a client function: the sum of its examples' clipped gradients
evaluation       evaluates a public model on a device's own examples
"""

from jaxpfl.federated.accumulators import Compensated, FixedPoint
from jaxpfl.federated.adaptive_clipping import next_clip_norm
from jaxpfl.federated.client import BoundedByExample, ClientFn, ClientSteps, Examples, contribution
from jaxpfl.federated.clipped_gradients import ClippedGradients
from jaxpfl.federated.evaluation import correct_examples
from jaxpfl.federated.information_flow import InformationFlow
from jaxpfl.federated.local_training import LocalTraining
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.one_release import OneRelease
from jaxpfl.federated.optimizers import optimizer
from jaxpfl.federated.query import Execution, Query
from jaxpfl.federated.rehearsal import check_information_flow
from jaxpfl.federated.release import Release, Released, Releaser
from jaxpfl.federated.secure_release import SecureRelease
from jaxpfl.privacy.secret import Secret

__all__ = [
    "BoundedByExample",
    "ClientFn",
    "ClientSteps",
    "ClippedGradients",
    "Compensated",
    "Examples",
    "Execution",
    "FixedPoint",
    "InformationFlow",
    "LocalTraining",
    "OneRelease",
    "Query",
    "Release",
    "Released",
    "Releaser",
    "Secret",
    "SecureRelease",
    "check_information_flow",
    "client_mesh",
    "contribution",
    "correct_examples",
    "next_clip_norm",
    "optimizer",
]
