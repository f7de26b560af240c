"""A dry run says what a run would do, refuses what it would refuse, and leaves everything alone."""

import builtins
import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.shapes import distilgpt2, llama3_8b
from jaxpfl import cli
from jaxpfl.data.open import why_missing
from jaxpfl.experiments import dry_run as module
from jaxpfl.experiments import registry
from jaxpfl.experiments.dry_run import dry_run, dry_run_sweep
from jaxpfl.experiments.engine import description as engine
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.federated.flow import client_program
from jaxpfl.models.checkpoints import hub
from jaxpfl.privacy import Plan, accounting, confirmation, guarantee, participation
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from tests.refusals import refusal

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = """\
data: {source: "$NOT_SET/clients.jsonl?client=who", public: "docstrings:numpy", clients: 5000,
       split: {train: 0.8, valid: 0.1, test: 0.1}}
model: {name: cifg_lm, vocab_size: 44, embedding: 8, hidden: 8, projection: 8, sequence_length: 8}
privacy: {noise_multiplier: 1.0, delta: 1.0e-5, clip_norm: 0.5}
training: {rounds: 3, clients_per_round: 16, batch_size: 4, max_examples: 8, clients_per_bucket: 8}
evaluation: {every: 0}
"""


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_it_reads_no_client_and_writes_nothing(tiny, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "clients.jsonl").write_text('{"who": "canary", "text": "private"}\n')
    monkeypatch.setenv("NOT_SET", str(data))
    monkeypatch.chdir(tmp_path)
    before, opened, really = sorted(tmp_path.rglob("*")), [], builtins.open

    def open(file, mode="r", *rest, **named):
        opened.append(str(file) if "r" in mode else f"WRITTEN {file}")
        return really(file, mode, *rest, **named)

    monkeypatch.setattr(builtins, "open", open)
    monkeypatch.setattr(io, "open", open)
    code = cli.main(["run", str(tiny), "--dry-run", "--run.devices", "2", "--out", "out", "--json"])
    assert code == 0
    record = json.loads(capsys.readouterr().out)
    assert sorted(tmp_path.rglob("*")) == before
    assert str(tiny) in opened
    # Of the programs that JAX keeps, one tries the optimiser.
    compiled = f"WRITTEN {jax.config.jax_compilation_cache_dir}"
    written = [name for name in opened if "WRITTEN" in name and not name.startswith(compiled)]
    assert not [name for name in opened if "clients.jsonl" in name] + written
    assert record["sources"]["data.source"]["missing"] == ""


def test_epsilon_is_that_of_the_declared_clients(tiny):
    record = dry_run(registry.load(tiny))
    assert record["clients"] == {"all": 5000, "train": 4000, "declared": True}
    plan = Plan(3, Clip(0.5), Noise(1.0), participation.of("poisson", 4000, 16), 1e-5)
    assert record["privacy"]["rounds"]["epsilon"] == pytest.approx(plan.epsilon())
    assert "NOT_SET" in record["sources"]["data.source"]["missing"]


def test_without_a_declared_number_one_is_assumed_and_named(tiny):
    record = dry_run(registry.load(tiny, ["--data.clients", "null"]))
    assert not record["clients"]["declared"] and record["clients"]["all"] == engine.ASSUMED
    assert "ASSUMED" in record["text"] and f"{engine.ASSUMED:,}" in record["text"]


def test_sizes_are_those_of_the_model(tiny):
    record = dry_run(registry.load(tiny))
    # Embedding 44 x 8, tied, and 44 biases; CIFG of three gates on 16 inputs; the projection.
    parameters = 44 * 8 + 44 + (3 * 8 * 16 + 3 * 8) + 8 * 8
    assert record["models"]["model"]["parameters"] == parameters
    (asked,) = record["rounds"]["rounds"]["queries"]
    assert asked["down"] == asked["up"] == 4 * parameters
    # Of 8 clients: 2 batches of 4 rows of 9 tokens, their mask, and four numbers.
    assert asked["bucket"] == 8 * (2 * 4 * (9 * 4 + 1) + 4 * 4)


def test_a_planted_error_of_shapes_is_bad_input(tiny, monkeypatch):
    columns = {"tokens": np.empty((0, 2, 9), np.int32)}
    monkeypatch.setattr(engine, "example_columns", lambda settings: columns)
    refusal(lambda: dry_run(registry.load(tiny)), "a round of training")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("--training.chunk 3", "chunk"),
        ("--training.model-devices 3", "model = 3 devices must share each copy"),
        ("--training.clients-per-round 4001", "clients_per_round"),
        ("--privacy.delta 1e-3", "delta"),
        ("--training.batch-size 1000000000", "steps of 1,000,000,000 examples would take"),
        ("--data.source clients.tab", "clients.tab"),
        ("--data.source $NOT_SET/a.jsonl?klient=b", "klient"),
        ("--data.public dokstrings:numpy", "docstrings"),
    ],
)
def test_what_a_run_would_refuse_is_refused(tiny, changes, words):
    refusal(lambda: dry_run(registry.load(tiny, changes.split())), words)


def test_a_source_that_is_not_here_is_named_and_no_error(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    for source in (
        "$NOT_SET/a.jsonl.gz?client=*",
        "nowhere/corpus.tar.xz?split=sentences",
        "$NOT_SET/a.npz?client=*&partition=dirichlet&clients=10&alpha=0.3",
        "huggingface:a/b?revision=abc&client=c",
    ):
        assert why_missing(source)
    (tmp_path / "a.jsonl").touch()
    for source in ("docstrings:numpy", "digits?clients=10", str(tmp_path / "a.jsonl")):
        assert why_missing(source) == ""


def test_a_published_model_is_checked_by_its_config_json_alone(tiny, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    values = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 8, "n_layer": 2, "n_head": 2,
              "n_positions": 16}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    text = TINY.replace(', public: "docstrings:numpy"', "")
    section = f"model: {{name: decoder, path: {folder}, sequence_length: 8, lora: {{rank: 2}}}}"
    tiny.write_text(re.sub("model: .*", section, text))
    record = dry_run(registry.load(tiny))
    (query,) = record["rounds"]["rounds"]["queries"]
    adapters, model = (record["models"][name]["parameters"] for name in ("adapters", "model"))
    assert (query["up"], query["down"]) == (4 * adapters, 4 * (adapters + model))
    too_long = registry.load(tiny, ["--model.sequence-length", "17"])
    refusal(lambda: dry_run(too_long), "16 positions")
    record = dry_run(registry.load(tiny, ["--model.path", "nobody/no-such-model"]))
    assert "NOT AVAILABLE" in record["models"]["model"]["about"] and record["rounds"] == {}


# The sizes in the config.json of the models that configs name.
PUBLISHED = {
    "distilbert/distilgpt2": distilgpt2().to_dict(),
    "meta-llama/Meta-Llama-3-8B": llama3_8b().to_dict(),
    "smollm2": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "models/bert-small": {"model_type": "bert", "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 30522},
    "sentence-transformers/paraphrase-albert-small-v2": {
        "model_type": "albert", "hidden_size": 768, "num_hidden_layers": 6, "vocab_size": 30000,
        "num_attention_heads": 12, "intermediate_size": 3072, "embedding_size": 128,
    },
    "minilm": {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6,
        "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 30522},
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1195k-token-2.5T": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "vocab_size": 32000,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632},
}  # fmt: skip


@pytest.fixture
def published(tmp_path_factory, monkeypatch):
    """Folders with the config.json of these models, and nothing else."""
    folders = {}
    for name, values in PUBLISHED.items():
        folders[name] = tmp_path_factory.mktemp("published")
        (folders[name] / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(hub, "at_hand", folders.get)


@pytest.fixture
def unaccounted(monkeypatch):
    """Noise multipliers and epsilons, which take seconds for each plan, are 1."""
    monkeypatch.setattr(accounting, "smallest_multiplier", lambda guarantee, target: 1.0)
    monkeypatch.setattr(guarantee, "stated", lambda *releases: 1.0)
    monkeypatch.setattr(confirmation, "poisson_epsilon", lambda *releases: 1.0)
    engine.cached_plan.cache_clear()
    monkeypatch.setattr(module, "_costs", {})
    yield
    engine.cached_plan.cache_clear()


def dry_runs(path: Path) -> list[dict]:
    """Of a config, or of every point of a sweep."""
    if "\nmetric:" in path.read_text():
        return [*dry_run_sweep(load_sweep(path))["points"].values()]
    return [dry_run(registry.load(path))]


FILES = sorted(CONFIGS.rglob("*.yaml"))
# One of every kind. The others are "long", and sweeps, which trace every point, are "slow".
FAST = ("digits_cnn", "stackoverflow_oov_concatenation", "popri_biorxiv")


def mark(path: Path):
    slow = "\nmetric:" in path.read_text() and path.stem != "popri_table"
    return () if path.stem in FAST else pytest.mark.slow if slow else pytest.mark.long


EVERY = [pytest.param(path, marks=mark(path), id=path.stem) for path in FILES]


@pytest.mark.parametrize("path", EVERY)
def test_every_config_passes_a_dry_run(path, tmp_path, monkeypatch, published, unaccounted):
    read, alone = client_program.read, []

    def noted(jaxpr, rules, platform):
        alone.extend(each for name in ("cpu", "gpu") for each in read(jaxpr, rules, name).alone)
        return read(jaxpr, rules, platform)

    monkeypatch.setattr(client_program, "read", noted)
    monkeypatch.chdir(tmp_path)
    for record in dry_runs(path):
        # Everything is checked, whatever machine this is.
        assert record["clients"]["declared"], "data.clients says how many clients the source has"
        assert all(model["parameters"] for model in record["models"].values())
        # sentence-transformers is optional; without it its embedder's size is unknown.
        missing = [note for note in record["notes"] if "not available" in note]
        assert all("sentence-transformers" in note for note in missing)
    assert not list(tmp_path.iterdir())
    assert not alone, "clients of a config are computed side by side"


@pytest.mark.parametrize("path", EVERY)
def test_every_epsilon_that_a_config_states_is_of_two_accountants(path, monkeypatch, published):
    """Of several kinds of releases, too, to the steps of PLD's grid; none at all beyond 10^5."""
    monkeypatch.setattr(module, "_costs", {})
    real, costs = module.cost_of, []
    monkeypatch.setattr(module, "cost_of", lambda cost: (costs.append(cost), real(cost))[1])
    dry_runs(path)
    for cost in costs:
        if cost.private and cost.epsilon() < 1e5:
            assert "one accountant" not in cost.statement()
            second = cost.confirmed_epsilon()
            grid = float("inf") if cost.accountant == "rdp" else 1.002 if second < 600 else 1.02
            assert second * (1 - 1e-9) <= cost.epsilon() <= second * grid
    assert costs or path.stem == "docstrings_text"


def test_a_model_larger_than_memory_is_refused_before_anything_is_written(tmp_path, capsys):
    """TRUST 39: FreD is charged before the rounds, and must not be for a run that cannot be."""
    command = ["run", "quickstart", "--out", str(tmp_path / "run"), "--model.hidden", str(10**9)]
    assert cli.main(command) == 2
    assert "a model of 451,000,260,000 parameters would take" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
