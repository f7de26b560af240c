"""Stack Overflow's size in ordinary memory: convert, open, train, sample.

    python -m benchmarks.macro.stackoverflow --clients 3000 --sentences 200000 --folder /tmp/small
    python -m benchmarks.macro.stackoverflow --folder DISK

A file as TensorFlow Federated ships its Stack Overflow is generated: SQLite, the clients in no
order, no index, all six features, as many users, heavy-tailed numbers of sentences (log-normal) and
Zipf words; and its word counts. Then, each in a process of its own:

- `jaxpfl convert FILE FOLDER --vocabulary COUNTS`, to token ids;
- what a run does before its rounds: open the folder, choose the clients, encode them for the model,
  and identify them for a release;
- `sample`: cohorts are drawn and packed, from the map and from the same clients as an array in
  memory, taking turns; "cold" is the first cohort after the file left the page cache;
- `jaxpfl run` of the word model of Augenstein et al. 2020 (1.4 M parameters), 3 rounds.

The peak is of a process's resident memory with its children's, pages of mapped files included,
which the system may drop at any time; "anonymous" is the part that it may not. The folder needs
twice the file's size on the disk, and is removed at the end.
"""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.micro.tff import entry, field, varint

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
OPEN = """
import json, sys, time
from jaxpfl.data import open
from jaxpfl.data.content import origin_hash
from jaxpfl.text.tokenisers.public_words import public_words
began = time.perf_counter()
clients = open(sys.argv[1])
opened = time.perf_counter()
part = clients.split({"train": 1.0}, seed=0)["train"]
encoded = public_words(sys.argv[1], None).encode(part, int(sys.argv[2]))
chosen = time.perf_counter()
origin_hash(encoded.numeric(), encoded.offsets)
hashed = time.perf_counter()
print(json.dumps({"open": opened - began, "split": chosen - opened, "hash": hashed - chosen}))
"""
SAMPLE = """
import json, os, pathlib, sys, time
import numpy as np
from jaxpfl.data import CohortSpec, Population, open, Cohort
from jaxpfl.text.tokenisers.public_words import public_words
folder, length, cohort, most, repeats = sys.argv[1], *map(int, sys.argv[2:])
mapped = public_words(folder, None).encode(open(folder), length)
# As many of the clients as fit into memory as an array of padded rows.
inside = int(np.searchsorted(mapped.offsets, most, "right")) - 1
part = mapped.select(np.arange(inside))
rows = np.asarray(part.columns["tokens"])
population = {"mapped": part, "memory": Population({"tokens": rows}, part.offsets, part.client_ids)}
spec = CohortSpec(batch_size=16, max_examples=256)

def seconds(name, round):
    generator = np.random.default_rng(round)
    began = time.perf_counter()
    chosen = np.flatnonzero(generator.random(inside) < cohort / inside)
    buckets = Cohort(population[name], chosen, spec, seed=1, round=round)
    examples = sum(int(bucket.mask.sum()) for bucket in buckets)
    return time.perf_counter() - began, examples

taken = {"mapped": [], "memory": []}
for round in range(repeats + 2):
    order = ("mapped", "memory") if round % 2 else ("memory", "mapped")
    found = {name: seconds(name, round) for name in order}
    assert found["mapped"][1] == found["memory"][1]
    for name in order if round >= 2 else ():
        taken[name].append(found[name][0])
whole = mapped.select(np.arange(len(mapped)))
population["mapped"], inside = whole, len(whole)
files = [os.open(path, os.O_RDONLY) for path in pathlib.Path(folder).iterdir()]
del rows, population["memory"], part, mapped
for file in files:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
result = {name: float(np.median(each)) for name, each in taken.items()}
print(json.dumps({**result, "cold": seconds("mapped", 99)[0]}))
"""


@dataclasses.dataclass(frozen=True)
class Config:
    folder: pathlib.Path  # on a disk with room; made, and removed at the end
    clients: int = 342_477
    sentences: int = 20_000_000
    cohort: int = 200
    rounds: int = 3
    hidden: int = 670
    in_memory: int = 10_000_000  # sentences of the population in memory; 84 bytes each
    repeats: int = 40
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
    peaks = {"VmRSS": 0.0, "RssAnon": 0.0}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            held = [_memory(pid) for pid in _with_children(process.pid)]
            for name in peaks:
                peaks[name] = max(peaks[name], sum(each.get(name, 0.0) for each in held))

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
    return Watched(output, seconds, peaks["VmRSS"], peaks["RssAnon"])


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from _with_children(int(child))


def _memory(pid: int) -> dict[str, float]:
    """The lines of a process's status that are sizes, in MB; none of one that has ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): float(value) / 1024 for name, value, _ in parts}


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

    with sqlite3.connect(path) as connection:
        for pragma in ("synchronous = OFF", "journal_mode = OFF", "page_size = 4096"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
            "serialized_example_proto BLOB NOT NULL)"
        )
        connection.execute(
            "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, "
            "num_examples INTEGER NOT NULL)"
        )
        for client, size in zip(ids, sizes.tolist(), strict=True):
            rows = (("train", client, blob) for blob in sentences(size))
            connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        metadata = [
            (client, "train", size) for client, size in zip(ids, sizes.tolist(), strict=True)
        ]
        connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", metadata)
    connection.close()
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

    done = watched(python, "-c", OPEN, str(tokens), str(LENGTH))
    add("open", done, **json.loads(done.output))

    numbers = (LENGTH, config.cohort, config.in_memory, config.repeats)
    done = watched(python, "-c", SAMPLE, str(tokens), *map(str, numbers))
    found = json.loads(done.output)
    rates = {f"{name} clients/s": config.cohort / found[name] for name in ("mapped", "memory")}
    add("sample", done, **rates, **{"mapped / memory": found["memory"] / found["mapped"]})
    rows[-1]["cold seconds"] = found["cold"]

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
