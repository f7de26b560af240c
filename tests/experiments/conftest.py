"""A tiny pipeline on real files: three public candidates, private clients full of canaries."""

import json
from pathlib import Path

import pytest

PIPELINE = """\
data: {{source: "{folder}/clients.jsonl", public: "{folder}/vocabulary.jsonl",
        split: {{train: 0.7, valid: 0.15, test: 0.15}}}}
model: {{name: cifg_lm, vocab_size: 44, embedding: 8, hidden: 8, projection: 8, sequence_length: 8}}
privacy: {{epsilon: 8.0, delta: 1e-3, clip_norm: 0.5, accountant: pld}}
training: {{rounds: 3, clients_per_round: 16, batch_size: 4, max_examples: 8, clients_per_bucket: 8,
           server: {{name: nesterov, learning_rate: 0.5}}}}
evaluation: {{every: 3, declared_public: true, max_examples: 50, sentences: 1}}
run: {{checkpoint_every: 2, devices: 2}}
fred:
  epsilon: 4.0
  embedder: "hashed:8"
  max_examples: 4
  candidates:
    far: "{folder}/far.jsonl"
    near: "{folder}/near.jsonl"
    "mostly far": {{near: 0.3, far: 0.7}}
prefinetune: {{examples: 80, valid: 0.2, epochs: 2, batch_size: 8, trials: 2, losers: true}}
"""
NEAR = [a + b for a in ("ka", "lo", "mi", "ne") for b in ("b", "d", "g", "m", "t")]
FAR = [a + b for a in ("qu", "xi", "zo", "wy") for b in ("bb", "dd", "gg", "mm", "tt")]


def write_lines(path: Path, words: list[str], clients: int, rows: int, tail: str = "") -> None:
    """`rows` sentences of five `words` for each client; `tail` takes the client's number."""
    with open(path, "w") as file:
        for number in range(clients):
            for row in range(rows):
                picked = [words[(number * 7 + row * 3 + k * k) % len(words)] for k in range(5)]
                text = " ".join([*picked, tail.format(number)]).strip()
                file.write(json.dumps({"client": f"canaryid{number}", "text": text}) + "\n")


@pytest.fixture(scope="session")
def pipeline_config(tmp_path_factory) -> Path:
    """The path of a config; its data lies beside it."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_lines(folder / "clients.jsonl", NEAR, 300, 3, "canarytext{}")
    write_lines(folder / "near.jsonl", NEAR, 30, 4)
    write_lines(folder / "far.jsonl", FAR, 30, 4)
    write_lines(folder / "vocabulary.jsonl", NEAR + FAR, 40, 5)
    path = folder / "pipeline.yaml"
    path.write_text(PIPELINE.format(folder=folder))
    return path
