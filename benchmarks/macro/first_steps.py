"""A stopwatch for a new user: a wheel in a new environment, a first run, then data of one's own.

    python -m benchmarks.macro.first_steps

Builds the wheel, installs it into a new environment without any cache of jaxpfl's, and carries out
what README.md and docs/own_data.md say, in an empty folder: `jaxpfl run quickstart`, then for a
JSONL, a CSV and a Parquet file `jaxpfl init` and `jaxpfl run`, then `jaxpfl.run` on a DataFrame.
Then come the same rows in files as people have them, each opened by `jaxpfl init` or `fred`.
Nothing is corrected by hand: a step that is refused is recorded with its message. Needs an index
to install from.
"""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from benchmarks.harness import record, table

ROOT = Path(__file__).parents[2]
OWN = ["--client", "author", "--text", "message"]
# A user's file: other column names than ours, 600 users, words of a natural language.
WRITE = """
import random
import pandas as pd
import jaxpfl as jp
draw = random.Random(0)
held = jp.data.open("docstrings:scipy,pandas").columns["text"].to_pylist()
texts = [text for text in held if len(text.split()) > 4][:6000]
frame = pd.DataFrame({
    "author": [f"u{draw.randrange(600)}" for _ in texts],
    "when": [draw.randrange(2000, 2026) for _ in texts],
    "message": texts,
})
frame.to_json("a.jsonl", orient="records", lines=True)
frame.to_csv("b.csv", index=False)
frame.to_parquet("c.parquet")
"""
# The same rows as people have them.
WRITE_MORE = """
import os
import datasets
import numpy as np
import pandas as pd
from PIL import Image
frame = pd.read_csv("b.csv")[:2000]
frame.to_csv("semicolon.csv", index=False, sep=";")
frame.to_csv("tab.csv", index=False, sep="\\t")
frame.to_csv("table.tsv", index=False, sep="\\t")
french = frame.assign(message=frame["message"] + " caf\\u00e9")
french.to_csv("latin.csv", index=False, encoding="latin-1", errors="replace")
frame.to_csv("wide.csv", index=False, encoding="utf-16")
frame.to_excel("sheet.xlsx", index=False)
frame.assign(message=frame["message"].where(frame.index % 50 > 0)).to_csv("holes.csv", index=False)
pd.read_csv("b.csv")[2000:4000][["message"]].to_csv("public.csv", index=False)
for name in ("logs", "shards"):
    os.mkdir(name)
    for part in range(3):
        frame[part::3].to_parquet(f"{name}/{part}.parquet")
whole = datasets.Dataset.from_pandas(frame)
whole.filter(lambda row: row["when"] > 2005).save_to_disk("filtered")
datasets.DatasetDict(train=whole, test=whole.select(range(100))).save_to_disk("parts")
draw = np.random.default_rng(0)
for author in range(20):
    os.makedirs(f"pictures/{author}")
    for number in range(3):
        pixels = draw.integers(0, 255, (32, 32, 3)).astype("uint8")
        Image.fromarray(pixels).save(f"pictures/{author}/{number}.png")
"""
STREAMED = """
import datasets
import jaxpfl as jp
frame = datasets.load_from_disk("filtered").to_iterable_dataset()
print(jp.data.from_dataframe(frame, client="author", text="message"))
"""
NAMED = "?client=author&text=message"
PICTURES = """
import jaxpfl as jp
print(jp.data.open("pictures?size=32&channels=3"))
"""
# What is typed; the second of a pair is what the refusal of the first says to write.
FILES = [
    ["init", "semicolon.csv", *OWN],
    ["init", "tab.csv", *OWN],
    ["init", "table.tsv", *OWN],
    ["init", "latin.csv", *OWN],
    ["init", "latin.csv?encoding=latin-1", *OWN],
    ["init", "wide.csv", *OWN],
    ["init", "sheet.xlsx", *OWN],
    ["init", "logs/*.parquet", *OWN],
    ["init", "shards", *OWN],
    ["init", "filtered", *OWN],
    ["init", "parts", *OWN],
    ["init", "parts/train", *OWN],
    ["init", "holes.csv", *OWN],
    ["init", "holes.csv?missing=drop", *OWN],
    ["init", "pictures"],
    [
        *("fred", "--private", f"semicolon.csv{NAMED}", "--epsilon", "1", "--delta", "1e-4"),
        *("--candidates", "public.csv?text=message", "docstrings:rich"),
    ],
]
DATA_FRAME = """
import optax
import pandas as pd
import jaxpfl as jp
frame = pd.read_csv("b.csv")
clients = jp.data.from_dataframe(frame, client="author", text="message")
vocabulary = jp.text.Vocabulary.from_public("docstrings:numpy", 2_000)
parts = vocabulary.encode(clients).split({"train": 0.8, "test": 0.2}, seed=0)
model = jp.models.CIFGLanguageModel(len(vocabulary))
plan = jp.Plan.calibrated(
    epsilon=8.0, delta=1e-4, rounds=20, clip=jp.Clip(0.3),
    participation=jp.Poisson(len(parts["train"]), clients_per_round=100),
)
algorithm = jp.algorithms.fed_avg(
    model, client=optax.sgd(0.5), server=optax.sgd(1.0, momentum=0.9), plan=plan,
)
test = jp.DeclaredPublic(parts["test"], "test authors of mine")
result = jp.run(
    algorithm, parts["train"], ledger="ledger.jsonl", out="runs/frame",
    evaluation=jp.Evaluator(model, test, vocabulary=vocabulary),
)
print(result.privacy)
"""


def timed(what: str, command: list[str], folder: Path) -> dict:
    """Runs a command in a folder; its seconds, whether it succeeded, and its last line."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    for name in ("PYTHONPATH", "JAXPFL_DATA", "JAX_COMPILATION_CACHE_DIR"):
        environment.pop(name, None)
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = next((line for line in lines if "epsilon =" in line), lines[-1] if lines else "")
    row = {"what": what, "seconds": round(seconds, 1), "done": done.returncode == 0}
    row["load"] = round(os.getloadavg()[0], 1)  # of the last minute; 1 = one busy core
    print(
        f"{what:44}{seconds:>8.1f} s  {'' if row['done'] else 'FAILED: '}{said[:100]}", flush=True
    )
    return row if row["done"] else {**row, "said": "\n".join(lines[-3:])}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        built = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(ROOT)]
        subprocess.run(built, check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        python, jaxpfl = str(folder / "env/bin/python"), str(folder / "env/bin/jaxpfl")
        pip = [python, "-m", "pip", "install", "-q", str(wheel), "-c", f"{ROOT}/constraints.txt"]
        rows = [
            timed("a new environment", [sys.executable, "-m", "venv", "env"], folder),
            timed("pip install jaxpfl", pip, folder),
            timed("jaxpfl run quickstart", [jaxpfl, "run", "quickstart"], folder),
            timed("(pandas, to write a user's files)", [*pip[:-3], "pandas"], folder),
            timed("(a user's files)", [python, "-c", textwrap.dedent(WRITE)], folder),
        ]
        for name in ("a.jsonl", "b.csv", "c.parquet"):
            rows.append(timed(f"jaxpfl init {name}", [jaxpfl, "init", name, *OWN], folder))
            config = f"{name.partition('.')[0]}.yaml"
            rows.append(timed(f"jaxpfl run {config}", [jaxpfl, "run", config], folder))
        rows.append(timed("jaxpfl.run on a DataFrame", [python, "-c", DATA_FRAME], folder))
        more = ["datasets", "openpyxl", "pillow"]
        rows.append(timed("(to write files as people have them)", [*pip[:-3], *more], folder))
        rows.append(timed("(files as people have them)", [python, "-c", WRITE_MORE], folder))
        for number, typed in enumerate(FILES):
            to = ["--out", f"more-{number}.yaml"] if typed[0] == "init" else []
            rows.append(timed(f"jaxpfl {' '.join(typed[:2])}", [jaxpfl, *typed, *to], folder))
        rows.append(timed("an IterableDataset", [python, "-c", STREAMED], folder))
        rows.append(timed("a folder of images", [python, "-c", PICTURES], folder))
    record("first_steps", rows)
    table(rows, ["what", "seconds", "done"])


if __name__ == "__main__":
    main()
