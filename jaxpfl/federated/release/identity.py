"""The identity of a release: everything that its bits depend on, except the secret and the sum.

Two releases with one identity ask the same question (broadcast and clip norm) of the same clients
with the same program on the same machine. A release with another identity has a cohort and a charge
of its own. The rounds of an epoch, which share a charge, share a part of their identity.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import cores
from jaxpfl.data.columns import Column
from jaxpfl.federated.clients import client
from jaxpfl.federated.clients.client import Examples, PyTree
from jaxpfl.federated.release.query import Query
from jaxpfl.privacy.plan import Plan

# From files of the installed packages: once, not for every release.
version = functools.cache(importlib.metadata.version)
_PACKAGES = ("jaxpfl", "jax", "jaxlib", "flax", "optax", "numpy")
# Options of JAX that change how a program rounds or which numbers a key gives.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_disable_jit",
    # With it, arrays that a function closes over are no part of its lowered text.
    "jax_use_simplified_jaxpr_constants",
)
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# The parts of jaxpfl that draw cohorts and noise and add up clients.
_PARTS, _PACKAGE = ("data", "federated", "privacy"), Path(__file__).parents[2]


class Identity(NamedTuple):
    """The identity of a release, as four texts whose keyed hashes the release uses. PRIVATE.

    Attributes:
      charge: identifies the charge; the rounds of an epoch share it.
      release: identifies this release alone.
      cohort: identifies the cohort; the rounds of all epochs share it.
      shared: identifies the run, for noise that its rounds share; or this release, for clients'.
    """

    charge: str
    release: str
    cohort: str
    shared: str

    @classmethod
    def of(cls, plan: Plan, run: str, question: str, round: int) -> "Identity":
        """The identity of a round.

        Args:
          run: the run's identity: `described`, the run's name and the query's label.
          question: a digest of broadcast and clip norm, and of the clients' states.
        """
        if plan.participation.in_epochs:
            # A client has the same place in all epochs.
            release = f"{run} {round}"
            shared = release if plan.local else run
            return cls(f"{run} {plan.charge_number(round)}", release, run, shared)
        plan.check_round(round)
        release = f"{run} {round} {question}"
        return cls(release, release, release, release if plan.local else run)


def environment() -> dict[str, Any]:
    """Everything on this machine that rounding may depend on, as plain values for JSON."""
    return {
        "devices": [device.device_kind for device in jax.devices()],
        "processor": cores.processor(),
        # Matrix products are split over this many threads.
        "cores": cores.number(),
        "versions": {name: version(name) for name in _PACKAGES},
        # Between two versions, too: another sampler draws other noise for the same sum.
        "code": code(_PACKAGE),
        "options": {name: str(getattr(jax.config, name)) for name in _OPTIONS},
        "flags": {name: os.environ.get(name, "") for name in _VARIABLES},
    }


@functools.cache
def code(package: Path) -> str:
    """The SHA-256 (hex) of the sources that decide a release, besides the client's program."""
    content = hashlib.sha256()
    for part in _PARTS:
        for file in sorted((package / part).rglob("*.py")):
            own = hashlib.sha256(file.read_bytes()).hexdigest()
            content.update(f"{file.relative_to(package).as_posix()} {own} ".encode())
    return content.hexdigest()


def traced(query: Query, broadcast: PyTree, columns: Mapping[str, Column]) -> Any:
    """A query's client function as JAX traces it for one client; only shapes and dtypes count."""
    shape, rows = jax.ShapeDtypeStruct, (query.cohort.rungs[-1], query.cohort.batch_size)
    batches: Any = {
        name: shape((*rows, *column.shape[1:]), jax.dtypes.canonicalize_dtype(column.dtype))
        for name, column in columns.items()
    }
    mask: Any = shape(rows, np.bool_)
    steps: Any = shape((), np.int32)
    examples = Examples(batches, mask, steps)
    shapes = jax.tree.map(lambda leaf: shape(np.shape(leaf), leaf.dtype), broadcast)
    return client.traced(query.client_fn, query.label, shapes, examples)


def described(query: Query, program: str, content: str, fingerprint: str, environment: Any) -> str:
    """Everything that a query's releases depend on, except run and round, as text.

    Args:
      program: of the `PreparedQuery`.
      environment: of the processes that compute them, as `environment` describes it.
    """
    execution = query.execution
    kinds = np.vectorize(lambda device: device.device_kind, otypes=[object])
    return json.dumps(
        {
            "population": fingerprint,
            "content": content,
            "plan": query.plan.to_dict(),
            "program": program,
            "cohort": str(query.cohort),
            "chunk": execution.chunk,
            # Nested as the mesh is.
            "mesh": kinds(execution.devices.devices).tolist(),
            "environment": environment,
        },
        sort_keys=True,
    )
