"""Sentences embedded per second by our MiniLM, and by sentence-transformers where it is at hand.

    python -m benchmarks.micro.embed
    python -m benchmarks.micro.embed --against PYTHON

The sentences are those of docstrings, and of IRC messages where JAXPFL_DATA has them. Times
include tokenising, exclude loading and compiling, and are the best of the repeats. PYTHON is the
interpreter (or its environment's folder) of an installation of sentence-transformers: it embeds
the same sentences in a process of its own, the two taking turns, with the batch size that suits it
best of those given. The table also gives sentences per second of processor time, which tells more
where other programs are running, and the largest difference between the two in any feature.
"""

import dataclasses
import json
import os
import pathlib
import random
import tempfile
import time
from typing import Any

import numpy as np
import tyro

import jaxpfl.data
from benchmarks import harness
from benchmarks.peer import Peer
from jaxpfl.errors import InputError
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.text.embed.encoder import SentenceEncoder

CHILD = pathlib.Path(__file__).with_name("embed_against.py")
IRC = "text_irc_ubuntu/ubuntu_irc.jsonl.gz"


@dataclasses.dataclass(frozen=True)
class Config:
    sources: tuple[str, ...] = ()  # default: docstrings:jax, and IRC messages if at hand
    sentences: int = 2_000  # drawn of every source
    encoder: str = "minilm"
    against: pathlib.Path | None = None
    batch_sizes: tuple[int, ...] = (32, 128)  # of sentence-transformers
    repeats: int = 5


def embedded(against: Peer, path: pathlib.Path, batch_size: int) -> tuple[float, float]:
    """Seconds, and of processor time, for a JSON file of sentences; vectors go beside it."""
    taken = json.loads(against.ask(json.dumps([str(path), batch_size])))
    return taken["seconds"], taken["cpu"]


def sentences(source: str, count: int) -> list[str]:
    texts = jaxpfl.data.open(source).columns["text"].to_pylist()
    random.Random(0).shuffle(texts)
    return texts[:count]


def measure(
    encoder: SentenceEncoder, against: Peer | None, source: str, config: Config
) -> dict[str, Any]:
    texts = sentences(source, config.sentences)
    vectors_NxD = encoder(texts)
    ours: list[tuple[float, float]] = []
    theirs: dict[int, list[tuple[float, float]]] = {size: [] for size in config.batch_sizes}
    row: dict[str, Any] = {"what": source.rsplit("/", 1)[-1], "sentences": len(texts)}
    row["encoder"] = encoder.name
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "sentences.json"
        path.write_text(json.dumps(texts), encoding="utf-8")
        if against:
            for size in config.batch_sizes:
                embedded(against, path, size)
            found_NxD = np.load(path.with_suffix(".npy"), allow_pickle=False)
            row["largest difference"] = float(np.abs(found_NxD - vectors_NxD).max())
        for _ in range(config.repeats):
            start, cpu = time.perf_counter(), time.process_time()
            encoder(texts)
            ours.append((time.perf_counter() - start, time.process_time() - cpu))
            if against:
                for size in config.batch_sizes:
                    theirs[size].append(embedded(against, path, size))
    seconds, cpu = np.min(ours, axis=0)
    row |= {"ours/s": float(len(texts) / seconds), "ours/cpu s": float(len(texts) / cpu)}
    if against:
        best = min(theirs, key=lambda size: min(theirs[size]))
        their_seconds, their_cpu = np.min(theirs[best], axis=0)
        row |= {
            "theirs/s": float(len(texts) / their_seconds),
            "theirs/cpu s": float(len(texts) / their_cpu),
            "their batch": best,
            "their version": against.hello["version"],
            "ratio": float(their_seconds / seconds),
            "cpu ratio": float(their_cpu / cpu),
        }
    return row


def main(config: Config) -> None:
    sources = config.sources or ("docstrings:jax",)
    folder = os.environ.get("JAXPFL_DATA")
    if not config.sources and folder:
        sources += (str(pathlib.Path(folder) / IRC),)
    try:
        encoder = SentenceEncoder(config.encoder)
    except InputError as error:
        raise SystemExit(str(error)) from None
    against = None
    if config.against:
        folder = str(pretrained.resolve(config.encoder))
        against = Peer(config.against, CHILD, {"folder": folder})
    rows = [measure(encoder, against, source, config) for source in sources]
    if against:
        against.close()
    columns = ["what", "sentences", "ours/s", "ours/cpu s"]
    if against:
        columns += ["theirs/s", "theirs/cpu s", "their batch", "ratio", "cpu ratio"]
        columns += ["largest difference"]
    harness.table(rows, columns)
    print(f"recorded in {harness.record('embed', rows)}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
