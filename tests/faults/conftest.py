"""A tiny private text experiment whose data is full of canaries."""

from pathlib import Path

import pytest

from jaxpfl.experiments import carry_out
from tests.experiments.conftest import NEAR, write_lines
from tests.faults.runs import config_of

CONFIG = """\
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
    folder = tmp_path_factory.mktemp("experiment")
    write_lines(folder / "public.jsonl", NEAR, 40, 5)
    write_lines(folder / "clients.jsonl", NEAR, 60, 3, "canarytext{}")
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


@pytest.fixture(scope="session")
def straight(tiny_config, tmp_path_factory) -> Path:
    """The run directory of an uninterrupted run."""
    out = tmp_path_factory.mktemp("straight") / "run"
    carry_out.run(config_of(tiny_config), out, progress=False)
    return out
