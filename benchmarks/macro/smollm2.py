"""SmolLM2's shape writes and is tuned by DPO: this library beside transformers and PEFT.

    python -m benchmarks.macro.smollm2
    python -m benchmarks.macro.smollm2 --torch .venv-parity

Random weights, stored in the dtype of the products. Writing is a third of a round of POPri: 16
prompts of 90 tokens, 8 responses to each, 32 tokens, top-p 0.95; a step of DPO has 8 pairs of
128 + 32 tokens, adapters of rank 8, and includes the public model's log-probabilities. Each variant
is a process of its own (`smollm2_jaxpfl`, `smollm2_torch`) and had one turn before; then they take
turns, and the least of the repeats counts, in seconds and in processor seconds. The losses of the
prompts must agree. `--torch` is the interpreter, or its environment's folder, of an installation of
PyTorch, transformers and PEFT, such as that of `make parity`.
"""

import dataclasses
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

HERE = pathlib.Path(__file__).parent
PROMPTS, RESPONSES, NEW, PAIRS, STEPS = 16, 8, 32, 8, 2
DTYPES = ("float32", "bfloat16")
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Config:
    torch: pathlib.Path | None = None
    repeats: int = 2
    batches: tuple[int, ...] = (64, 128)  # sequences that transformers writes at a time
    kinds: tuple[str, ...] = ("writing", "DPO")


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
            rows += measured(config, kind, work | {"kind": kind, "folder": folder})
    harness.table(rows, ["what", "seconds", "cpu s", "tokens/s", "s/step", "peak MB"])
    print(f"recorded in {harness.record('smollm2', rows)}")
    return rows


def measured(config: Config, kind: str, work: dict[str, Any]) -> list[dict[str, Any]]:
    peers: dict[str, Peer] = {}
    try:
        for dtype in DTYPES:
            ours = Peer(
                pathlib.Path(sys.executable), HERE / "smollm2_jaxpfl.py", work | {"dtype": dtype}
            )
            peers[f"{kind}, {dtype}"] = ours
            batches = config.batches if kind == "writing" else (PAIRS,)
            for batch in batches if config.torch is not None else ():
                assert config.torch is not None
                arrays = work | {"dtype": dtype, "batch": batch}
                theirs = Peer(config.torch, HERE / "smollm2_torch.py", arrays)
                check("PyTorch", theirs.hello["loss"], ours.hello["loss"], TOLERANCE[dtype])
                at_a_time = f", {batch} at a time" if kind == "writing" else ""
                peers[f"{kind}, {dtype}, {theirs.hello['version']}{at_a_time}"] = theirs
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
            if kind == "writing":
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
