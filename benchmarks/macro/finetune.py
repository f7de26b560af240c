"""Fine-tuning of a DistilGPT2-shaped model, in tokens per second, against transformers + PyTorch.

    python -m benchmarks.macro.finetune
    python -m benchmarks.macro.finetune --torch PYTHON

POPri's downstream model: 82 M parameters (6 layers, 768 features, 50,257 tokens, tied), samples of
64 tokens, float32, AdamW with clipping, random weights. Ours is the step of
`jaxpfl.experiments.central.training.fit`, on one device and with the batch dealt over several
virtual CPU devices. PYTHON is the interpreter (or its environment's folder) of an installation of
PyTorch and transformers, which train the same model in a process of their own, the programs taking
turns.

Both start from the same parameters; the benchmark ends if their losses before the first step, or
after the last of the first turn, differ. GFLOP/s count 6 operations a parameter and token, and
those of attention.

On a CPU one device with all threads is the faster: virtual devices each update all parameters.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.peer import Peer, check

CHILD = pathlib.Path(__file__).with_name("finetune_against.py")


@dataclasses.dataclass(frozen=True)
class Config:
    batch: int = 8  # samples a step
    length: int = 64  # tokens a sample
    steps: int = 2  # a turn
    devices: tuple[int, ...] = (1, 2)  # virtual CPU devices that share a batch
    torch: pathlib.Path | None = None
    repeats: int = 5
    layers: int = 6
    products: Literal["float32", "tensorfloat32"] = "float32"  # of a GPU, on both sides


def ours(
    model: Any, params: Any, tokens_SxBxL: np.ndarray, settings: Any, devices: int
) -> Callable[[], float]:
    """Returns a function that makes the steps and returns the last one's loss."""
    import jax
    from jax.sharding import Mesh

    from jaxpfl.experiments.central import training

    steps, batch, length = tokens_SxBxL.shape
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("data",))
    everywhere, dealt = training.shardings(mesh)
    columns = jax.device_put({"tokens": tokens_SxBxL.reshape(-1, length)}, everywhere)
    order = jax.device_put(training.batches(np.arange(steps * batch), batch), dealt)
    state = training.start(params, settings, steps, everywhere)
    ends = jax.device_put((np.int32(0), np.int32(steps)), everywhere)

    def turn() -> float:
        nonlocal state
        state, loss = training.run(model, settings, steps, state, None, columns, order, *ends)
        return float(loss)

    return turn


def gigaflops(model: Any, params: Any, batch: int, length: int) -> float:
    """Of one step: forward and twice that backward, for matrix products alone."""
    from jaxpfl.models.base import count_parameters

    config, tokens = model.config, batch * length
    # The embedding counts once, as the output layer.
    products = count_parameters(params) - count_parameters(params["embed"]["position"])
    attention = config.layers * 2 * length * config.hidden_size
    return 6e-9 * tokens * (products + attention)


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(max(config.devices))
    import jax
    import jax.numpy as jnp

    from jaxpfl.experiments.central.adamw import Training
    from jaxpfl.models.base import count_parameters
    from jaxpfl.models.decoder.config import DecoderConfig
    from jaxpfl.models.decoder.network import Decoder

    jax.config.update("jax_default_matmul_precision", config.products)
    model = Decoder(DecoderConfig("gpt2", 50_257, 768, config.layers, 12))
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    shape = (config.steps, config.batch, config.length)
    tokens = rng.integers(model.vocab_size, size=shape).astype(np.int32)
    settings = Training(batch_size=config.batch, schedule="constant")
    first = model.loss(params, {"tokens": tokens[0]}, jnp.ones(config.batch, bool))[0]

    turns = {
        f"jaxpfl, {devices} device{'s' * (devices > 1)}": ours(
            model, params, tokens, settings, devices
        )
        for devices in config.devices
    }
    losses = {name: turn() for name, turn in turns.items()}
    expected = next(iter(losses.values()))
    for name, loss in losses.items():
        check(name, loss, expected, 1e-4)
    runs: dict[str, Callable[[], object]] = {**turns}
    against = None
    if config.torch:
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        given = ("learning_rate", "weight_decay", "clip_norm")
        arrays |= {name: getattr(settings, name) for name in given}
        given = {"heads": model.config.heads, "tokens": tokens, "products": config.products}
        against = Peer(config.torch, CHILD, {**arrays, **given})
        # TF32 keeps 10 bits of a product's factors.
        rough = 1.0 if config.products == "float32" else 100.0
        check("PyTorch's first loss", against.hello["loss"], float(first), 1e-5 * rough)
        check("PyTorch's last loss", against.turn(), expected, 1e-4 * rough)
        runs["transformers + PyTorch"] = against.turn

    seconds = harness.interleaved(runs, config.repeats)
    work = gigaflops(model, params, config.batch, config.length)
    rows = []
    for name, taken in seconds.items():
        step = taken / config.steps
        row = {
            "what": name,
            "parameters": count_parameters(params),
            "products": config.products,
            "batch": f"{config.batch} x {config.length}",
            "seconds a step": step,
            "tokens/s": config.batch * config.length / step,
            "GFLOP/s": work / step,
        }
        if against:
            row |= {
                "vs PyTorch": seconds["transformers + PyTorch"] / taken,
                "torch": against.hello["version"],
            }
        rows.append(row)
    if against:
        against.close()
    harness.table(rows, list(dict.fromkeys(column for row in rows for column in row)))
    print(f"recorded in {harness.record('finetune', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
