"""One round: local training, and the release, the only way from clients to server.

`clients` and `flow` import no other folder, `release` imports these two, and `hosts` and `audits`
import these three. Beside them are `mesh`, the devices and where arrays are on them, and
`double_word`, sums as pairs of numbers.

clients     what one client computes
flow        the flow of information through a traced program
release     charges, samples, sums, adds noise and records: what must be trusted
hosts       several processes that compute one run
audits      releases on made-up clients
"""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.federated.audits.rehearsal import check_information_flow as check_information_flow
    from jaxpfl.federated.clients.client import BoundedByExample as BoundedByExample
    from jaxpfl.federated.clients.client import ClientFn as ClientFn
    from jaxpfl.federated.clients.client import ClientSteps as ClientSteps
    from jaxpfl.federated.clients.client import Examples as Examples
    from jaxpfl.federated.clients.client import Stateful as Stateful
    from jaxpfl.federated.clients.client import contribution as contribution
    from jaxpfl.federated.clients.clipped_gradients import ClippedGradients as ClippedGradients
    from jaxpfl.federated.clients.evaluation import correct_examples as correct_examples
    from jaxpfl.federated.clients.local_training import LocalTraining as LocalTraining
    from jaxpfl.federated.clients.local_training import Proximal as Proximal
    from jaxpfl.federated.clients.local_training import per_step as per_step
    from jaxpfl.federated.clients.optimizers import optimizer as optimizer
    from jaxpfl.federated.clients.personal import APFL as APFL
    from jaxpfl.federated.clients.personal import Ditto as Ditto
    from jaxpfl.federated.clients.personal import PersonalParts as PersonalParts
    from jaxpfl.federated.flow.check import InformationFlow as InformationFlow
    from jaxpfl.federated.mesh import client_mesh as client_mesh
    from jaxpfl.federated.release.query import Execution as Execution
    from jaxpfl.federated.release.query import Query as Query
    from jaxpfl.federated.release.releaser import OneRelease as OneRelease
    from jaxpfl.federated.release.releaser import Release as Release
    from jaxpfl.federated.release.releaser import Released as Released
    from jaxpfl.federated.release.releaser import Releaser as Releaser
    from jaxpfl.privacy.keys import RunSecret as RunSecret

__getattr__, __dir__, __all__ = lazy.face(__name__)
