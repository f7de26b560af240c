"""The programs of a release, traced for the devices of a mesh that need not be available."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.federated.double_word import DoubleWord, is_pair
from jaxpfl.federated.release import door as doors
from jaxpfl.federated.release.door import Door, Keys
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
      its share of the coordinates of one half of all sums; "release": adds up devices and noise;
      "gather": the result, whole on every device.
    """
    mesh, query = door.mesh, door.query
    everywhere = partial(placed, NamedSharding(mesh, PartitionSpec()))
    by_coordinate = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names))
    by_share = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    nothing = partial(zero_sums, query.accumulator, door._layout, door._like)
    sums = door._layout.placed(jax.eval_shape(nothing))
    scalar, key = everywhere(doors.shape_of()), everywhere(doors.key_shape())
    keys = Keys(key, key, everywhere(doors.shape_of((4,), np.uint32)))
    pairs = jax.tree.leaves(sums.contributions, is_leaf=is_pair)
    exchange = exchanged.trace(mesh, [pair.low for pair in pairs])
    half = placed(by_coordinate, exchange.out_info)
    total, private = DoubleWord(half, half), query.plan.private
    scalars = (scalar, scalar, scalar)
    release = doors._release.trace(
        query.accumulator, mesh, private, total, sums.below, *scalars, keys, None
    )
    value = placed(by_share, release.out_info[0])
    return {
        "accumulate": door.trace(broadcast, door.bucket(columns)),
        "exchange": exchange,
        "release": release,
        "gather": gathered.trace(mesh, value, door._like),
    }
