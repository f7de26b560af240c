"""How far one example moves a float32 sum over examples, rounding included.

Where the unit is the example, those that take part are dealt to places in a uniformly random order,
which is as secret as the cohort (`privacy.participation.shuffled`). Places are in blocks of b; all
blocks but the last are full, and each is summed by the client function.

**Two blocks change.** Deal n examples at random. Give one example more a random one of n + 1
places, and its holder, if there is one, place n + 1: all n + 1 are then dealt at random, too. So
two neighbouring data sets can be dealt alike but for that place and the last one. Divergences are
jointly convex: it is enough that the two sums are close for each such pair. (Draws of the examples,
which are alike for all places, go with their holders.) All buckets have one shape, so that all
blocks are summed by one program, in which an example's share has the same bits in each place, and a
block that did not change has the same sum. The difference is then the new share, of norm at most S,
and rounding, which the two blocks, and the sums that they enter, may have with it and without it.

**Rounding.** With u = 2^-24, a float32 operation loses at most u of its result. Of numbers added up
in any order, no partial sum of i shares is longer than i S.

| sums                                      | lose at most, in S                                  |
|-------------------------------------------|-----------------------------------------------------|
| a block of b shares, each of which is     | b r u                                               |
| rounded r times on its way                |                                                     |
| k blocks in plain float32                 | b (k (k + 1) / 2 - 1) u                             |
| m such subtotals of n examples, as pairs  | m n 2^-47 (Joldes et al. 2017, `double_word.plus`)  |

The first two are lost by two blocks and two subtotals, with the example and without it: four times.
All other subtotals are the same numbers, and their running sums are rounded twice. A share's own
norm, S (1 + 1e-6), joining the devices, and products of these small numbers are less than 2^-16 in
all.

Within a block, additions in any order are b (b + 1) / 2 - 1 partial sums: r = (b + 1) / 2. By
steps, batches of B are added up first and then steps of them, r = (B + steps + 2) / 2. Four more
are for what a share is multiplied by. A function that rounds less says so by `roundings`.
"""

import math

from jaxpfl.data.cohort import CohortSpec
from jaxpfl.federated.clients.client import ClientFn, Stepping
from jaxpfl.federated.release.accumulators import BLOCKS
from jaxpfl.privacy.plan import Plan

_UNIT = 2.0**-24


def example_rounding(client_fn: ClientFn, cohort: CohortSpec, replicas: int, plan: Plan) -> float:
    """Returns the most that rounding adds to what one example moves the sum by, in clip norms.

    Args:
      cohort: its `max_examples` are a block's, and its clients the blocks.
      replicas: devices, or copies of the model, to which a bucket's blocks are dealt.
      plan: of examples. More than twice as many as planned, and 200, take part in a round with
        probability e^-240 at most (Chernoff).
    """
    block, capacity = cohort.max_examples, cohort.capacity
    examples = min(plan.population, 2 * plan.clients_per_round + 200)
    by_steps = isinstance(client_fn, Stepping)
    longest = cohort.batch_size + cohort.max_steps if by_steps else block
    roundings = getattr(client_fn, "roundings", longest / 2 + 5)
    share = -(-capacity // replicas)
    side = min(BLOCKS, share)
    two_blocks = 4 * block * _UNIT * (roundings + side * (side + 1) / 2 - 1)
    # Each block may be a subtotal of its own, by chunks that do not divide `BLOCKS`.
    subtotals = math.ceil(examples / (block * capacity)) * share
    return two_blocks + examples * subtotals * 2.0**-46 + 2.0**-16
