"""The study of training bias, on tiny clients full of canaries."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data.corruptions import replace_texts
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.report.page import page_lines
from jaxpfl.experiments.sweep.results import value_of
from jaxpfl.experiments.systems.training_bias import study as training_bias
from jaxpfl.experiments.systems.training_bias.study import prepare
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from jaxpfl.text.metrics.prediction import log_densities
from tests.experiments import canaries
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.experiments.crashes import crashed_and_resumed
from tests.experiments.ledgers import assert_same_records, certified
from tests.experiments.statements import of_lines, of_page
from tests.refusals import refused_change

pytestmark = pytest.mark.long

STUDY = """\
system: training_bias
data: {{source: "{folder}/clients.jsonl", public: "{folder}/public.jsonl",
        vocabulary: "{folder}/words.jsonl", split: {{train: 1.0, valid: 0.0, test: 0.0}}}}
bias: {{source: "{folder}/planted.jsonl", shares: [0.0, 0.5]}}
rate_epsilon: 4.0
model: {{vocab_size: 44, embedding: 8, hidden: 8, projection: 8, sequence_length: 6}}
public_model: {{epochs: 60, batch_size: 16, learning_rate: 0.02, valid: 0.2, rare: 0.1}}
privacy: {{noise_multiplier: 0.7, delta: 1e-3, clip_norm: 0.5}}
training: {{rounds: 3, clients_per_round: 8, batch_size: 4, max_examples: 8, clients_per_bucket: 8}}
drawn: {{sentences: 100, top: 5, excess: 0.01}}
scaled_up: {{population: 1000000, factor: 100, delta: 1e-7}}
run: {{checkpoint_every: 2, reproducible_noise: true, devices: 2}}
"""
FILES = {
    "clients": (NEAR, 60, 4, "canarytext{}"),
    "public": (NEAR, 60, 4, "publicword{}"),
    "planted": (FAR, 30, 4, "plantedword{}"),
    "words": (NEAR + FAR, 60, 4, "listedword{}"),
}


@pytest.fixture(scope="module")
def config_path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bias")
    for name, given in FILES.items():
        write_lines(folder / f"{name}.jsonl", *given)
    path = folder / "bias.yaml"
    path.write_text(STUDY.format(folder=folder))
    return path


@pytest.fixture(scope="module")
def straight(config_path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "study"
    carry_out.run(registry.load(config_path), out, progress=False)
    return out


def record_of(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def test_the_count_and_the_filter_are_those_of_a_loop_over_sentences(config_path, straight):
    """The bias is seen by the private count: many more sentences are rare, and without it none."""
    study, record = prepare(registry.load(config_path)), record_of(straight)
    public = training_bias.stored_params(
        training_bias_artifacts(straight, config_path), "public_model", study.model, unreachable
    )
    held_out = log_densities(study.model, public, study.public[study.held_out])
    assert record["threshold"] == pytest.approx(np.quantile(held_out, 0.1), rel=1e-5)
    planted = study.planted.column("text").to_pylist()
    exact = {}
    for name, share in study.worlds.items():
        texts = replace_texts(study.clients, planted, share, study.config.run.seed)
        tokens = study.vocabulary.encode(texts, 6).columns["tokens"]
        exact[name] = np.mean(log_densities(study.model, public, tokens) < record["threshold"])
        world = record["worlds"][name]
        assert world["rare_share"] == pytest.approx(exact[name], abs=5 * world["rare_noise"])
        charges = Ledger.read(straight / "worlds" / name / "ledger.jsonl").charges
        (count,) = [charge for charge in charges if charge.label == f"rate_{name}"]
        assert guarantee_of([count], 1e-3).epsilon() == pytest.approx(4.0, rel=1e-3)
    assert exact["bias_50_percent"] > exact["bias_0_percent"] + 0.2


def training_bias_artifacts(out: Path, config_path: Path):
    from jaxpfl.experiments.systems.workspace import Workspace

    config = registry.load(config_path)
    return Workspace(config, out, system=registry.system_of("training_bias")).artifacts()


def unreachable():
    raise AssertionError("the public model is stored")


def test_each_world_has_its_model_and_count_on_one_ledger(straight, config_path):
    record = record_of(straight)
    for name, world in record["worlds"].items():
        ledger = Ledger.read(straight / "worlds" / name / "ledger.jsonl")
        assert len(ledger) == 4
        assert {charge.label for charge in ledger.charges} == {f"model_{name}", f"rate_{name}"}
        assert world["composed_guarantee"]["epsilon"] == pytest.approx(ledger.spent(1e-3))
    found = {name: value_of(record, name) for name in registry.load(config_path).metrics}
    for name in set(found) - {"epsilon"}:
        assert found[name] == {f"{w['share']:g}": w[name] for w in record["worlds"].values()}
    fitting = certified(straight).count("ledger.jsonl: fits")
    assert fitting == len(list(straight.rglob("ledger.jsonl")))


def test_every_number_says_what_it_is_of_and_no_canary_is_shown(straight, config_path):
    public = [f"{config_path.parent}/{name}.jsonl" for name in ("planted", "public")]
    shown = page_lines(training_bias.page(straight, record_of(straight)))
    assert of_lines(shown, public) == []
    for page in (straight / "report.html", *sorted((straight / "runs").glob("*/report.html"))):
        assert of_page(page.read_text(), public) == []
    canaries.assert_in_none(canaries.CLIENTS, canaries.public_files(straight))


def test_a_study_that_was_cut_off_ends_in_the_same_bits(config_path, straight, tmp_path):
    out = tmp_path / "study"
    crashed_and_resumed(registry.load(config_path), out, at=(2, 4, 5))
    assert_same_records(out, straight)


def test_a_row_is_nearer_to_the_source_whose_words_it_has():
    one, other = np.array([[1, 4, 4, 5]]), np.array([[1, 6, 6, 5]])
    rows = np.array([[1, 4, 2, -1], [1, 6, 4, 6], [1, 5, 2, -1], [1, 3, 2, -1]])
    assert training_bias.nearer(rows, one, other, 8).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shares: [0.0, 0.5] -> shares: [0.0, 1.5]", "bias.shares"),
        ("shares: [0.0, 0.5] -> shares: [0.1, 0.10000000001]", "bias.shares"),
        ("rate_epsilon: 4.0\n -> ", "rate_epsilon is required"),
        ("noise_multiplier: 0.7 -> epsilon: 5.0", "privacy.epsilon must be absent"),
        ("noise_multiplier: 0.7 -> ledger: x, noise_multiplier: 0.7", "privacy.ledger"),
        ('public: "{folder}/public.jsonl", -> ', "data.public must name"),
    ],
)
def test_a_bad_study_is_refused_with_the_place(config_path, tmp_path, change, words):
    refused_change(config_path, tmp_path, change, words)
