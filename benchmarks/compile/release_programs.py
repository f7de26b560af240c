"""The programs of a release, traced for the devices of a mesh that need not be available."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.federated.double_word import DoubleWord, is_pair
from jaxpfl.federated.release import door as doors
from jaxpfl.federated.release.door import Door
from jaxpfl.federated.release.summing import placed, zero_sums
from jaxpfl.federated.release.vector import exchanged, gathered


def release_programs(
    door: Door, broadcast: Any, columns: Mapping[str, Any]
) -> dict[str, jax.stages.Traced]:
    """Traces the programs that one release runs.

    Args:
      broadcast, columns: only shapes and dtypes are used.

    Returns:
      "accumulate": adds a bucket of the largest shape to the sums; "exchange": gives each device
      its share of the coordinates of one half of all sums; "join": adds up devices; "release": adds
      the noise, whose key the host makes in between; "gather": the result, whole on every device.
    """
    mesh, query = door.mesh, door.query
    everywhere = partial(placed, NamedSharding(mesh, PartitionSpec()))
    by_coordinate = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names))
    by_share = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    nothing = partial(zero_sums, query.accumulator, door._layout, door._like)
    sums = door._layout.placed(jax.eval_shape(nothing))
    scalar, words = everywhere(doors.shape_of()), everywhere(doors.shape_of((4,), np.uint32))
    pairs = jax.tree.leaves(sums.contributions, is_leaf=is_pair)
    exchange = exchanged.trace(mesh, [pair.low for pair in pairs])
    half = placed(by_coordinate, exchange.out_info)
    join = doors._joined.trace(query.accumulator, mesh, DoubleWord(half, half), sums.below)
    total = placed(by_share, join.out_info[0])
    noise = doors._noised.trace(
        query.accumulator, mesh, query.plan.private, total, *[scalar] * 4, words, None
    )
    value = placed(by_share, noise.out_info[0])
    return {
        "accumulate": door.trace(broadcast, door.bucket(columns)),
        "exchange": exchange,
        "join": join,
        "release": noise,
        "gather": gathered.trace(mesh, value, door._like),
    }
