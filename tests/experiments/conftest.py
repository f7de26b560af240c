"""Tiny studies on real files, with private clients full of canaries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.experiments.registry import load
from jaxpfl.experiments.systems.synthetic_text.config import Config

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
prefinetune: {{examples: 80, valid: 0.2, epochs: 2, batch_size: 8, trials: 2,
              other_candidates: true}}
"""
NEAR = [a + b for a in ("ka", "lo", "mi", "ne") for b in ("b", "d", "g", "m", "t")]
FAR = [a + b for a in ("qu", "xi", "zo", "wy") for b in ("bb", "dd", "gg", "mm", "tt")]


def write_lines(path: Path, words: list[str], clients: int, rows: int, own: str = "") -> None:
    """`rows` sentences of five `words` for each client; `own` takes the client's number.

    It stands within the sentence: what clients say is not what a public corpus says, word for word.
    """
    with open(path, "w") as file:
        for number in range(clients):
            for row in range(rows):
                picked = [words[(number * 7 + row * 3 + k * k) % len(words)] for k in range(5)]
                text = " ".join([*picked[:3], own.format(number), *picked[3:]]).replace("  ", " ")
                file.write(json.dumps({"client": f"canaryid{number}", "text": text}) + "\n")


def changed_config(path: Path, *changes: tuple[str, str]) -> Any:
    """A config with parts of its text replaced."""
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    changed = path.with_name("changed.yaml")
    changed.write_text(text)
    return load(changed)


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


TINY = """\
data: {{source: "{folder}/clients.jsonl", public: "{folder}/public.jsonl",
        split: {{train: 0.7, valid: 0.15, test: 0.15}}}}
model: {{name: cifg_lm, vocab_size: 24, embedding: 8, hidden: 8, projection: 8, sequence_length: 8}}
privacy: {{noise_multiplier: 1.0, delta: 1e-3, clip_norm: 0.5, accountant: rdp}}
training: {{rounds: 7, clients_per_round: 8, batch_size: 4, max_examples: 8, clients_per_bucket: 8,
           server: {{name: nesterov, learning_rate: 0.5}}}}
evaluation: {{every: 3, declared_public: true, max_examples: 50, sentences: 2}}
run: {{checkpoint_every: 2, reproducible_noise: true, devices: 2}}
"""


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory) -> Path:
    """The path of a config; its data lies beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    write_lines(folder / "public.jsonl", NEAR, 40, 5)
    write_lines(folder / "clients.jsonl", NEAR, 60, 3, "canarytext{}")
    path = folder / "tiny.yaml"
    path.write_text(TINY.format(folder=folder))
    return path


SYNTHETIC = """\
system: synthetic_text
method: {method}
data: {{source: "{folder}/clients.jsonl", split: {{train: 0.6, valid: 0.2, test: 0.2}}}}
corpora: {{near: "{folder}/near.jsonl", far: "{folder}/far.jsonl"}}
corpus_texts: 500
vocab_size: 300
generator: {{architecture: llama, hidden_size: 16, layers: 1, heads: 2, inner_size: 32,
            sequence_length: 32, pretraining: {{epochs: 1, batch_size: 8, learning_rate: 0.01}}}}
downstream: {{architecture: gpt2, hidden_size: 16, layers: 1, heads: 2, inner_size: 32,
             sequence_length: 32, corpora: [far],
             pretraining: {{epochs: 1, batch_size: 8, learning_rate: 0.01}}}}
corpus: {{texts: 24, tokens: 8, fine_tuning: {{epochs: 2, batch_size: 8, learning_rate: 0.003}}}}
embedder: "hashed:32"
popri:
  prompts: 4
  responses: 4
  rejected_rank: 3
  format: {{shots: 1, head: "", heading: "", after: "\\n", stop: "\\n"}}
  prompt_tokens: 16
  new_tokens: 8
  response_tokens: 8
  preference: {{tau: 0.1, epochs: 1, batch_size: 4, learning_rate: 0.001,
               final_learning_rate: 0.0003333333333333333, multiple: 32}}
evolution: {{form: aug_pe, variation: continue, population: 8, variations: 1, lookahead: 1,
            max_texts: 2,
            fine_tuning: {{epochs: 1, batch_size: 8, learning_rate: 0.001}}}}
privacy: {{epsilon: 8.0, delta: 1e-3}}
training: {{rounds: 2, clients_per_round: 12, batch_size: 4, max_examples: 4,
           clients_per_bucket: 8, client: {{name: sgd, learning_rate: 0.3}}}}
evaluation: {{declared_public: true, every: 2, max_examples: 40}}
cache: "{folder}/cache"
run: {{devices: 2}}
"""


@pytest.fixture(scope="session")
def synthetic_config(tmp_path_factory) -> Callable[..., Config]:
    """Makes the config of a method; `--section.key VALUE` change it."""
    folder = tmp_path_factory.mktemp("synthetic")
    write_lines(folder / "clients.jsonl", NEAR, 60, 3, "canarytext{}")
    write_lines(folder / "near.jsonl", NEAR, 30, 4)
    write_lines(folder / "far.jsonl", FAR, 30, 4)

    def make(method: str, *changes: str) -> Config:
        path = folder / f"{method}.yaml"
        path.write_text(SYNTHETIC.format(folder=folder, method=method))
        config = load(path, changes)
        assert isinstance(config, Config)
        return config

    return make
