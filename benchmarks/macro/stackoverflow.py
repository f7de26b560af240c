"""Stack Overflow's size in ordinary memory: convert and train.

    python -m benchmarks.macro.stackoverflow --clients 3000 --sentences 200000 --folder /tmp/small
    python -m benchmarks.macro.stackoverflow --folder DISK

A file as TensorFlow Federated ships its Stack Overflow is generated: SQLite, the clients in no
order, no index, all six features, as many users, heavy-tailed numbers of sentences (log-normal) and
Zipf words; and its word counts. Then, each in a process of its own:

- `jaxpfl convert FILE FOLDER --vocabulary COUNTS`, to token ids;
- `jaxpfl run` of the word model of Augenstein et al. 2020 (1.4 M parameters), 3 rounds.

What opening, identifying and packing such a folder costs: `benchmarks.macro.large_population`.
The peak is of a process's resident memory with its children's, pages of mapped files included,
which the system may drop at any time; "anonymous" is the part that it may not. The folder needs
twice the file's size on the disk, and is removed at the end.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import tyro

from benchmarks import harness
from benchmarks.micro.tff import entry, field, varint, write_sqlite

WORDS, VOCAB_SIZE, LENGTH, MEAN_WORDS = 60_000, 10_004, 20, 13
CONFIG = """
system: federated_training
data: {{source: {folder}, vocabulary: {folder}, split: {{train: 1.0, valid: 0.0, test: 0.0}}}}
model: {{name: cifg_lm, vocab_size: {vocab_size}, sequence_length: {length}, hidden: {hidden}}}
privacy: {{noise_multiplier: 1.0, delta: 2.9e-6, clip_norm: 0.2}}
training:
  rounds: {rounds}
  clients_per_round: {cohort}
  batch_size: 16
  max_examples: 256
  client: {{name: sgd, learning_rate: 0.5}}
  server: {{name: nesterov, learning_rate: 1.0, momentum: 0.99}}
evaluation: {{every: 0}}
run: {{checkpoint_every: {rounds}}}
"""


@dataclasses.dataclass(frozen=True)
class Config:
    folder: pathlib.Path  # on a disk with room; made, and removed at the end
    clients: int = 342_477
    sentences: int = 20_000_000
    cohort: int = 200
    rounds: int = 3
    hidden: int = 670
    seed: int = 0


@dataclasses.dataclass
class Watched:
    """What a command printed, how long it took, and the most memory that it held, in MB."""

    output: str
    seconds: float
    peak: float
    anonymous: float


def watched(*command: str) -> Watched:
    """Runs a command, and reads its and its children's resident memory 20 times a second."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = anonymous = 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak, anonymous
        while not ended.wait(0.05):
            now = _memory(process.pid)
            peak, anonymous = max(peak, now[0]), max(anonymous, now[1])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        output, _ = process.communicate()
    finally:
        ended.set()
        thread.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with exit code {process.returncode}")
    seconds = time.perf_counter() - began
    return Watched(output, seconds, peak, anonymous)


def _memory(pid: int) -> tuple[float, float]:
    """Resident memory of a process and its children, and the anonymous part of it, in MB."""
    resident = anonymous = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            memory = member.memory_info()
            resident += memory.rss
            anonymous += memory.rss - memory.shared
    return resident / 2**20, anonymous / 2**20


def _words() -> list[str]:
    """Made-up words, short ones first, some with characters that are no letters."""
    letters = "etaoinshrdlucmfwygpbvk"
    endings = ("", "s", "ing", "-1.9", ".js", "'t", "_id", "()")
    found: dict[str, None] = dict.fromkeys([".", ",", "the", "to", "i", "a", "is", "?", "<URL>"])
    number = 0
    while len(found) < WORDS:
        rest, word = number, ""
        while rest or not word:
            rest, letter = divmod(rest, len(letters))
            word += letters[letter]
        found[word + endings[number % 11 if number % 11 < len(endings) else 0]] = None
        number += 1
    return list(found)


def sizes_of_users(rng: np.random.Generator, clients: int, sentences: int) -> np.ndarray:
    """How many sentences each user has, int64 [clients]: heavy-tailed, and `sentences` in all."""
    sizes = rng.lognormal(0, 1.6, clients)
    return np.ceil(sizes * (sentences / sizes.sum())).astype(np.int64)


def generate(config: Config, path: pathlib.Path, counts: pathlib.Path) -> int:
    """Writes the SQLite file and the archive of word counts; returns the number of sentences."""
    rng = np.random.default_rng(config.seed)
    words = np.array(_words(), object)
    shares = 1 / np.arange(1, WORDS + 1) ** 1.05
    edges = np.cumsum(shares / shares.sum())
    sizes = sizes_of_users(rng, config.clients, config.sentences)
    # Like TFF's own saver: ids as numbers in text, in no order, and no index.
    ids = [f"{number:08d}" for number in rng.choice(10**8, config.clients, replace=False)]
    fixed = [
        (
            entry("title", 1, f"how do i {n} calculate the median in sql server".encode())
            + entry("tags", 1, b"sql|sql-server|aggregate-functions|median")
            + entry("score", 3, varint(n))
            + entry("type", 1, b"answer" if n % 3 else b"question"),
            entry("creation_date", 1, f"2010-01-{n % 28 + 1:02} 09:34:05.123 UTC".encode()),
        )
        for n in range(300)
    ]
    pool: list[str] = []
    lengths: list[int] = []

    def sentences(number: int) -> Iterator[bytes]:
        nonlocal pool, lengths
        for place in range(number):
            if not lengths:
                lengths = np.clip(rng.geometric(1 / MEAN_WORDS, 2**16), 1, 200).tolist()
                drawn = np.searchsorted(edges, rng.random(sum(lengths)))
                pool = words[np.minimum(drawn, WORDS - 1)].tolist()
            size = lengths.pop()
            text = " ".join(pool[-size:]).encode()
            del pool[-size:]
            before, behind = fixed[(place * 7 + size) % len(fixed)]
            yield field(1, before + entry("tokens", 1, text) + behind)

    write_sqlite(
        path,
        ((user, blob) for user, size in zip(ids, sizes, strict=True) for blob in sentences(size)),
        zip(ids, sizes.tolist(), strict=True),
    )
    expected = np.maximum(1, shares / shares.sum() * 1e9).astype(np.int64)
    lines = "".join(f"{word} {count}\n" for word, count in zip(words, expected, strict=True))
    with tarfile.open(counts, "w:bz2") as archive:
        member = tarfile.TarInfo("stackoverflow.word_count")
        member.size = len(lines.encode())
        archive.addfile(member, io.BytesIO(lines.encode()))
    return int(sizes.sum())


def main(config: Config) -> list[dict]:
    config.folder.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="stackoverflow-", dir=config.folder))
    try:
        rows = measure(config, folder)
    finally:
        shutil.rmtree(folder)
    harness.table(rows, list(dict.fromkeys(column for row in rows for column in row)))
    print(f"recorded in {harness.record('stackoverflow', rows)}")
    return rows


def measure(config: Config, folder: pathlib.Path) -> list[dict]:
    file, counts = folder / "train.sqlite", folder / "stackoverflow.word_count.tar.bz2"
    tokens, python = folder / "tokens", sys.executable
    began = time.perf_counter()
    sentences = generate(config, file, counts)
    shared = {"clients": config.clients, "sentences": sentences}
    rows: list[dict] = []

    def add(what: str, done: Watched, **more: float) -> None:
        memory = {"peak MB": done.peak, "anonymous MB": done.anonymous}
        rows.append({"what": what, **shared, "seconds": done.seconds, **memory, **more})
        print(json.dumps(rows[-1]), flush=True)

    size = file.stat().st_size
    print(f"{sentences} sentences, {size / 1e9:.1f} GB in {time.perf_counter() - began:.0f} s")
    source = f"{file}?dataset=stackoverflow&split=train"
    vocabulary = ("--vocabulary", str(counts), "--vocab-size", str(VOCAB_SIZE))
    done = watched(python, "-m", "jaxpfl", "convert", source, str(tokens), *vocabulary)
    stored = sum(entry.stat().st_size for entry in os.scandir(tokens))
    add("convert", done, **{"file MB": size / 2**20, "folder MB": stored / 2**20})
    file.unlink()

    path = folder / "config.yaml"
    settings = {"vocab_size": VOCAB_SIZE, "length": LENGTH, "hidden": config.hidden}
    settings |= {"rounds": config.rounds, "cohort": config.cohort, "folder": str(tokens)}
    path.write_text(CONFIG.format(**settings), encoding="utf-8")
    run = folder / "run"
    done = watched(python, "-m", "jaxpfl", "run", str(path), "--out", str(run))
    add(f"{config.rounds} rounds of {config.cohort}, hidden {config.hidden}", done)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
