"""How fast a table becomes clients, in each of the forms that people have one in.

    python -m benchmarks.micro.formats
    python -m benchmarks.micro.formats --rows 1000000

The same messages (a client's id, a text of 5 to 30 words, a year and a score) are written in each
form and read into a population, all columns. Each form is read in a process of its own: "rows/s"
is the best of its repeats, "peak MB" its peak resident memory, of which importing, and a DataFrame
itself, take "idle MB". "pyarrow rows/s" is how fast pyarrow alone parses the same file into a
table, in the same process: what is left goes to UTF-8, checks and the sort by client. For a
DataFrame or a `datasets.Dataset` it is the conversion to an Arrow table. "message" is what is said
of a bad row.
"""

import dataclasses
import gzip
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import tyro

from benchmarks import harness

COLUMNS = "client=user&text=message&columns=year,score"
FORMS = ("jsonl", "jsonl.gz", "csv", "csv.gz", "parquet", "pandas", "datasets")

CHILD = r"""
import gzip, json, pathlib, sys, time
import pyarrow as pa, pyarrow.csv, pyarrow.json, pyarrow.parquet
import jaxpfl as jp
from jaxpfl.errors import InputError

path, bad, form, options, repeats = *sys.argv[1:5], int(sys.argv[5])
status = pathlib.Path("/proc/self/status")
peak = lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
named = dict(client="user", text="message", columns=("year", "score"))

def loaded(path):
    if form == "pandas":
        import pandas
        return pandas.read_parquet(path)
    if form == "datasets":
        import datasets
        return datasets.Dataset(pa.parquet.read_table(path))

def read(path, frame):
    if frame is not None:
        return jp.data.from_dataframe(frame, **named)
    return jp.data.open(f"{path}?{options}")

def alone(path, frame):
    if form == "pandas":
        return pa.Table.from_pandas(frame)
    if form == "datasets":
        return frame.with_format("arrow")[:]
    opened = gzip.open(path) if path.endswith(".gz") else open(path, "rb")
    with opened as file:
        if ".csv" in path:
            options = pa.csv.ParseOptions(newlines_in_values=True)
            return pa.csv.open_csv(file, parse_options=options).read_all()
        if ".jsonl" in path:
            return pa.json.read_json(file)
        return pa.parquet.read_table(file)

def best(function):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = function()
        times.append(time.perf_counter() - start)
    return min(times), found

frame = loaded(path)
idle = peak()
seconds, population = best(lambda: read(path, frame))
row = {"rows": population.num_examples, "clients": len(population), "seconds": seconds,
       "idle MB": idle, "peak MB": peak()}
row["pyarrow seconds"] = best(lambda: alone(path, frame))[0]
try:
    read(bad, loaded(bad))
except InputError as error:
    row["message"] = str(error).replace(bad, pathlib.Path(bad).name)
print(json.dumps(row))
"""


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 300_000
    clients: int = 20_000
    repeats: int = 3
    forms: tuple[str, ...] = FORMS


def messages(config: Config, rng: np.random.Generator) -> list[dict[str, Any]]:
    words = np.array([f"word{k}" for k in range(2_000)])
    drawn = rng.zipf(1.3, 30 * config.rows) % len(words)
    sizes, users = rng.integers(5, 31, config.rows), rng.integers(0, config.clients, config.rows)
    scores = rng.normal(size=config.rows).round(4)
    return [
        {
            "user": f"u{users[k]}",
            "message": " ".join(words[drawn[30 * k : 30 * k + sizes[k]]]),
            "year": 2000 + k % 25,
            "score": float(scores[k]),
        }
        for k in range(config.rows)
    ]


def write(path: pathlib.Path, form: str, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.csv as arrow_csv
    import pyarrow.parquet as parquet

    opened = gzip.open(path, "wb", 6) if form.endswith(".gz") else path.open("wb")
    with opened as file:
        if "jsonl" in form:
            file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        elif "csv" in form:
            arrow_csv.write_csv(pa.Table.from_pylist(rows), file)
        else:
            parquet.write_table(pa.Table.from_pylist(rows), file)


def measure(config: Config) -> list[dict]:
    rows = messages(config, np.random.default_rng(0))
    # A row in the middle whose client is missing, in every form.
    bad = [dict(row) for row in rows[:1000]]
    bad[500]["user"] = None
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for form in config.forms:
            ending = "parquet" if form in ("pandas", "datasets") else form
            paths = [pathlib.Path(folder, f"{name}.{ending}") for name in ("good", "bad")]
            for path, content in zip(paths, (rows, bad), strict=True):
                write(path, form, content)
            command = [*map(str, paths), form, COLUMNS, str(config.repeats)]
            child = subprocess.run(
                [sys.executable, "-c", CHILD, *command], capture_output=True, text=True, check=True
            )
            row = json.loads(child.stdout)
            seconds, alone = row.pop("seconds"), row.pop("pyarrow seconds")
            megabytes = paths[0].stat().st_size / 1e6
            found.append(
                {
                    "what": form,
                    **row,
                    "file MB": round(megabytes, 1),
                    "rows/s": round(row["rows"] / seconds),
                    "MB/s": round(megabytes / seconds, 1),
                    "pyarrow rows/s": round(row["rows"] / alone),
                    "of pyarrow": round(alone / seconds, 2),
                }
            )
            harness.table(found[-1:], ["what", "rows/s", "pyarrow rows/s", "of pyarrow", "peak MB"])
    return found


if __name__ == "__main__":
    measured = measure(tyro.cli(Config))
    columns = ["what", "rows/s", "MB/s", "pyarrow rows/s", "of pyarrow", "idle MB", "peak MB"]
    harness.table(measured, columns)
    print(harness.record("formats", measured))
