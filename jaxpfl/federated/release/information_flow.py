"""Proves of a release's program that nothing of the clients leaves it but by the noisy sum.

`check_release` runs before a query is first charged (`release.prepared_query`). It reads two
programs, as JAX traces them. The program of ONE client must compute from its operands alone:
callbacks, collectives, rules of its own under vmap and unknown operations are refused. The inputs
of the door's program, as `release.prepared_query` opens it, are labelled, and the labels are
followed through every equation (`federated.flow`). An output may depend on the clients only through
these six steps, in this order:

| step              | what is required of it, in the program that was traced                      |
|-------------------|-----------------------------------------------------------------------------|
| the client's own  | it does nothing but compute; whatever it returns is private                 |
| `clip_factors`    | the bound is the round's clip norm, which is public                         |
| `scaled`          | a contribution is multiplied by its own factor, row by row, or left out     |
| `bound_to_bits`   | the noise's key follows from a secret and a hash of all that is summed       |
| `standard_normal`,| a draw for each coordinate, with such a key, and with each key once         |
| `exact_normal`    |                                                                             |
| `rounded_sum`,    | noise of a public size is added to sums of such products, on all coordinates|
| `whole_sum`       |                                                                             |

Where each client adds noise (trust "local"), `noisy_rows` takes the place of `scaled` and of
all later steps but the name's: contributions are clipped and get noise of a public size from a
secret in one step, and their sums are released.

Steps are recognised by where their functions are defined. That each does what its name says, that
one client moves a sum of scaled contributions by at most S, and that the noise has the plan's size
is not proven here: other tests hold it. The noise's key depends on the exact sum by its hash alone,
the output of a pseudorandom function that the host computes (see `release.sum_digest`); this is the
only dependence on clients that is allowed without noise, together with a release's name, another
part of that output.

Not seen: how long a program takes, and what a client function captured when it was made: numbers
and arrays of its closure are constants of the program, and count as public. The report lists them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpfl.errors import InformationLeak
from jaxpfl.federated.clients.client import RULES, PyTree, compiled_part
from jaxpfl.federated.flow.analysis import Steps
from jaxpfl.federated.flow.check import InformationFlow, Labelled, check_program
from jaxpfl.federated.flow.client_program import ClientProgram, captured, read
from jaxpfl.federated.release.accumulators import rounded_sum, scaled, whole_sum
from jaxpfl.federated.release.door import Door, Keys, Summed, key_shape, shape_of
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.sum_digest import bound_to_bits
from jaxpfl.privacy.clipping import clip_factors
from jaxpfl.privacy.exact_noise import exact_normal
from jaxpfl.privacy.mechanisms import standard_normal

STEPS = Steps(
    compute=compiled_part,
    clip=clip_factors,
    scale=scaled,
    bind=bound_to_bits,
    draw=(standard_normal, exact_normal),
    add_noise=(rounded_sum, whole_sum),
    rules=RULES,
)


def check_release(
    query: Query, door: Door, client: Any, broadcast: PyTree, columns: Mapping[str, Any]
) -> InformationFlow:
    """Proves that a query's release tells nothing of the clients but by its noisy sum.

    Nothing is compiled or run, but traced: at every rung of the ladder, with the chunk that is run.
    `client` is the client function as traced for one client; of arrays, only shapes and dtypes are
    used.
    """
    plan, client_program = query.plan, check_client(query, client)
    noise = None
    if plan.correlated:
        noise = shape_of((door.coordinates,), np.int32 if plan.exact else np.float32)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), broadcast)
    buckets = [door.bucket(columns, rung) for rung in query.cohort.rungs]
    # At least two, so that what the first one adds is an input of the second.
    secrets = shape_of((8,), np.uint32), key_shape(plan)  # see `door.Keys`
    inputs = Labelled(shapes, shape_of(), [*buckets, buckets[0]], *secrets, noise)

    def release(inputs: Labelled) -> Summed:
        keys = Keys(inputs.secrets, inputs.noise_key)
        return door(inputs.public, inputs.clients, inputs.clip_norm, keys, inputs.noise)

    steps = local_steps() if plan.local else STEPS
    flow = check_program(release, inputs, steps, clips=plan.unit == "client", private=plan.private)
    constants = {*captured(query.client_fn), *client_program.constants, *flow.constants}
    return flow._replace(constants=tuple(sorted(constants)), alone=client_program.alone)


def local_steps() -> Steps:
    """Where the server adds nothing: what is not scaled and noised at once is private."""
    # Seldom used, and therefore loaded here.
    from jaxpfl.federated.release.local_noise import noisy_rows

    return STEPS._replace(scale=noisy_rows, draw=(), add_noise=())


def check_client(query: Query, client: Any) -> ClientProgram:
    """The first half of `check_release`, which reads the client function's program."""
    platform = query.execution.platform
    try:
        program = read(client.jaxpr, STEPS.rules, platform)
        if program.alone and query.plan.unit == "example":
            raise InformationLeak(
                f"an operation that was not tried side by side on a {platform}, so that examples "
                f"might not be kept apart: {program.alone[0]}"
            )
    except InformationLeak as error:
        raise InformationLeak(
            f"the client function of query {query.label!r}: {error}. Take it out; or run it with "
            "Plan.without_privacy(..., unchecked=True), which says of everything that it is not "
            "private"
        ) from None
    return program
