"""How fast TensorFlow Federated's files become a folder, and how much memory that takes.

    python -m benchmarks.micro.tff
    python -m benchmarks.micro.tff --clients 50000 --datasets stackoverflow

Files are made here, as TFF's saver writes them: clients in no order, no index, and examples whose
sizes are like the real ones: Stack Overflow's posts with all their features (lengths and
posts a user drawn from heavy-tailed distributions), and EMNIST's images. Each conversion is a
process of its own, whose peak resident memory is given: it should not grow with the
number of clients. "MB/s" are megabytes of the unpacked file. "decode" is the decoder alone, on one
batch of messages in memory: what is left of the time goes to SQLite, the disk and SHA-256.
"""

import dataclasses
import json
import pathlib
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import tyro

from benchmarks import harness
from jaxpfl.data.readers.tff_examples import SCHEMAS, decode

CHILD = """
import json, pathlib, sys
from jaxpfl.data.folders import convert
record = convert(sys.argv[1], sys.argv[2], progress=False)
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
# Not getrusage: its peak begins with that of the process which started this one.
peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), "nan")
print(json.dumps({**record, "peak": float(peak) / 1024}))
"""


@dataclasses.dataclass(frozen=True)
class Config:
    clients: tuple[int, ...] = (5_000, 50_000)
    datasets: tuple[str, ...] = ("stackoverflow", "emnist")
    emnist_clients: tuple[int, ...] = (500, 3_400)  # 3,400: as many as there are
    seed: int = 0


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, content: bytes) -> bytes:
    return struct.pack("B", 8 * number + 2) + varint(len(content)) + content


def entry(name: str, kind: int, payload: bytes) -> bytes:
    value = field(kind, field(1, payload))
    return field(1, field(1, name.encode()) + field(2, value))


def write_sqlite(
    path: pathlib.Path,
    examples: Iterable[tuple[str, bytes]],
    sizes: Iterable[tuple[str, int]],
    index: bool = False,
) -> None:
    """Writes a file with the split "train" as TFF's own saver makes them, and perhaps an index.

    Args:
      examples: a client and a serialized example, in the order of the file.
      sizes: a client and its number of examples; read after `examples`.
    """
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
        connection.executemany("INSERT INTO examples VALUES ('train', ?, ?)", examples)
        connection.executemany("INSERT INTO client_metadata VALUES (?, 'train', ?)", sizes)
        if index:
            connection.execute("CREATE INDEX idx_examples_client_id ON examples (client_id)")
            connection.execute("CREATE INDEX idx_metadata_client_id ON client_metadata (client_id)")
    connection.close()


def _posts(rng: np.random.Generator, count: int) -> list[bytes]:
    words = rng.zipf(1.3, 12 * count) % 10_000
    text = " ".join(f"w{word}" for word in words).encode()
    messages = []
    for _ in range(count):
        size = int(np.clip(rng.lognormal(4.2, 0.7), 5, 2000))
        begin = int(rng.integers(0, max(len(text) - size, 1)))
        entries = (
            entry("title", 1, text[begin : begin + 50]),
            entry("tags", 1, b"sql|sql-server|aggregate-functions"),
            entry("tokens", 1, text[begin : begin + size]),
            entry("score", 3, varint(int(rng.integers(-2, 40)) % 2**64)),
            entry("creation_date", 1, b"2010-01-08 09:34:05.123 UTC"),
            entry("type", 1, b"answer"),
        )
        messages.append(field(1, b"".join(entries)))
    return messages


def _digits(rng: np.random.Generator, count: int) -> list[bytes]:
    pixels_NxP = rng.random((count, 784), np.float32)
    return [
        field(1, entry("label", 3, varint(k % 62)) + entry("pixels", 2, pixels.tobytes()))
        for k, pixels in enumerate(pixels_NxP)
    ]


MAKERS = {"stackoverflow": (_posts, 25), "emnist": (_digits, 100)}


def write_file(path: pathlib.Path, dataset: str, clients: int, seed: int) -> list[bytes]:
    """Writes a file with one split, and returns some of its messages."""
    rng = np.random.default_rng(seed)
    make, mean = MAKERS[dataset]
    # Some hundred different clients, again and again: making them would take minutes.
    pool = make(rng, 20_000 if dataset == "stackoverflow" else 2_000)
    sizes = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1, clients).astype(int))
    begins = rng.integers(0, len(pool), clients)
    order = rng.permutation(clients).tolist()
    examples = (
        (f"{client:08}", pool[(begins[client] + k) % len(pool)])
        for client in order
        for k in range(sizes[client])
    )
    write_sqlite(path, examples, ((f"{client:08}", int(sizes[client])) for client in order))
    return pool


def convert_once(source: str, out: pathlib.Path) -> dict[str, Any]:
    """`jaxpfl convert` in a fresh process: its record, with the peak memory in MB."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source, str(out)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"converting {source} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def decoding_rate(dataset: str, messages: list[bytes]) -> float:
    """Examples a second of the decoder alone, best of five."""
    batch = messages[: max(1, 2**22 // len(messages[0]))]
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        decode(SCHEMAS[dataset].features, batch)
        best = min(best, time.perf_counter() - start)
    return len(batch) / best


def measure(folder: pathlib.Path, dataset: str, clients: int, config: Config) -> dict:
    path = folder / f"{dataset}-{clients}.sqlite"
    messages = write_file(path, dataset, clients, config.seed)
    size = path.stat().st_size
    record = convert_once(f"{path}?dataset={dataset}", folder / f"{path.name}.out")
    path.unlink()
    return {
        "what": dataset,
        "clients": clients,
        "examples": record["examples"],
        "MB": size / 1e6,
        "seconds": record["seconds"],
        "clients/s": clients / record["seconds"],
        "examples/s": record["examples"] / record["seconds"],
        "MB/s": size / 1e6 / record["seconds"],
        "decode/s": decoding_rate(dataset, messages),
        "peak MB": record["peak"],
    }


def main(config: Config) -> None:
    rows = []
    for dataset in config.datasets:
        sizes = config.clients if dataset == "stackoverflow" else config.emnist_clients
        for clients in sizes:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(pathlib.Path(folder), dataset, clients, config))
    columns = ["what", "clients", "examples", "MB", "seconds", "clients/s", "examples/s", "MB/s"]
    harness.table(rows, [*columns, "decode/s", "peak MB"])
    print(f"recorded in {harness.record('tff', rows)}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
