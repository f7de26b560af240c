"""SmolLM2's shape in float32 and bfloat16: how fast it writes, and what a step of DPO takes.

    python -m benchmarks.macro.smollm2

Random weights, stored in the dtype of the products. Writing is a round of POPri with 48 prompts of
90 tokens, 8 responses to each, 32 tokens, top-p 0.95; a step of DPO has 8 pairs of 128 + 32 tokens,
adapters of rank 8, and includes the public model's log-probabilities. The variants take turns;
processor seconds are the least of the repeats.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import harness
from benchmarks.shapes import smollm2
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.sampling import sample
from jaxpfl.text.preference.groups import groups_of
from jaxpfl.text.preference.optimisation import PreferenceSettings, tune

PROMPTS, RESPONSES, NEW, PAIRS, STEPS = 48, 8, 32, 8, 2
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Config:
    repeats: int = 2


def write(model: Decoder, params: Any, prompts_PxL: np.ndarray) -> Any:
    decoding = Decoding(NEW, 0.9, 0.95)
    return sample(
        model, params, prompts_PxL, jax.random.key(1), decoding=decoding, responses=RESPONSES
    )


def step(model: Decoder, params: Any, groups: Any) -> Any:
    settings = PreferenceSettings(
        epochs=1, batch_size=PAIRS, microbatch_size=PAIRS, multiple=32, dtype=model.compute
    )
    return tune(model, params, groups, settings, seed=0).params


def main(config: Config) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)

    def tokens(*shape: int) -> np.ndarray:
        return draw.integers(0, 49_000, shape).astype(np.int32)

    prompts_PxL = tokens(PROMPTS, 90)
    groups = groups_of(list(tokens(PAIRS * STEPS, 128)), [*map(list, tokens(PAIRS * STEPS, 2, 32))])
    runs: dict[str, Callable[[], Any]] = {}
    for dtype in DTYPES:
        model = Decoder(smollm2(), compute=dtype)
        params = jax.jit(partial(model.init, dtype=jnp.dtype(dtype)))(jax.random.key(0))
        runs[f"writing, {dtype}"] = partial(write, model, params, prompts_PxL)
        adapted = lora.attach(model, params, LoRA(rank=8), jax.random.key(1))
        runs[f"DPO, {dtype}"] = partial(step, *adapted, groups)
    rows = []
    for what, turns in harness.turns(runs, config.repeats).items():
        least = min(turns, key=lambda turn: turn.cpu_seconds)
        if what.startswith("writing"):
            done = {"tokens/cpu s": PROMPTS * RESPONSES * NEW / least.cpu_seconds}
        else:
            done = {"cpu s/step": least.cpu_seconds / STEPS}
        rows.append({"what": what, "seconds": least.seconds, **done})
    harness.table(rows, ["what", "seconds", "tokens/cpu s", "cpu s/step"])
    print(f"recorded in {harness.record('smollm2', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
