"""Responses of a decoder in tokens per second, against simpler loops over the same tokens.

    python -m benchmarks.macro.generate
    python -m benchmarks.macro.generate --weights FOLDER
    python -m benchmarks.macro.generate --shape distilgpt2 --no-baselines --torch PYTHON

The model is stories260K (5 layers of 64 features, 512 tokens; FOLDER is what `tools/llama2c.py`
makes), or random weights of its shape; `--shape distilgpt2` takes those of that one. All draw the
same tokens from the same keys at temperature 1, and the benchmark ends if they do not:

  ours              `jaxpfl.text.sample`, on one device and dealt to all
  no cache          a batch of as many requests as ours has slots; every token reads the whole
                    rows again, padded to the next multiple of 32, in one compiled program; a batch
                    ends with its last response
  one at a time     with the cache, a compiled step for each token of each request

PYTHON is the interpreter (or its environment's folder) of an installation of PyTorch and
transformers: its `generate`, with the same parameters and settings and the requests in one batch,
in a process of its own, the programs taking turns. It draws from other keys, so that the benchmark
ends if its loss of the prompts differs; no response ends early then.

The slower loops do a part of the requests. Tokens that come after a response's end count nowhere.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType

from benchmarks import harness
from benchmarks.peer import Peer, check
from benchmarks.shapes import distilgpt2
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.decoding import Decoding, draw, probabilities
from jaxpfl.text.generation.sampling import sample
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

CHILD = pathlib.Path(__file__).with_name("generate_against.py")
PROMPT_TOKENS = 16
START = 1
PEER = "transformers + PyTorch"
SHOWN = ["what", "requests", "tokens", "seconds", "tokens/s"]


class Ids(UTF8Bytes):
    """A vocabulary of `vocab_size` ids, of which START ends a text."""

    name = "ids"
    ends = (START,)  # pyright: ignore[reportAssignmentType]

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def token_bytes(self) -> tuple[bytes, ...]:
        return (b"",) * self.vocab_size


@dataclasses.dataclass(frozen=True)
class Config:
    weights: pathlib.Path | None = None
    shape: Literal["stories260k", "distilgpt2"] = "stories260k"
    prompts: int = 32
    responses: int = 8
    new_tokens: int = 128
    slots: tuple[int, ...] = (0,)  # sequences at a time on a device; 0 = the default
    baselines: bool = True
    torch: pathlib.Path | None = None
    products: Literal["float32", "tensorfloat32"] = "float32"  # of a GPU, on both sides
    devices: int | None = None  # virtual CPU devices; default one a core
    repeats: int = 2
    record: bool = True


def model_of(config: Config) -> tuple[Any, Any, str]:
    """The model, its parameters and what to call it."""
    if config.shape == "distilgpt2":
        model = Decoder(distilgpt2())
    elif config.weights is not None:
        return *pretrained.load(config.weights), "stories260K"
    else:
        stories260k = DecoderConfig(
            "llama",
            512,
            64,
            layers=5,
            heads=8,
            kv_heads=4,
            inner_size=172,
            positions=512,
            tied=True,
        )
        model = Decoder(stories260k)
    return model, jax.jit(model.init)(jax.random.key(0)), f"{config.shape}, random"


class NoCache:
    """Every token reads its whole row again."""

    def __init__(self, model: Any, params: Any, ends: tuple[int, ...], new_tokens: int):
        self.params, self.ends, self.new_tokens = params, ends, new_tokens
        self.step = functools.partial(_whole_step, model)

    def __call__(self, prompts_BxL: np.ndarray, keys_B: Any) -> np.ndarray:
        held = prompts_BxL.shape[1]
        ended_B = np.zeros(len(prompts_BxL), bool)
        drawn_BxT = np.full((len(prompts_BxL), self.new_tokens), -1, np.int32)
        rows_BxL = np.concatenate([prompts_BxL, drawn_BxT], axis=1)
        for t in range(self.new_tokens):
            width = min(-(-(held + t) // 32) * 32, rows_BxL.shape[1])
            token_B = self.step(self.params, rows_BxL[:, :width].copy(), held + t, keys_B, t)
            rows_BxL[:, held + t] = np.asarray(token_B)
            drawn_BxT[~ended_B, t] = rows_BxL[~ended_B, held + t]
            ended_B |= np.isin(drawn_BxT[:, t], self.ends)
            if ended_B.all():
                break
        return drawn_BxT


@functools.partial(jax.jit, static_argnums=0)
def _whole_step(model: Any, params: Any, rows_BxL: Any, held: Any, keys_B: Any, t: Any) -> Any:
    hidden_BxH = jnp.take(model.hidden(params, rows_BxL), held - 1, axis=1)
    return _drawn(model.logits(params, hidden_BxH), keys_B, t)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _cached_step(model: Any, params: Any, token_B: Any, cache: Any, keys_B: Any, t: Any) -> Any:
    logits_BxV, cache = model.step(params, token_B, cache)
    return _drawn(logits_BxV, keys_B, t), cache


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(model: Any, new_tokens: int, params: Any, rows_BxL: Any) -> Any:
    return model.prefill(params, rows_BxL, new_tokens)


def _drawn(logits_BxV: Any, keys_B: Any, t: Any) -> Any:
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, t)
    return draw(keys_B, probabilities(logits_BxV, jnp.float32(1)))


class OneAtATime:
    """With the cache, but a request after the other."""

    def __init__(self, model: Any, params: Any, ends: tuple[int, ...], new_tokens: int):
        self.params, self.ends, self.new_tokens = params, ends, new_tokens
        self.step = functools.partial(_cached_step, model)
        self.prefill = functools.partial(_prefill, model, new_tokens)

    def __call__(self, prompts_BxL: np.ndarray, keys_B: Any) -> np.ndarray:
        drawn_BxT = np.full((len(prompts_BxL), self.new_tokens), -1, np.int32)
        for b, prompt_L in enumerate(prompts_BxL):
            cache = self.prefill(self.params, prompt_L[None, :-1])
            token, key = prompt_L[-1:], keys_B[b : b + 1]
            for t in range(self.new_tokens):
                token, cache = self.step(self.params, token, cache, key, t)
                drawn_BxT[b, t] = int(token[0])
                if drawn_BxT[b, t] in self.ends:
                    break
        return drawn_BxT


def transformers_peer(
    config: Config, python: pathlib.Path, model: Any, params: Any, prompts_PxL: np.ndarray
) -> Peer:
    """Transformers with the same parameters and prompts; ends if its loss of them differs."""
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    rows = np.repeat(prompts_PxL, config.responses, 0)
    sizes = {"heads": model.config.heads, "new_tokens": config.new_tokens}
    peer = Peer(python, CHILD, {**arrays, **sizes, "products": config.products, "tokens": rows})
    everyone = jnp.ones(len(prompts_PxL), bool)
    expected = float(model.loss(params, {"tokens": prompts_PxL}, everyone)[0])
    rough = 1e-5 if config.products == "float32" else 1e-3
    check("transformers' loss of the prompts", peer.hello["loss"], expected, rough)
    return peer


def main(config: Config) -> None:
    harness.use_cpu_devices(config.devices)
    jax.config.update("jax_default_matmul_precision", config.products)
    if config.torch and config.shape != "distilgpt2":
        raise SystemExit(f"--torch needs --shape distilgpt2, found {config.shape}")

    model, params, name = model_of(config)
    tokeniser = None if config.torch else Ids(model.vocab_size)
    ends = () if tokeniser is None else tokeniser.ends
    generator = np.random.default_rng(0)
    prompts_PxL = generator.integers(3, model.vocab_size, (config.prompts, PROMPT_TOKENS), np.int32)
    prompts_PxL[:, 0] = START
    key = jax.random.key(1)
    decoding = Decoding(max_new_tokens=config.new_tokens)

    def ours(slots: int, mesh: Any) -> np.ndarray:
        drawn = sample(
            model,
            params,
            prompts_PxL,
            key,
            decoding=decoding,
            responses=config.responses,
            tokeniser=tokeniser,
            slots=slots or None,
            mesh=mesh,
        )
        return drawn.reshape(-1, config.new_tokens)

    every = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    contenders: dict[str, tuple[Any, int]] = {}
    requests = config.prompts * config.responses
    for slots in config.slots:
        shown = f", {slots} slots" if slots else ""
        contenders[f"ours, 1 device{shown}"] = functools.partial(ours, slots, None), requests
        if len(jax.devices()) > 1:
            what = f"ours, {len(jax.devices())} devices{shown}"
            contenders[what] = functools.partial(ours, slots, every), requests
    if config.baselines:
        rows_NxL = np.repeat(prompts_PxL, config.responses, 0)
        pairs = np.indices((config.prompts, config.responses)).reshape(2, -1)
        keys_N = jax.vmap(lambda p, j: jax.random.fold_in(jax.random.fold_in(key, p), j))(*pairs)
        for what, loop, count in (
            ("no cache", NoCache(model, params, ends, config.new_tokens), min(64, requests)),
            ("one at a time", OneAtATime(model, params, ends, config.new_tokens), 4),
        ):
            call = functools.partial(loop, rows_NxL[:count], keys_N[:count])
            contenders[what] = call, count

    drawn: dict[str, np.ndarray] = {}

    def timed(what: str) -> Any:
        drawn[what] = contenders[what][0]()

    runs: dict[str, Any] = {what: functools.partial(timed, what) for what in contenders}
    against = None
    if config.torch:
        against = transformers_peer(config, config.torch, model, params, prompts_PxL)
        runs[PEER] = against.turn
    seconds = harness.interleaved(runs, config.repeats)
    reference = next(iter(drawn.values()))
    rows = []
    for what, (_, count) in contenders.items():
        same = float(np.mean((drawn[what] == reference[:count]).all(1)))
        # Two draws may be tied to the last bit of their logits.
        if same < 0.95:
            raise SystemExit(f"{what} drew other tokens: {same:.1%} of the rows agree")
        tokens = int(np.sum(drawn[what] != -1))
        rows.append(
            {
                "what": what,
                "model": name,
                "requests": count,
                "new_tokens": config.new_tokens,
                "tokens": tokens,
                "seconds": seconds[what],
                "tokens/s": tokens / seconds[what],
                "rows alike": same,
            }
        )
    if against:
        tokens = requests * config.new_tokens
        rows.append(
            {
                "what": PEER,
                "model": name,
                "requests": requests,
                "new_tokens": config.new_tokens,
                "tokens": tokens,
                "seconds": seconds[PEER],
                "tokens/s": tokens / seconds[PEER],
                "torch": against.hello["version"],
            }
        )
        for row in rows:
            row |= {"products": config.products, "vs PyTorch": seconds[PEER] / row["seconds"]}
        against.close()
    if config.baselines:
        slow = next(row["tokens/s"] for row in rows if row["what"] == "no cache")
        for row in rows:
            row["vs no cache"] = row["tokens/s"] / slow
    harness.table(rows, [*SHOWN, "vs PyTorch" if against else "vs no cache"])
    if config.record:
        print(f"{time.strftime('%H:%M')} {harness.record('generate', rows)}")


if __name__ == "__main__":
    main(tyro.cli(Config))
