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

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.federated.audits.rehearsal import check_information_flow as check_information_flow
    from jaxpfl.federated.clients.client import BoundedByExample as BoundedByExample
    from jaxpfl.federated.clients.client import ClientFn as ClientFn
    from jaxpfl.federated.clients.client import ClientSteps as ClientSteps
    from jaxpfl.federated.clients.client import Examples as Examples
    from jaxpfl.federated.clients.client import contribution as contribution
    from jaxpfl.federated.clients.clipped_gradients import ClippedGradients as ClippedGradients
    from jaxpfl.federated.clients.evaluation import correct_examples as correct_examples
    from jaxpfl.federated.clients.local_training import LocalTraining as LocalTraining
    from jaxpfl.federated.clients.optimizers import optimizer as optimizer
    from jaxpfl.federated.mesh import client_mesh as client_mesh
    from jaxpfl.federated.release.accumulators import Compensated as Compensated
    from jaxpfl.federated.release.accumulators import FixedPoint as FixedPoint
    from jaxpfl.federated.release.adaptive_clipping import next_clip_norm as next_clip_norm
    from jaxpfl.federated.release.information_flow import InformationFlow as InformationFlow
    from jaxpfl.federated.release.one_release import OneRelease as OneRelease
    from jaxpfl.federated.release.query import Execution as Execution
    from jaxpfl.federated.release.query import Query as Query
    from jaxpfl.federated.release.releaser import Release as Release
    from jaxpfl.federated.release.releaser import Released as Released
    from jaxpfl.federated.release.releaser import Releaser as Releaser
    from jaxpfl.federated.release.secure_release import SecureRelease as SecureRelease
    from jaxpfl.privacy.secret import RunSecret as RunSecret

__getattr__, __dir__, __all__ = lazy.face(__name__)
