"""DP-SGD over federated examples: each single example is protected, whoever holds it.

Source: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang 2016, "Deep Learning with
Differential Privacy", Algorithm 1.

It is `fed_avg` with another client function, `ClippedGradients`, and cohorts of examples: each is
drawn with probability q from those of all clients. The mean is over n = q N, a public constant: the
number of drawn examples is private. The promise is weaker: it protects an example, and not a person
with many of them.
"""

import math
from typing import Any

import optax

from jaxpfl.algorithms.base import Algorithm, require_parts
from jaxpfl.algorithms.fed_avg import fed_avg
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.clipped_gradients import ClippedGradients
from jaxpfl.federated.release.query import Execution
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


def fed_sgd(
    model: Model,
    *,
    server: optax.GradientTransformation,
    plan: Plan,
    cohort: CohortSpec | None = None,
    execution: Execution | None = None,
    start: Any = None,
) -> Algorithm:
    """Returns DP-SGD for `model` under `plan`, whose unit is the example.

    Args:
      model, execution, start: as for `fed_avg`.
      server: the optimiser, e.g. `optax.sgd(0.5)` or `optax.adam(1e-3)`.
      plan: privacy of the whole run, with `unit="example"`: its population counts examples, and
        its clip norm bounds one example's gradient.
      cohort: how many examples are computed side by side (`batch_size`) and how many make a block
        that one device computes (`max_examples`); default equal numbers, at most 32, so that the
        plan's examples fill as many blocks on each device. Neither changes what is computed, beyond
        rounding.

    State and metrics are those of `fed_avg`. `InputError` as there, and if the plan's unit is the
    client.
    """
    require_parts(model, plan, server=server)
    if plan.unit != "example":
        what = "fed_sgd protects single examples: it needs a plan with unit = 'example'"
        raise InputError(f"{what}, found {plan.unit!r} (fed_avg protects clients)")
    execution = Execution() if execution is None else execution
    if cohort is None:
        # Blocks of at most 32 examples that those of a round fill, which are seldom more than two
        # standard deviations above the planned number. With more in a block, an example takes
        # longer: the values between two layers leave a core's cache.
        planned = plan.denominator
        most = planned + 2 * math.sqrt(planned * (1 - planned / plan.population))
        blocks = execution.replicas * math.ceil(most / (32 * execution.replicas))
        size = math.ceil(most / blocks)
        cohort = CohortSpec(batch_size=size, max_examples=size)
    return fed_avg(
        model,
        client=ClippedGradients(model, plan.clip_norm),
        server=server,
        plan=plan,
        cohort=cohort,
        execution=execution,
        start=start,
    )._replace(name="fed_sgd")
