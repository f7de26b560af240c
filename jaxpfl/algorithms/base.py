"""What an algorithm is to everything that runs one."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxpfl.data.cohort import Bucket, CohortSpec
from jaxpfl.models.base import Model
from jaxpfl.privacy.keys import RoundKeys
from jaxpfl.privacy.plan import Plan

State = Any
Metrics = dict[str, jax.Array]


class Algorithm(NamedTuple):
    """Pure functions over a state, with what is needed to sample and pack its cohorts.

    Attributes:
      init: `(key) -> state`, a pytree of arrays.
      step: `(state, cohort, keys) -> (state, metrics)`, one round. What it returns has been
        through the door, so it is public by construction. The state's buffers are donated.
      params: `(state) -> model parameters`.
      plan: makes the cohorts' sampler, the noise and the ledger's events.
      cohort: how a client's examples are capped and batched.
      model: what is trained.
      shards: over how many devices a cohort is dealt.
    """

    init: Callable[[jax.Array], State]
    step: Callable[[State, Iterable[Bucket], RoundKeys], tuple[State, Metrics]]
    params: Callable[[State], Any]
    plan: Plan
    cohort: CohortSpec
    model: Model
    shards: int
