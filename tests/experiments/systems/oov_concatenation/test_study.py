"""The study of joined words, on tiny clients full of canaries."""

import html
import json
import stat
from pathlib import Path

import pytest

import jaxpfl as jp
from jaxpfl.data.columns import WORD_SEPARATOR
from jaxpfl.data.corruptions import concatenate_first_words
from jaxpfl.errors import BudgetExhausted
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.config.sections import ScaledUpConfig
from jaxpfl.experiments.export import export
from jaxpfl.experiments.report.page import page_lines
from jaxpfl.experiments.sweep.results import value_of
from jaxpfl.experiments.systems.oov_concatenation import study as oov_concatenation
from jaxpfl.experiments.systems.workspace import at_scale
from jaxpfl.privacy import Plan
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from tests.experiments import canaries
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.experiments.crashes import crashed_and_resumed
from tests.experiments.ledgers import assert_same_records, certified
from tests.experiments.statements import of_lines, of_page
from tests.plans import flat_plan
from tests.refusals import refusal, refused_change

# Two models of several networks each, or four, are many programs to compile.
pytestmark = pytest.mark.long

STUDY = """\
system: oov_concatenation
data: {{source: "{folder}/clients.jsonl", public: "{folder}/public.jsonl",
        split: {{train: 1.0, valid: 0.0, test: 0.0}}}}
words:
  rate_epsilon: 4.0
  model: {{vocab_size: 24, embedding: 8, hidden: 8, projection: 8, sequence_length: 6}}
  privacy: {{noise_multiplier: 0.7, delta: 1e-3, clip_norm: 0.5, budget_epsilon: 20.0}}
  training: {{rounds: 3, clients_per_round: 8, batch_size: 4, max_examples: 8,
             clients_per_bucket: 8}}
characters:
  model: {{embedding: 8, hidden: 8, projection: 8, layers: 2, max_bytes: 6}}
  privacy: {{noise_multiplier: 0.7, delta: 1e-3, clip_norm: 0.5, budget_epsilon: 20.0}}
  training: {{rounds: 3, clients_per_round: 8, batch_size: 4, max_examples: 8,
             clients_per_bucket: 8}}
  prefinetune_epochs: 1
bug: {{probabilities: [0.0, 1.0]}}
drawn: {{sentences: 100, words: 200, top: 5}}
scaled_up: {{population: 1000000, factor: 100, delta: 1e-7}}
run: {{checkpoint_every: 2, reproducible_noise: true, devices: 2}}
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("oov")
    # Half of the clients' words are out of the public vocabulary.
    write_lines(folder / "clients.jsonl", NEAR + FAR, 60, 3, "canarytext{}")
    write_lines(folder / "public.jsonl", NEAR, 30, 4, "publicword{}")
    path = folder / "oov.yaml"
    path.write_text(STUDY.format(folder=folder))
    return path


@pytest.fixture(scope="module")
def straight(config_path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "study"
    carry_out.run(registry.load(config_path), out, progress=False)
    return out


def study_plan(config_path) -> Plan:
    return oov_concatenation.prepare(registry.load(config_path)).plans["words"]


def test_each_world_has_its_two_models_on_one_ledger(straight, config_path):
    """TRUST 29: forgetting one of the two would show."""
    record = json.loads((straight / "result.json").read_text())
    assert list(record["worlds"]) == ["bug_0_percent", "bug_100_percent"]
    charges = []
    for name, world in record["worlds"].items():
        ledger = Ledger.read(straight / "worlds" / name / "ledger.jsonl")
        # Three rounds of each model, and the count.
        assert len(ledger) == 7
        charges += ledger.charges
        labels = {charge.label for charge in ledger.charges}
        assert labels == {f"words_{name}", f"characters_{name}", f"rate_{name}"}
        assert world["composed_guarantee"]["epsilon"] == pytest.approx(ledger.spent(1e-3))
        for kind, statement in world["privacy"].items():
            assert "with everything else on its ledger" in statement
            result = json.loads((straight / "runs" / f"{kind}_{name}" / "result.json").read_text())
            assert result["privacy"] == statement
        assert len(world["oov_by_position"]) == 6 and len(world["top_words"]) <= 5
        plans = oov_concatenation.prepare(registry.load(config_path)).plans.values()
        costs = [plan.epsilon() for plan in plans]
        # More than one of them costs, less than all costs added.
        assert max(costs) < world["composed_guarantee"]["epsilon"] < sum(costs)
        log_p = [each["log_probability"] for each in world["top_words"]]
        assert log_p == sorted(log_p, reverse=True)
    # Each run has a secret of its own, which everything it draws follows from.
    assert len({charge.run for charge in charges}) == 6
    assert len({charge.identity for charge in charges}) == len(charges) == 14
    assert not list(straight.rglob("*secret*"))
    # Both worlds' models come from the same clients, and the page shows both.
    one = record["worlds"]["bug_0_percent"]["composed_guarantee"]["epsilon"]
    assert record["metrics"]["epsilon"] > 1.1 * one
    page = html.unescape((straight / "report.html").read_text())
    assert record["privacy"] in page and "certificate.json" in page
    fitting = certified(straight).count("ledger.jsonl: fits")
    assert fitting == len(list(straight.rglob("ledger.jsonl")))


def test_its_scores_can_be_swept(straight, config_path):
    """The rate of unknown words against the share of the bug."""
    record = json.loads((straight / "result.json").read_text())
    found = {name: value_of(record, name) for name in registry.load(config_path).metrics}
    worlds = record["worlds"]
    assert found == {
        "epsilon": record["metrics"]["epsilon"],
        **{
            name: {"0": worlds["bug_0_percent"][name], "1": worlds["bug_100_percent"][name]}
            for name in ("oov_overall", "oov_generated")
        },
    }


def test_the_rate_of_the_clients_own_words_is_a_private_count(config_path, straight):
    """Table 6: it is that of a loop over their sentences, up to the noise that it states."""
    study = oov_concatenation.prepare(registry.load(config_path))
    for name, share in study.worlds.items():
        clients = concatenate_first_words(study.clients, share, study.config.run.seed)
        unknown = total = 0
        for sentence in clients.columns["words"].to_pylist():
            # As long as a row of the model, whose last id may be the end.
            words = sentence.split(WORD_SEPARATOR)[: study.config.words.model.sequence_length]
            total += len(words)
            unknown += sum(word not in study.vocabulary for word in words)
        world = json.loads((straight / "result.json").read_text())["worlds"][name]
        assert world["oov_overall"] == pytest.approx(unknown / total, abs=5 * world["oov_noise"])
        charges = Ledger.read(straight / "worlds" / name / "ledger.jsonl").charges
        (count,) = [charge for charge in charges if charge.label == f"rate_{name}"]
        assert guarantee_of([count], 1e-3).epsilon() == pytest.approx(4.0, rel=1e-3)


def test_every_number_says_what_it_is_of(straight, config_path):
    record = json.loads((straight / "result.json").read_text())
    vocabulary = f"{config_path.parent}/public.jsonl"
    shown = page_lines(oov_concatenation.page(straight, record))
    assert of_lines(shown, [vocabulary]) == []
    assert len(of_lines([line.replace(vocabulary, "") for line in shown], [vocabulary])) >= 2
    for page in (straight / "report.html", *sorted((straight / "runs").glob("*/report.html"))):
        assert of_page(page.read_text(), [vocabulary]) == []


def test_a_study_that_was_cut_off_ends_in_the_same_bits(config_path, straight, tmp_path):
    """Ends before an artifact or a checkpoint has its name, three times, and goes on from there."""
    out = tmp_path / "study"
    crashed_and_resumed(registry.load(config_path), out, at=(2, 4, 5))
    assert_same_records(out, straight)


def test_no_canary_outside_private_folders(straight):
    """TRUST 40."""
    canaries.assert_in_none(canaries.CLIENTS, canaries.public_files(straight))
    for folder in straight.rglob("private"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_world_stops_at_its_budget_before_data_is_touched(config_path, tmp_path):
    """TRUST 30."""
    limit = 1.05 * study_plan(config_path).epsilon()
    fields = [f"--{kind}.privacy.budget-epsilon={limit:g}" for kind in ("words", "characters")]
    config = registry.load(config_path, fields)
    with pytest.raises(BudgetExhausted, match="characters_bug_0_percent"):
        carry_out.run(config, tmp_path / "study", progress=False)
    ledger = Ledger.read(tmp_path / "study" / "worlds" / "bug_0_percent" / "ledger.jsonl")
    assert ledger.spent(1e-3) <= limit


def test_the_same_noise_of_the_mean_on_more_clients():
    settings = dict(rounds=100, clip_norm=0.1)
    few = dict(population=1_000, clients_per_round=10, noise_multiplier=0.01, delta=1e-4)
    many = dict(population=2_000_000, clients_per_round=1_000, noise_multiplier=1.0, delta=1e-8)
    plan = flat_plan(**settings, **few)
    larger = ScaledUpConfig(factor=100, population=2_000_000, delta=1e-8)
    ((name, found),) = at_scale("a study", larger, [plan]).items()
    assert name.startswith("a study, in a deployment of 2,000,000 clients with 100 times")
    assert found.epsilon() == flat_plan(**settings, **many).epsilon()
    assert at_scale("a study", larger, [plan], [0.05, 0.05])[name].epsilon() > found.epsilon()
    smaller = ScaledUpConfig(factor=100, population=999, delta=1e-4)
    words = "the 1000 clients of the run and the 1000 a round"
    refusal(lambda: at_scale("a study", smaller, [plan]), words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("probabilities: [0.0, 1.0] -> probabilities: [0.0, 1.5]", "bug.probabilities"),
        ("probabilities: [0.0, 1.0] -> probabilities: [0.1, 0.10000000001]", "bug.probabilities"),
        ("prefinetune_epochs: 1 -> prefinetune_epochs: -1", "prefinetune_epochs"),
        ("{folder}/public.jsonl -> split:public", "data.public must name a public corpus"),
        ("noise_multiplier: 0.7 -> ledger: x, noise_multiplier: 0.7", "privacy.ledger"),
        ("  rate_epsilon: 4.0\n -> ", "words.rate_epsilon is required"),
        ("noise_multiplier: 0.7 -> epsilon: 5.0", "privacy.epsilon must be absent"),
    ],
)
def test_a_bad_study_is_refused_with_the_place(config_path, tmp_path, change, words):
    refused_change(config_path, tmp_path, change, words)


def test_the_models_of_each_world_are_exported_and_words_predicted(straight, tmp_path):
    export(straight, tmp_path / "exported", progress=False)
    folders = sorted(path.parent for path in (tmp_path / "exported").glob("*/config.json"))
    assert len(folders) == 2 * len(json.loads((straight / "result.json").read_text())["worlds"])
    words = next(folder for folder in folders if folder.name.startswith("words"))
    model = jp.load(words)
    assert len(model.predict([model.words.tokens[-1]])) == 1
