"""The other side of `benchmarks.micro.embed`: run by an interpreter with sentence-transformers.

    python embed_against.py FILE.npz

The file names the folder of the encoder. Reads lines [file, batch size] and embeds the sentences in
each file; answers each with a line.
"""

import json
import pathlib
import sys
import time

import numpy as np
import sentence_transformers  # pyright: ignore[reportMissingImports]


def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        folder = str(arrays["folder"])
    model = sentence_transformers.SentenceTransformer(folder, local_files_only=True)
    print(json.dumps({"version": sentence_transformers.__version__}), flush=True)
    for line in sys.stdin:
        name, batch_size = json.loads(line)
        path = pathlib.Path(name)
        texts = json.loads(path.read_text(encoding="utf-8"))
        start, cpu = time.perf_counter(), time.process_time()
        vectors = model.encode(texts, batch_size=batch_size, show_progress_bar=False)
        taken = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        np.save(path.with_suffix(".npy"), vectors, allow_pickle=False)
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
