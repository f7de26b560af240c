"""The clients' data: populations, their sources, and the packing of a cohort."""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.data.clients import from_clients as from_clients
    from jaxpfl.data.cohort import Bucket as Bucket
    from jaxpfl.data.cohort import Cohort as Cohort
    from jaxpfl.data.cohort import CohortSpec as CohortSpec
    from jaxpfl.data.cohort import prefetch as prefetch
    from jaxpfl.data.open import open as open
    from jaxpfl.data.partitions import Dirichlet as Dirichlet
    from jaxpfl.data.partitions import Iid as Iid
    from jaxpfl.data.partitions import Pathological as Pathological
    from jaxpfl.data.partitions import partition as partition
    from jaxpfl.data.population import Population as Population
    from jaxpfl.data.population import from_rows as from_rows
    from jaxpfl.data.readers.frames import from_dataframe as from_dataframe

__getattr__, __dir__, __all__ = lazy.face(__name__)
