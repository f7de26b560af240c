"""The server's side of a POPri round at the paper's size: generation, then DPO of the adapters.

    python -m benchmarks.gpu.llama                       # Llama 3 8B, random bfloat16 weights
    python -m benchmarks.gpu.llama --prompts 90          # a twentieth of the round
    python -m benchmarks.gpu.llama --shape tiny --prompts 6 --responses 3 --new-tokens 16

The paper's round (Hou et al. 2025, section 5 and Table 2): 1,800 prompts of up to 256 tokens with
10 responses of 64 tokens each, then 2 epochs of DPO with LoRA on 1,800 pairs, in batches of 24; it
took 13,548 GPU-seconds. Time does not depend on what the weights are, so random ones do; no
response ends early, and all prompts are of full length.

Printed and recorded are, for each phase, seconds, tokens a second, the share of the device's peak
that the model's own products reach (model FLOP utilisation: nothing that is computed twice counts
twice), and the peak of memory. Compilation stays out: every program runs once before. With fewer
prompts than 1,800, `round_s` is the time of a whole round at the measured rates, and says so.

The tiny shape runs the same script anywhere, to see that it runs; its rows measure nothing.
"""

import dataclasses
import time

import numpy as np
import tyro

from benchmarks import harness

PAPER_GPU_SECONDS = 13_547.84
PAPER_PROMPTS = 1_800

# Dense bfloat16 products a second, from the vendors' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2_250e12, "L4": 121e12}


@dataclasses.dataclass(frozen=True)
class Config:
    shape: str = "llama3_8b"  # or "tiny"
    prompts: int = PAPER_PROMPTS
    responses: int = 10
    prompt_tokens: int = 256
    new_tokens: int = 64
    epochs: int = 2
    batch_size: int = 24  # pairs a step
    part: int = 12  # pairs on the device at a time
    slots: int | None = None  # sequences generated at a time; default: the sampler's choice
    rank: int = 4
    int8: bool = False
    warm_prompts: int | None = None  # of the run that compiles; default: all prompts


def model_of(config: Config):
    """The model and its random parameters on the device, adapters included."""
    import jax
    import jax.numpy as jnp

    from benchmarks.shapes import llama3_8b
    from jaxpfl.models.decoder import lora
    from jaxpfl.models.decoder.config import DecoderConfig, LoRA
    from jaxpfl.models.decoder.network import Decoder
    from jaxpfl.models.decoder.quantise import quantise

    if config.shape == "llama3_8b":
        sizes = llama3_8b()
    else:
        sizes = DecoderConfig(
            "llama", vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=2, positions=512
        )
    model = Decoder(sizes, compute="bfloat16", remat=True)
    params = jax.jit(lambda key: model.init(key, jnp.bfloat16))(jax.random.key(0))
    if config.int8:
        model, params = quantise(model, params)
    return lora.attach(model, params, LoRA(rank=config.rank, alpha=8.0), jax.random.key(1))


def products_per_token(model, context: float) -> float:
    """Floating point operations of one token in a forward pass that sees `context` others."""
    c = model.config
    queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
    gates = 2 if c.model_type == "llama" else 1
    layer = c.hidden_size * (2 * queries + 2 * keys) + c.hidden_size * c.inner_size * (gates + 1)
    return 2.0 * c.layers * layer + 4.0 * c.layers * queries * context


def head_per_token(model) -> float:
    return 2.0 * model.config.hidden_size * model.vocab_size


def peak_flops() -> float | None:
    import jax

    kind = jax.devices()[0].device_kind
    return next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)


def peak_memory_gb() -> float:
    import jax

    statistics = jax.devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return harness.peak_memory_mb() / 1024 if peak is None else peak / 2**30


def timed(function) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def row_of(phase: str, config: Config, seconds: float, tokens: int, flops: float) -> dict:
    peak = peak_flops()
    return {
        "what": phase,
        **dataclasses.asdict(config),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tflop_per_s": flops / seconds / 1e12,
        "mfu": None if peak is None else flops / seconds / peak,
        "peak_memory_gb": peak_memory_gb(),
    }


def generation(config: Config, model, params) -> dict:
    """All responses to all prompts, on random prompts of full length."""
    import jax

    from jaxpfl.text.generation.decoding import Decoding
    from jaxpfl.text.generation.sampling import sample

    prompts = np.random.default_rng(0).integers(
        0, model.vocab_size, (config.prompts, config.prompt_tokens), np.int32
    )
    decoding = Decoding(max_new_tokens=config.new_tokens)
    warm = prompts[: config.warm_prompts or config.prompts]

    def run(prompts, seed):
        return sample(
            model,
            params,
            prompts,
            jax.random.key(seed),
            responses=config.responses,
            decoding=decoding,
            slots=config.slots,
            progress=True,
        )

    run(warm, 1)
    drawn = []
    seconds = timed(lambda: drawn.append(run(prompts, 2)))
    tokens = int(np.sum(drawn[0] >= 0))
    read = (
        config.prompts * config.prompt_tokens * products_per_token(model, config.prompt_tokens / 2)
    )
    written = tokens * (
        products_per_token(model, config.prompt_tokens + config.new_tokens / 2)
        + head_per_token(model)
    )
    return row_of("generation", config, seconds, tokens, read + written)


def tuning(config: Config, model, params) -> dict:
    """The reference's log-probabilities, and the epochs of DPO."""
    from jaxpfl.text.preference.groups import Groups
    from jaxpfl.text.preference.optimisation import PreferenceSettings, tune

    generator = np.random.default_rng(1)

    def drawn(*shape: int) -> np.ndarray:
        return generator.integers(0, model.vocab_size, (config.prompts, *shape), np.int32)

    pairs = Groups(drawn(config.prompt_tokens), drawn(2, config.new_tokens))
    settings = PreferenceSettings(
        epochs=config.epochs, batch_size=config.batch_size, microbatch_size=config.part
    )

    def run(pairs):
        return tune(model, params, pairs, settings, seed=0, progress=True).params["layers"]["q"][
            "b"
        ]

    run(pairs[np.arange(min(config.batch_size, config.prompts))])
    seconds = timed(lambda: run(pairs))
    row_tokens = config.prompt_tokens + 2 * config.new_tokens
    body = row_tokens * products_per_token(model, row_tokens / 2)
    head = 2 * config.new_tokens * head_per_token(model)
    # Reference: forward. Tuning: forward, and backward to the activations alone, as the base's
    # weights have no gradient; the adapters' own products are a thousandth of it.
    flops = config.prompts * (body + head) * (1 + 2 * config.epochs)
    tokens = config.prompts * row_tokens * config.epochs
    return row_of("dpo", config, seconds, tokens, flops)


def main(config: Config) -> None:
    import jax

    if config.shape not in ("llama3_8b", "tiny"):
        raise SystemExit(f"--shape must be llama3_8b or tiny, found {config.shape!r}")
    model, params = model_of(config)
    jax.block_until_ready(params)
    rows = [generation(config, model, params), tuning(config, model, params)]
    shown = ["what", "seconds", "tokens_per_s", "tflop_per_s", "mfu", "peak_memory_gb"]
    total = sum(row["seconds"] for row in rows)
    whole = config.prompts == PAPER_PROMPTS
    rows.append(
        {
            "what": "round" if whole else "round, scaled up from fewer prompts",
            **dataclasses.asdict(config),
            "seconds": total,
            "round_s": total * PAPER_PROMPTS / config.prompts,
            "of_the_papers": total * PAPER_PROMPTS / config.prompts / PAPER_GPU_SECONDS,
        }
    )
    harness.table(rows, [*shown, "round_s"])
    harness.record("llama", rows)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
