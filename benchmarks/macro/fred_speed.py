"""How long `jaxpfl fred` with MiniLM takes: cold, warm and cached.

    python -m benchmarks.macro.fred_speed

Clients and candidates are docstrings. Each call is a process of its own: the first without any
cache (cold), the second with programs that were compiled but other texts (warm), the third with the
texts of the second, whose embeddings are kept (cached). Texts a second are of the whole call, with
loading, the release and the scores. `benchmarks.micro.embed --against PYTHON` has the embedding
alone, beside sentence-transformers.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jaxpfl as jp
from benchmarks.harness import record, table

TEXTS = 300  # of the clients, and of each of two candidates


def _written(path: Path, texts: list[str]) -> None:
    rows = [{"client": f"c{number // 2}", "text": text} for number, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def main() -> None:
    texts = jp.data.open("docstrings:jax,scipy,pandas").columns["text"].to_pylist()
    random.Random(0).shuffle(texts)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, what in enumerate(("cold", "warm", "cached")):
            if what != "cached":
                for name in ("private", "near", "far"):
                    _written(folder / f"{name}.jsonl", [texts.pop() for _ in range(TEXTS)])
            began = time.perf_counter()
            subprocess.run(
                [
                    *(sys.executable, "-m", "jaxpfl", "fred", "--private", "private.jsonl"),
                    *("--candidates", "near.jsonl", "far.jsonl", "--embedder", "minilm"),
                    *("--epsilon", "1", "--delta", "1e-4"),
                    *("--out", "cold" if number == 0 else "kept"),
                    *("--ledger", f"{what}.jsonl"),
                ],
                cwd=folder,
                env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
                check=True,
                capture_output=True,
            )
            seconds, load = time.perf_counter() - began, round(os.getloadavg()[0], 1)
            row = {"what": what, "texts": 3 * TEXTS, "seconds": round(seconds, 1), "load": load}
            rows.append({**row, "texts/s": round(3 * TEXTS / seconds)})
    record("fred_speed", rows)
    table(rows, ["what", "texts", "seconds", "texts/s", "load"])


if __name__ == "__main__":
    main()
