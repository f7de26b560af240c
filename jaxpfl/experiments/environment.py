"""The noise that a run has where it is computed."""

import hashlib
import json
from typing import Any

import jax

from jaxpfl.experiments.tracking import jsonable
from jaxpfl.federated.environment import environment as environment
from jaxpfl.privacy.keys import bound_to


def noise_root_in(
    environment: dict[str, Any], identity: dict[str, Any], noise_key: jax.Array
) -> jax.Array:
    """The root of a run's noise in one environment.

    A replayed round that comes out otherwise, because another machine rounds otherwise, must not
    carry the noise of the first release: their difference would be free of noise.
    """
    described = json.dumps(jsonable([identity, environment]), sort_keys=True)
    return bound_to(noise_key, hashlib.sha256(described.encode()).digest())
