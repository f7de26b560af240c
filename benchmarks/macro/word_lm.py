"""A DP-FedAvg round of the word model, in clients per second, against plain JAX and PyTorch.

    python -m benchmarks.macro.word_lm
    python -m benchmarks.macro.word_lm --torch PYTHON
    python -m benchmarks.macro.word_lm --stack-overflow --clients 5000 --chunks 32 64

The word model of Augenstein et al. 2020 (10,000 tokens, embedding 96, hidden 670, projection 96,
tied: 1.4 M parameters), sequences of 20, batches of 16, 4 batches a client, 20 clients a round.
Ours is everything a run does in a round, through its releaser: the charge on the disk, the draw of
everyone, packing on the prefetch thread, local training, clipping, summing, noise, server step. The
handwritten rounds write the model's equations down in plain JAX and scan over clients whose data
already lies on the device, on one device and dealt over all. PYTHON is the interpreter (or its
environment's folder) of an installation of PyTorch: a loop over the clients in a process of its
own, the programs taking turns.

With `--stack-overflow`, clients have as many sentences as its users (a log-normal number, 397 on
average, of which at most 256 are used), and ours runs alone.

All three start from the same parameters; the benchmark ends if their first losses, or the norms of
their sums of clipped changes, differ. GFLOP/s count the matrix products alone.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.macro.stackoverflow import sizes_of_users
from benchmarks.peer import Peer, check

CHILD = pathlib.Path(__file__).with_name("word_lm_against.py")
LENGTH, BATCH, STEPS, MOST_STEPS = 20, 16, 4, 16
CLIP_NORM, NOISE, LEARNING_RATE = 0.2, 1.0, 0.5


@dataclasses.dataclass(frozen=True)
class Config:
    clients: int = 20  # a round
    chunks: tuple[int, ...] = (0,)  # clients vmapped together on a device; 0 = the default
    devices: int | None = None  # virtual CPU devices; default one a core
    torch: pathlib.Path | None = None
    handwritten: bool = True
    stack_overflow: bool = False
    repeats: int = 10


def plain_loss(params: Any, tokens_BxL: Any) -> Any:
    """The model's equations as one writes them down; padding does not occur here."""
    import jax
    import jax.numpy as jnp

    inputs, layer = tokens_BxL[:, :-1].T, params["layer_0"]
    x_TxBxE = params["embedding"][inputs]
    width = x_TxBxE.shape[-1]
    gates_TxBx3H = x_TxBxE @ layer["kernel"][:width] + layer["bias"]

    def step(carry, gates_Bx3H):
        m_BxP, c_BxH = carry
        j, f, o = jnp.split(gates_Bx3H + m_BxP @ layer["kernel"][width:], 3, axis=-1)
        forget = jax.nn.sigmoid(f + 1.0)
        c_BxH = forget * c_BxH + (1.0 - forget) * jnp.tanh(j)
        m_BxP = (jax.nn.sigmoid(o) * jnp.tanh(c_BxH)) @ layer["projection"]
        return (m_BxP, c_BxH), m_BxP

    hidden, projection = layer["projection"].shape
    zeros = jnp.zeros((inputs.shape[1], projection)), jnp.zeros((inputs.shape[1], hidden))
    _, m_TxBxP = jax.lax.scan(step, zeros, gates_TxBx3H)
    logits = m_TxBxP @ params["embedding"].T + params["output_bias"]
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens_BxL[:, 1:].T[..., None], -1))


def ours(
    params: Any, data: Any, mesh: Any, chunk: int, *, noisy: bool, steps: int
) -> Callable[[], Any]:
    """Returns a function that runs one round of the library: its state and the step's metrics.

    Args:
      data: the clients, all of whom take part.
      steps: at most so many batches of a client are used.
    """
    import jaxpfl as jp
    from benchmarks.rounds import rounds, sgd
    from jaxpfl.federated import Execution

    clients = len(data)
    plan = jp.Plan(
        rounds=100_000,
        clip=jp.Clip(CLIP_NORM),
        noise=jp.Noise(NOISE) if noisy else None,
        participation=jp.Poisson(clients, clients),
        delta=1e-7 if noisy else 0.0,
    )
    algorithm = jp.algorithms.fed_avg(
        jp.models.CIFGLanguageModel(),
        client=sgd(LEARNING_RATE),
        server=sgd(1.0),
        plan=plan,
        cohort=jp.CohortSpec(BATCH, steps * BATCH, clients_per_bucket=max(64, chunk * mesh.size)),
        execution=Execution(mesh, chunk or None),
        start=params,
    )
    return functools.partial(next, rounds(algorithm, data))


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    rows = _stack_overflow(config) if config.stack_overflow else _measured(config)
    harness.table(rows, list(dict.fromkeys(column for row in rows for column in row)))
    print(f"recorded in {harness.record('word_lm', rows)}")
    return rows


def drawn_tokens(rng: np.random.Generator, vocab_size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens int32 as frequent as words are: Zipf's law."""
    chances = 1.0 / np.arange(1, vocab_size)
    return 1 + rng.choice(vocab_size - 1, shape, p=chances / chances.sum()).astype(np.int32)


def _stack_overflow(config: Config) -> list[dict]:
    """Rounds of clients who have as many sentences as the users of Stack Overflow."""
    import jax

    from jaxpfl.data import Population
    from jaxpfl.federated import client_mesh
    from jaxpfl.models import CIFGLanguageModel

    model, rng = CIFGLanguageModel(), np.random.default_rng(0)
    # 136 million sentences of 342,477 users. What is above the cap would never be read.
    sizes_C = sizes_of_users(rng, config.clients, 397 * config.clients)
    offsets = np.concatenate([[0], np.cumsum(np.minimum(sizes_C, MOST_STEPS * BATCH))])
    tokens_NxL = drawn_tokens(rng, model.vocab_size, (int(offsets[-1]), LENGTH + 1))
    names = [str(client) for client in range(config.clients)]
    data = Population({"tokens": tokens_NxL}, offsets, names)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    runs = {
        f"jaxpfl, chunk {chunk or 'default'}": ours(
            params, data, client_mesh(), chunk, noisy=True, steps=MOST_STEPS
        )
        for chunk in config.chunks
    }
    seconds = harness.interleaved(runs, config.repeats)
    return [
        {
            "what": f"{name}, sizes of Stack Overflow",
            "cohort": config.clients,
            "sentences": len(tokens_NxL),
            "seconds": taken,
            "clients/s": config.clients / taken,
            "sentences/s": len(tokens_NxL) / taken,
        }
        for name, taken in seconds.items()
    ]


def _measured(config: Config) -> list[dict]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.micro.model_step import gigaflops
    from benchmarks.rounds import by_hand
    from jaxpfl.data import from_clients
    from jaxpfl.federated import client_mesh
    from jaxpfl.models import CIFGLanguageModel

    model, rng = CIFGLanguageModel(), np.random.default_rng(0)
    tokens = drawn_tokens(rng, model.vocab_size, (config.clients, STEPS, BATCH, LENGTH + 1))
    data = from_clients(
        {
            f"client {i}": {"tokens": rows.reshape(STEPS * BATCH, LENGTH + 1)}
            for i, rows in enumerate(tokens)
        }
    )
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))

    first = model.loss(params, {"tokens": tokens[0, 0]}, jnp.ones(BATCH, bool))[0]
    everything = client_mesh()
    meshes = [everything] if everything.size == 1 else [client_mesh(1), everything]
    quiet = ours(params, data, everything, 0, noisy=False, steps=STEPS)()[1]
    norm = float(quiet["update_norm"]) * config.clients

    rates: dict[str, Any] = {"learning_rate": LEARNING_RATE, "clip_norm": CLIP_NORM, "noise": NOISE}
    runs: dict[str, Callable[[], Any]] = {
        f"jaxpfl, chunk {chunk or 'default'}": ours(
            params, data, everything, chunk, noisy=True, steps=STEPS
        )
        for chunk in config.chunks
    }
    if config.handwritten:
        check("plain JAX's loss", float(plain_loss(params, tokens[0, 0])), float(first), 1e-5)
        for mesh in meshes:
            dealt = NamedSharding(mesh, PartitionSpec("clients"))
            everywhere = NamedSharding(mesh, PartitionSpec())
            run = functools.partial(
                by_hand(plain_loss, mesh, **rates),
                jax.device_put(params, everywhere),
                jax.device_put((tokens,), dealt),
                jax.random.key(1),
            )
            check("plain JAX's norm", float(run()[1]), norm, 1e-2)
            runs[f"handwritten scan, {mesh.size} devices"] = run
    against = None
    if config.torch:
        top = {name: params[name] for name in ("embedding", "output_bias")}
        arrays = {**top, **params["layer_0"], "tokens": tokens, **rates}
        against = Peer(config.torch, CHILD, arrays)
        check("PyTorch's loss", against.hello["loss"], float(first), 1e-5)
        check("PyTorch's norm", against.turn(), norm, 1e-2)
        runs["PyTorch loop"] = against.turn

    seconds = harness.interleaved(runs, config.repeats)
    rows = []
    for name, taken in seconds.items():
        work = config.clients * STEPS * gigaflops(model, BATCH)
        row = {
            "what": name,
            "cohort": config.clients,
            "seconds": taken,
            "clients/s": config.clients / taken,
            "GFLOP/s": work / taken,
        }
        by_hand = [taken for other, taken in seconds.items() if other.startswith("hand")]
        if by_hand:
            row["vs handwritten"] = min(by_hand) / taken
        if against:
            row |= {
                "vs PyTorch": seconds["PyTorch loop"] / taken,
                "torch": against.hello["version"],
            }
        rows.append(row)
    if against:
        against.close()
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
