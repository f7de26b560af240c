"""Weak scaling of one round of local SGD: ours and DrJAX's primitives, cohort and devices together.

    python -m benchmarks.macro.weak_scaling        # in the environment of `make compile-check`
    python -m benchmarks.macro.weak_scaling --figure docs/weak_scaling.png     # of stored rows

Rush et al. 2024 ("DrJAX: scalable and differentiable MapReduce primitives in JAX") report that a
round takes the same time when the cohort grows with the devices. Here the same round is written
three times, with 32 clients a device, 5 local steps of 20 examples each, and the fully connected
network of McMahan et al. 2017 for images of 784 numbers (170,462 parameters):

    DrJAX              `broadcast`, `map_fn` and `reduce_mean`: no clipping, no noise
    ours, not private  the door without clipping and noise; sums are compensated
    ours, private      the door: clipping, compensated sum, hash, noise

- compiled for 1, 8, 64 and 256 chips of TPU v5e, which need not be at hand: operations and bytes of
  one chip as the compiler counts them (a loop counts once), bytes of its collectives' results,
  temporaries, and CPU seconds of compilation; of all programs of a round together.
- run on 1, 2, 4 and 8 virtual CPU devices: wall and CPU time of a round, the best of the repeats.
  Devices share the cores, so that the CPU time of a client is what should stay the same. DrJAX's
  parameters and ours must agree after the round.

Neither has packing or a ledger inside.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from benchmarks import comparison, harness

CLIENTS, STEPS, BATCH = 32, 5, 20  # of a device, of a client, of a step
FEATURES, CLASSES, HIDDEN = 784, 62, 200
LEARNING_RATE, CLIP_NORM = 0.1, 0.5
WHATS = ("DrJAX", "ours, not private", "ours, private")
# A slice has four chips or more; of the first one, one chip is used.
_TOPOLOGIES = {1: "v5e:2x2", 8: "v5e:2x4", 64: "v5e:8x8", 256: "v5e:16x16"}


@dataclasses.dataclass(frozen=True)
class Config:
    chips: tuple[int, ...] = tuple(_TOPOLOGIES)
    devices: tuple[int, ...] = (1, 2, 4, 8)
    whats: tuple[str, ...] = WHATS
    repeats: int = 5
    figure: pathlib.Path | None = None


def network() -> Any:
    from jaxpfl.models.classifiers import MLP

    return MLP(FEATURES, CLASSES, HIDDEN)


def drjax_round(mesh: Any) -> Callable[..., Any]:
    """A jitted round: (params, {column: [C, S, B, ...]}) -> params, clients dealt to the mesh."""
    import drjax  # pyright: ignore[reportMissingImports]
    import jax
    import jax.numpy as jnp

    model = network()

    def client(params, batches_SxB):
        def step(local, batch):
            gradients = jax.grad(lambda p: model.loss(p, batch, jnp.ones(BATCH, bool))[0])(local)
            return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, local, gradients), None

        trained, _ = jax.lax.scan(step, params, batches_SxB)
        return jax.tree.map(jnp.subtract, trained, params)

    @drjax.program(placements={"clients": CLIENTS * mesh.size})
    def round_(params, batches_CxSxB):
        dealt = drjax.broadcast(params, mesh=mesh)
        delta_C = drjax.map_fn(client, (dealt, batches_CxSxB), mesh=mesh)
        return jax.tree.map(jnp.add, params, drjax.reduce_mean(delta_C))

    return jax.jit(round_)


def door_of(mesh: Any, private: bool) -> Any:
    """The door of the same round."""
    import jax
    import optax

    import jaxpfl as jp
    from jaxpfl.federated.clients.local_training import LocalTraining
    from jaxpfl.federated.release.door import Door

    cohort = CLIENTS * mesh.size
    participation = jp.Poisson(100 * cohort, cohort)
    if private:
        plan = jp.Plan(
            rounds=10,
            clip=jp.Clip(CLIP_NORM),
            noise=jp.Noise(1.0),
            participation=participation,
            delta=1e-7,
        )
    else:
        plan = jp.Plan.without_privacy(rounds=10, participation=participation)
    model = network()
    training = LocalTraining(model, optax.sgd(LEARNING_RATE))
    spec = jp.CohortSpec(BATCH, STEPS * BATCH, one_shape=True, clients_per_bucket=cohort)
    query = jp.Query("update", training, plan, spec, execution=jp.Execution(mesh, CLIENTS))
    return Door(query, jax.eval_shape(model.init, jax.random.key(0)))


def compiled(what: str, chips: int) -> dict[str, Any]:
    """What the compiler says of a round's programs, on each of `chips` chips."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from benchmarks.compile import reading
    from benchmarks.compile.release_programs import release_programs
    from benchmarks.compile.targets import TARGETS

    target = dataclasses.replace(TARGETS["v5e-8"], topology=_TOPOLOGIES[chips])
    devices = target.mesh(clients=-1).devices[:chips]
    mesh = Mesh(devices, ("clients",), axis_types=(AxisType.Auto,))
    params = jax.eval_shape(network().init, jax.random.key(0))
    columns = {"features": np.empty((0, FEATURES), np.float32), "label": np.empty(0, np.int32)}
    if what == "DrJAX":
        shape = (CLIENTS * chips, STEPS, BATCH)

        def placed(shape, dtype, *spec):
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        everywhere = jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), params)
        batches = {
            name: placed((*shape, *column.shape[1:]), column.dtype, "clients")
            for name, column in columns.items()
        }
        stages = [drjax_round(mesh).trace(everywhere, batches)]
    else:
        programs = release_programs(door_of(mesh, what == "ours, private"), params, columns)
        # Both halves of the sums are exchanged.
        stages = [*programs.values(), programs["exchange"]]
    totals: dict[str, float] = dict.fromkeys(("flops", "bytes", "collective bytes", "compile s"), 0)
    temporaries, done = 0, {}
    for stage in stages:
        if id(stage) not in done:
            began = time.process_time()
            done[id(stage)] = stage.lower().compile()
            totals["compile s"] += time.process_time() - began
        program = done[id(stage)]
        for name, number in reading.cost(program).items():
            totals[name] += number
        found = reading.collectives(reading.text_of(program))
        totals["collective bytes"] += sum(sum(sizes) for sizes in found.values())
        temporaries = max(temporaries, reading.memory(program)["temporaries"])
    return {"chips": chips, "what": what, **totals, "temporaries": temporaries}


def ran(what: str, devices: int, repeats: int) -> dict[str, Any]:
    """The best times of a round on virtual CPU devices, and the parameters after it."""
    harness.use_cpu_devices(devices)
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.rounds import door_keys, whole_bucket
    from jaxpfl.federated import client_mesh

    mesh = client_mesh()
    cohort = CLIENTS * devices
    shape, rng = (cohort, STEPS, BATCH), np.random.default_rng(0)
    columns = {
        "features": rng.normal(size=(*shape, FEATURES)).astype(np.float32),
        "label": rng.integers(0, CLASSES, shape).astype(np.int32),
    }
    params = network().init(jax.random.key(0))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    dealt = NamedSharding(mesh, PartitionSpec("clients"))
    if what == "DrJAX":
        round_ = functools.partial(drjax_round(mesh), params, jax.device_put(columns, dealt))
    else:
        door = door_of(mesh, what == "ours, private")
        bucket, keys = whole_bucket(columns, dealt), door_keys()
        clip_norm = jnp.float32(door.query.plan.clip_norm)

        def round_():
            found = door(params, (bucket,), clip_norm, keys)
            return jax.tree.map(lambda p, total: p + total / cohort, params, found.value)

    after = jax.block_until_ready(round_())
    wall, processor = [], []
    for _ in range(repeats):
        began = time.perf_counter(), time.process_time()
        jax.block_until_ready(round_())
        wall.append(time.perf_counter() - began[0])
        processor.append(time.process_time() - began[1])
    moved = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), after, params)
    norm = float(np.sqrt(sum(np.sum(leaf * leaf) for leaf in jax.tree.leaves(moved))))
    return {
        "devices": devices,
        "what": what,
        "wall s": min(wall),
        "CPU ms a client": 1e3 * min(processor) / cohort,
        "moved": norm,
    }


def _in_a_process(call: str) -> dict[str, Any]:
    """The row that an expression gives, in a process of its own."""
    code = f"import json; from benchmarks.macro.weak_scaling import *; print(json.dumps({call}))"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{call} failed:\n{done.stderr}")
    row = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row), flush=True)
    return row


def main(config: Config) -> None:
    if config.figure is not None:
        draw(stored(), config.figure)
        return
    for chips in config.chips:
        rows = [_in_a_process(f"compiled({what!r}, {chips})") for what in config.whats]
        harness.record("weak_scaling", rows)
    for devices in config.devices:
        rows = [
            _in_a_process(f"ran({what!r}, {devices}, {config.repeats})") for what in config.whats
        ]
        moved = {row["what"]: row["moved"] for row in rows}
        expected = moved.get("DrJAX", 0.0)
        if abs(moved.get("ours, not private", expected) - expected) > 1e-4 * expected:
            raise SystemExit(f"the rounds differ, so that their times say nothing: {moved}")
        harness.record("weak_scaling", rows)


def stored() -> list[dict[str, Any]]:
    """The newest row of each program on each number of chips or devices."""
    rows = comparison.read(harness.RESULTS / "weak_scaling.jsonl")
    return list({(row["what"], row.get("chips"), row.get("devices")): row for row in rows}.values())


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Bytes exchanged and temporaries by chips, and CPU time of a client by devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.0), dpi=144, layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, along, column, scale, title in (
        (panels[0], "chips", "collective bytes", 1e-6, "exchanged by a v5e chip, MB"),
        (panels[1], "chips", "temporaries", 1e-6, "temporaries on a v5e chip, MB"),
        (panels[2], "devices", "CPU ms a client", 1.0, "CPU time of a client, ms"),
    ):
        for what, marker in zip(WHATS, "os^", strict=True):
            found = sorted(
                (row[along], scale * row[column])
                for row in rows
                if row["what"] == what and along in row
            )
            axes.plot(*zip(*found, strict=True), marker=marker, label=what)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        ticks = sorted({row[along] for row in rows if along in row})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("chips" if along == "chips" else "virtual CPU devices")
        axes.set_title(title, fontsize="medium")
    panels[2].legend(fontsize="small", loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
