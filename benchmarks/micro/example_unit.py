"""DP-SGD: time of a step over 100 examples of the EMNIST CNN, by how their gradients are clipped.

    python -m benchmarks.micro.example_unit
    python -m benchmarks.micro.example_unit --examples 1000
    python -m benchmarks.micro.example_unit --words
    python -m benchmarks.micro.example_unit --words --opacus .venv-peer-opacus

`release` is a whole round of `fed_sgd` (charge, draw, pack, clip, sum, noise, step), its examples
dealt to one device a core. The others are compiled functions on one device: `clipped` the client
function's sum, `formed` the same by `vmap(grad)`, and `batch` the gradient of the batch's loss,
without any clipping, which is what a step costs without privacy. The table gives milliseconds, the
best of the repeats.

With `--words` the examples are 32 sentences of the tied CIFG word model (hidden 670, embedding 96),
by vocabulary and length. Rows have medians of wall and processor time, and the temporary memory
that XLA plans for the function. With the environment of Opacus, the model is untied, and clipped
sums of Opacus's LSTM, of as many parameters, take turns with ours (`example_unit_against`); their
memory is what the process grows by in them.
"""

import dataclasses
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.peer import Peer

CHILD = Path(__file__).with_name("example_unit_against.py")


@dataclasses.dataclass(frozen=True)
class Config:
    examples: int = 100
    repeats: int = 15
    devices: int | None = None  # virtual CPU devices; default one a core
    words: bool = False
    opacus: Path | None = None


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    rows = words(config) if config.words else images(config)
    print(f"recorded in {harness.record('example_unit', rows)}")
    return rows


def compiled(model: Any, params: Any, batch: Any) -> dict[str, Any]:
    """The functions of `(params, batch, mask)`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxpfl.federated.clients.clipped_gradients import clipped_sum

    def loss(params: Any, example: Any) -> jax.Array:
        alone = {name: value[None] for name, value in example.items()}
        return model.loss(params, alone, jnp.ones((1,), bool))[0]

    def formed(params: Any, batch: Any, mask_B: jax.Array) -> Any:
        gradients = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        factor_B = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(gradients)) * mask_B
        return jax.tree.map(lambda leaf: jnp.tensordot(factor_B, leaf, 1), gradients)

    functions = {
        "clipped": lambda params, batch, mask_B: clipped_sum(loss, params, batch, mask_B, 1.0),
        "formed": formed,
        "batch": jax.grad(lambda *given: model.loss(*given)[0]),
    }
    mask_B = np.ones(len(next(iter(batch.values()))), bool)
    return {
        name: jax.jit(function).lower(params, batch, mask_B).compile()
        for name, function in functions.items()
    }


def words(config: Config) -> list[dict]:
    import jax
    import numpy as np

    import jaxpfl as jp

    rng, rows, number = np.random.default_rng(0), [], 32
    sizes = [(vocabulary, tokens) for vocabulary in (1_000, 10_000) for tokens in (10, 20, 40)]
    for vocabulary, tokens in sizes if config.opacus is None else [(10_000, 20)]:
        model = jp.models.CIFGLanguageModel(vocabulary, tied=config.opacus is None)
        params = model.init(jax.random.key(0))
        batch = {"tokens": rng.integers(4, vocabulary, (number, tokens + 1), np.int32)}
        functions = compiled(model, params, batch)
        given = jax.device_put((params, batch, np.ones(number, bool)))
        runs: dict[str, Any] = {name: partial(f, *given) for name, f in functions.items()}
        peers: dict[str, Peer] = {}
        if config.opacus is not None:
            arrays = {"tokens": batch["tokens"], "vocabulary": vocabulary}
            for mode in ("hooks", "ghost"):
                peers[f"Opacus, {mode}"] = Peer(config.opacus, CHILD, {**arrays, "mode": mode})
        runs |= {name: partial(_elsewhere, peer) for name, peer in peers.items()}
        taken = harness.turns(runs, config.repeats)
        memory = {n: f.memory_analysis().temp_size_in_bytes / 1e6 for n, f in functions.items()}
        for name, peer in peers.items():
            memory[name] = peer.peak_memory_mb() - peer.hello["resident MB"]
        for name, turns in taken.items():
            row = {"what": name, "vocabulary": vocabulary, "tokens": tokens, "tied": model.tied}
            row |= {"ms": 1e3 * median(turn.seconds for turn in turns)}
            row |= {"CPU ms": 1e3 * median(turn.cpu_seconds for turn in turns)}
            row |= {"examples": number, "temporary MB": memory[name]}
            rows.append(row | ({"versions": peers[name].hello} if name in peers else {}))
        for peer in peers.values():
            peer.close()
    harness.table(rows, ["what", "vocabulary", "tokens", "ms", "CPU ms", "temporary MB"])
    return rows


def _elsewhere(peer: Peer) -> harness.Elsewhere:
    return harness.Elsewhere(peer.turn())


def images(config: Config) -> list[dict]:
    import jax
    import numpy as np
    import optax

    import jaxpfl as jp
    from benchmarks.rounds import rounds

    model, number = jp.models.emnist_cnn(), config.examples
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.random((number, 28, 28, 1), np.float32),
        "label": rng.integers(0, 62, number, np.int32),
    }
    given = jax.device_put((params, batch, np.ones(number, bool)))
    runs = {name: partial(f, *given) for name, f in compiled(model, params, batch).items()}

    clients = jp.data.from_clients({"all": batch})
    algorithm = jp.algorithms.fed_sgd(
        model,
        server=optax.sgd(0.1),
        plan=jp.Plan(
            rounds=100_000,
            clip=jp.Clip(1.0),
            noise=jp.Noise(1.0),
            participation=jp.Poisson(number, number),
            delta=1e-7,
            unit="example",
        ),
    )
    release = partial(next, rounds(algorithm, clients))
    best = harness.interleaved({"release": release, **runs}, config.repeats)
    rows = [
        {"what": name, "examples": number, "ms": 1e3 * seconds} for name, seconds in best.items()
    ]
    harness.table(rows, ["what", "examples", "ms"])
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
