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
block that did not change has the same sum. What differs is then the new share, of norm at most S,
and rounding, which the two blocks, and the sums that they enter, may have with it and without it.

**Rounding.** With u = 2^-24, a float32 operation loses at most u of its result. Of numbers added up
in any order, no partial sum of i shares is longer than i S.

| sums                                     | lose at most, in S                                   |
|------------------------------------------|------------------------------------------------------|
| a block of b shares, each of which is    | b r u                                                |
| rounded r times on its way               |                                                      |
| c blocks side by side in plain float32   | b (c (c + 1) / 2 - 1) u                              |
| a bucket of k blocks on a device, as a   | (k / c) b k 2^-47, as each addition loses 2^-47      |
| pair                                     | (Joldes et al. 2017, see `double_word.plus`)         |
| m buckets, as pairs                      | 2^-46 of at most i b k after i of them: N (m + 1)    |
|                                          | 2^-47                                                |

The first three are lost by two blocks (or chunks, or subtotals), with the example and without it:
four times. All buckets' subtotals but two are the same numbers, and their running sums are rounded
twice. A share's own norm, S (1 + 1e-6), joining the devices, and products of these small numbers
are less than 2^-16 in all.

Within a block, additions in any order are b (b + 1) / 2 - 1 partial sums: r = (b + 1) / 2. By
steps, batches of B are added up first and then steps of them, r = (B + steps + 2) / 2. Four more
are for what a share is multiplied by. A function that rounds less says so by `roundings`.
"""

import math

from jaxpfl.data.cohort import CohortSpec
from jaxpfl.federated.clients.client import ClientFn, Stepping

_UNIT = 2.0**-24


def example_rounding(
    client_fn: ClientFn, cohort: CohortSpec, *, chunk: int, replicas: int, examples: int
) -> float:
    """Returns the most that rounding adds to what one example moves the sum by, in clip norms.

    Args:
      cohort: its `max_examples` are a block's, its clients the blocks.
      chunk: the most blocks that a device adds up side by side.
      replicas: devices, or copies of the model, to which a bucket's blocks are dealt.
      examples: the most that take part.
    """
    block, capacity = cohort.max_examples, cohort.capacity
    by_steps = isinstance(client_fn, Stepping)
    longest = cohort.batch_size + cohort.max_steps if by_steps else block
    roundings = getattr(client_fn, "roundings", longest / 2 + 5)
    share = -(-capacity // replicas)
    buckets = math.ceil(examples / (block * capacity))
    two_blocks = 4 * block * _UNIT * (roundings + chunk * (chunk + 1) / 2 - 1)
    subtotals = 4 * block * share * math.ceil(share / chunk) * 2.0**-47
    running = examples * (buckets + 1) * 2.0**-46
    return two_blocks + subtotals + running + 2.0**-16
