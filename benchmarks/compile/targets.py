"""Machines that programs are compiled for, without having one.

JAX describes a TPU slice or a GPU from its name (`jax.experimental.topologies`), and that machine's
compiler makes the real program. It needs `libtpu` for TPUs, and `jax-cuda13-plugin` with
`jax-cuda13-pjrt` for GPUs (`make compile-check` installs them).

Peaks are those of the vendors' data sheets: dense bfloat16 products, memory bandwidth.
"""

import dataclasses
import os
from typing import Any

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine, with the figures of one of its devices.

    Attributes:
      topology: its name for JAX.
      memory: bytes of a device.
      flops: dense bfloat16 operations a second.
      bandwidth: bytes a second that a device reads or writes.
    """

    name: str
    platform: str
    topology: str
    devices: int
    memory: float
    flops: float
    bandwidth: float

    def mesh(self, **axes: int) -> Any:
        """A mesh over its devices with these axes and sizes; -1 is what the others leave."""
        import jax
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh

        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        jax.devices()  # the CPU's client, before the other plugin is loaded
        given = (
            {} if self.platform == "tpu" else {"topology": self.topology, "target_config": _H200}
        )
        described = topologies.get_topology_desc(
            platform=self.platform, topology_name=self.topology, **given
        )
        devices = np.array(described.devices).reshape(*axes.values())
        return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


_V5E = {"platform": "tpu", "memory": 16 * 2**30, "flops": 197e12, "bandwidth": 819e9}
_V5P = {"platform": "tpu", "memory": 95 * 2**30, "flops": 459e12, "bandwidth": 2_765e9}
_GPU = {"platform": "cuda", "memory": 151_397_597_184, "flops": 989e12, "bandwidth": 4_800e9}

TARGETS = {
    target.name: target
    for target in (
        Target("v5e-8", topology="v5e:2x4", devices=8, **_V5E),
        Target("v5e-256", topology="v5e:16x16", devices=256, **_V5E),
        Target("v5p-4", topology="v5p:2x2x1", devices=4, **_V5P),
        Target("h200", topology="1x1x1", devices=1, **_GPU),
        Target("h200-8", topology="1x8x1", devices=8, **_GPU),
    )
}
