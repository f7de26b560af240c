"""What a round of synthetic text costs a client, at the size of POPri's Table 2.

    python -m benchmarks.macro.popri_cost

A client scores 18,000 candidates in 384 dimensions (PE: votes for 1,800), by POPri in two forms:
ours, whose d coordinates stand for all scores, and the published one, which gets the candidates and
sends a score of each. `client s` is one client's step on one device, scores or votes and clipping,
without the time that the floats are under way; the best of the repeats, without compiling. Texts
and candidates are random. In DP-FedAvg a client receives and sends DistilGPT2's parameters, here
counted and not trained. Rows "paper" are of Hou et al. 2025, Table 2 (bioRxiv, 1,000 clients a
round, Llama 3 8B on GPUs), to be compared in floats; its seconds are of other models and hardware.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import harness
from benchmarks.shapes import distilgpt2
from jaxpfl.federated.clients.client import ClientFn, Examples, contribution
from jaxpfl.federated.clients.scores import (
    LinearScores,
    NearestVotes,
    mean_embeddings,
    score_space,
    unit_rows,
)
from jaxpfl.models import count_parameters
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy.clipping import clip_factors

COLUMNS = ["what", "floats down", "floats up", "client s", "server s"]
PAPER = (
    ("paper: DP-FedAvg", 82_000_000, 82_000_000, 4.8, ""),
    ("paper: PE", 700_000, 1_800, 0.0027, 326.25),
    ("paper: POPri", 7_000_000, 18_000, 0.01, 13_547.84),
)


@dataclasses.dataclass(frozen=True)
class Config:
    texts: int = 8  # of a client
    calls: int = 20  # of a client's step, in each repeat
    repeats: int = 5


def main(config: Config) -> list[dict[str, Any]]:
    steps = at_papers_size(config.texts)
    programs = {what: step.times(config.calls) for what, step in steps.items()}
    seconds = harness.interleaved(programs, config.repeats)
    rows = [
        {
            "what": what,
            "dimension": 384,
            "texts of a client": config.texts,
            "floats down": step.down,
            "floats up": step.up,
            "client s": seconds[what] / config.calls,
        }
        for what, step in steps.items()
    ]
    model = {"what": "DP-FedAvg of DistilGPT2", "floats down": (n := parameters()), "floats up": n}
    cited = [dict(zip(COLUMNS, row, strict=True)) for row in PAPER]
    harness.table([*rows, model, *cited], COLUMNS)
    print(f"recorded in {harness.record('popri_cost', rows)}")
    return rows


def parameters() -> int:
    """DistilGPT2's, each a float down and one up in DP-FedAvg."""
    return count_parameters(jax.eval_shape(Decoder(distilgpt2()).init, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class ClientStep:
    """What one client does in a round, clipped as the door clips it.

    Attributes:
      down, up: floats that it receives and sends.
    """

    function: ClientFn
    broadcast: Any
    examples: Examples
    clip_norm: float
    down: int

    @property
    def up(self) -> int:
        like = jax.eval_shape(
            partial(contribution, self.function), self.broadcast, self.examples, jax.random.key(0)
        )
        return sum(leaf.size for leaf in jax.tree.leaves(like))

    def times(self, calls: int) -> Callable[[], None]:
        """A function that does it so often, one after the other, on the default device."""
        bound = jnp.float32(self.clip_norm)

        @jax.jit
        def step(broadcast: Any, examples: Examples, key: jax.Array) -> Any:
            found = contribution(self.function, broadcast, examples, key)
            factors, _, counts = clip_factors(found, bound)
            return jax.tree.map(lambda x, by: jnp.where(counts, x * by, 0.0), found, factors)

        held = jax.device_put((self.broadcast, self.examples), jax.devices()[0])
        key = jax.random.key(0)

        def several() -> None:
            for _ in range(calls):
                jax.block_until_ready(step(*held, key))

        return several


def examples_of(column: str, rows_NxW: np.ndarray) -> Examples:
    """One client's examples as the cohort packs them, in one batch."""
    mask = jnp.ones((1, len(rows_NxW)), bool)
    return Examples({column: jnp.asarray(rows_NxW)[None]}, mask, jnp.int32(1))


def at_papers_size(texts: int) -> dict[str, ClientStep]:
    """Steps of a client with 1,800 prompts of 10 responses, and with 1,800 texts to vote for."""
    rng = np.random.default_rng(0)
    candidates_KxJxD = rng.standard_normal((1_800, 10, 384), np.float32)
    rows_NxD = rng.standard_normal((texts, 384), np.float32)
    unit_KxJxD = unit_rows(jnp.asarray(candidates_KxJxD))
    unit_MxD = unit_KxJxD.reshape(-1, 384)
    published = examples_of("embedding", rows_NxD)
    return {
        "PE, paper's size": votes(rows_NxD, unit_KxJxD[:, 0]),
        "POPri, paper's size": coordinates(rows_NxD, candidates_KxJxD),
        "POPri as published": ClientStep(all_scores, unit_MxD, published, 1.0, unit_MxD.size),
    }


def all_scores(unit_MxD: jax.Array, examples: Examples, key: jax.Array) -> jax.Array:
    """POPri's Algorithm 1 on the client: the mean cosine of each candidate with its texts, [M]."""
    del key
    rows_NxD = unit_rows(examples.batches["embedding"][0])
    return jnp.mean(jnp.matmul(rows_NxD, unit_MxD.T, precision="highest"), axis=0)


def coordinates(rows_NxD: np.ndarray, candidates_KxJxD: np.ndarray) -> ClientStep:
    """Ours: half of a square down, a client's coordinates up."""
    factor_DxD = score_space(jnp.asarray(candidates_KxJxD), "prompt").factor_DxD
    dimension = len(factor_DxD)
    mean_1xD = mean_embeddings(rows_NxD, np.array([0, len(rows_NxD)]))
    examples = examples_of("mean_embedding", mean_1xD)
    return ClientStep(
        LinearScores(1.0), factor_DxD, examples, 1.0, dimension * (dimension + 1) // 2
    )


def votes(rows_NxD: np.ndarray, unit_MxD: jax.Array) -> ClientStep:
    """Private evolution's: all candidates down, as many votes up."""
    examples = examples_of("embedding", rows_NxD)
    return ClientStep(NearestVotes(), unit_MxD, examples, float(len(rows_NxD)), unit_MxD.size)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
