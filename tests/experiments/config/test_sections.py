"""Configs: what is refused, and with which words."""

from pathlib import Path
from typing import Any

import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import registry
from jaxpfl.experiments.config import reader, sections, shipped
from jaxpfl.experiments.engine.build import build_algorithm, build_model
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.federated import APFL, Ditto, Proximal, per_step
from jaxpfl.models import MLP, CIFGLanguageModel, emnist_cnn
from tests.plans import flat_without_privacy
from tests.refusals import refusal

TEXT = """\
data: {source: "docstrings:scipy", public: "docstrings:numpy"}
model: {name: cifg_lm, vocab_size: 100}
privacy: {epsilon: 8, delta: 1e-5}
training: {rounds: 3, clients_per_round: 10}
evaluation: {every: 0}
"""


def _load(tmp_path: Path, text: str = TEXT, *overrides: str) -> Config:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    return registry.load(path, overrides)


def _refused(tmp_path: Path, text: str, *overrides: str) -> str:
    return refusal(lambda: _load(tmp_path, text, *overrides), "")


def test_a_config_is_read_with_its_defaults_and_exponents_are_numbers(tmp_path):
    config = _load(tmp_path)
    assert config.privacy.delta == 1e-5
    assert isinstance(config.privacy.epsilon, float)
    assert isinstance(config.model, sections.LanguageModelConfig)
    assert config.training.server.name == "nesterov"


def test_the_resolved_config_reads_back_as_itself(tmp_path):
    given = ["--privacy.adaptive", "True", "--training.chunk", "4", "--training.rounds", "7"]
    config = _load(tmp_path, TEXT, *given, "--training.client.learning-rate", "0.25")
    assert (config.training.rounds, config.training.client.learning_rate) == (7, 0.25)
    path = tmp_path / "resolved.yaml"
    path.write_text(reader.to_yaml(config))
    assert registry.load(path) == config


@pytest.mark.parametrize(
    ("old", "new", "nearest"),
    [
        ("rounds: 3", "round: 3", "'training.rounds'"),
        ("epsilon: 8", "epsillon: 8", "'privacy.epsilon'"),
        ("training:", "trianing:", "'training'"),
        ("vocab_size: 100", "vocabsize: 100", "'model.vocab_size'"),
    ],
)
def test_a_misspelt_key_is_refused_with_file_and_nearest_name(tmp_path, old, new, nearest):
    """TRUST 10: unknown or misspelt key -> refused with the nearest valid name."""
    message = _refused(tmp_path, TEXT.replace(old, new))
    assert "experiment.yaml" in message and nearest in message


@pytest.mark.parametrize("bad", ["-1", "0", ".nan", ".inf", "-.inf", "'eight'", "true", "[8]"])
def test_a_bad_epsilon_is_refused_by_name(tmp_path, bad):
    """TRUST 9: negative, zero, NaN, infinite or text."""
    message = _refused(tmp_path, TEXT.replace("epsilon: 8", f"epsilon: {bad}"))
    assert "privacy.epsilon" in message and "experiment.yaml" in message


@pytest.mark.parametrize(
    "privacy",
    [
        "{epsilon: 8, noise_multiplier: 1, delta: 1e-5}",
        "{delta: 1e-5}",
        "{epsilon: 8}",
        "{private: false, epsilon: 8, delta: 1e-5}",
        "{epsilon: 8, noise_multiplier: 0, delta: 1e-5}",
    ],
)
def test_contradicting_privacy_settings_are_refused(tmp_path, privacy):
    """TRUST 11: exactly one of epsilon, noise multiplier, or an explicit private: false."""
    text = TEXT.replace("{epsilon: 8, delta: 1e-5}", privacy)
    assert "privacy" in _refused(tmp_path, text)


def test_private_evaluation_data_is_refused_until_declared_public(tmp_path):
    """TRUST 31: a metric on private validation data -> refused unless declared public."""
    text = TEXT.replace("evaluation: {every: 0}", "evaluation: {every: 5}")
    assert "declared_public" in _refused(tmp_path, text)
    declared = text.replace("every: 5", "every: 5, declared_public: true")
    assert _load(tmp_path, declared).evaluation.declared_public


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch SPOILED']",
        "data: !!python/name:os.system",
        "data: &a [x]\nmodel: *a",
        "data: {source: a}\ndata: {source: b}",
        "data: {source: a, source: b}",
        "[" * 1_500,
        "{a: " * 250_000,
        "data: 2020-13-45",
        'data: !!bool "x"',
        'data: !!timestamp "x"',
        "data: " + "9" * 5_000,
        "data: 0x" + "f" * 5_000,
        "data: -0x" + "f" * 300,
        'data: {source: "\\ud800"}',
        "data: {source: digits, remove: 'a{99999999999}'}",
        "data: [unclosed",
        "just text",
        "",
        "\x00",
        pytest.param(TEXT + "#" * 2_000_000, id="larger than a config may be"),
    ],
)
def test_hostile_yaml_is_refused_and_runs_nothing(tmp_path, monkeypatch, text):
    """TRUST 39: yaml.safe_load, no tags, no aliases, no duplicates."""
    monkeypatch.chdir(tmp_path)
    assert "experiment.yaml" in _refused(tmp_path, text)
    assert not (tmp_path / "SPOILED").exists()


def test_all_missing_settings_are_said_at_once():
    empty = {"privacy": {"epsilon": 1.0}}
    refusal(lambda: registry.from_mapping(empty, "empty.yaml"), "data model training")


def test_overrides_fill_in_what_the_file_lacks(tmp_path):
    """They are applied before anything is checked: required keys, names, the system itself."""
    given = [
        *("--data.source", "x.csv?label=y&features=a", "--model.name", "classifier_mlp"),
        *("--model.features", "1", "--model.classes", "2", "--privacy.epsilon", "8"),
        *("--privacy.delta", "1e-4", "--training.rounds", "5", "--evaluation.every", "0"),
    ]
    config = _load(tmp_path, "training: {clients_per_round: 3}", *given)
    assert (config.training.rounds, config.model.features, config.privacy.delta) == (5, 1, 1e-4)
    missing = _refused(tmp_path, "data: {source: x}", "--fred.candidates.two-words", "digits")
    assert "model" in missing and "training" in missing
    given = ["--fred.candidates.two-words", "digits", "--run.seed=3"]
    found = reader.parse_overrides(Config, given)
    assert found == {"fred.candidates.two-words": "digits", "run.seed": 3}
    assert "system must be one of" in _refused(tmp_path, TEXT, "--system", "nothere")
    assert "there is no" in _refused(tmp_path, TEXT, "--system=gan_inversion")


BAD = "\udcff"


@pytest.mark.parametrize("given", [["--data.remove", BAD], [f"--data.remove={BAD}"], [BAD]])
def test_an_argument_that_is_not_utf_8_is_refused_before_anything_runs(given):
    with pytest.raises(InputError, match="not valid UTF-8"):
        reader.parse_overrides(Config, given)


def test_an_algorithm_is_chosen_by_its_name_and_has_its_own_settings(tmp_path):
    name, mu = "--training.algorithm.name", "--training.algorithm.mu"
    proximal = _load(tmp_path, TEXT, name, "fed_prox", mu, "0.5")
    assert proximal.training.algorithm == sections.ProximalConfig("fed_prox", 0.5)
    for wrong in ([name, "fed_prox"], [name, "fed_nova", mu, "0.1"], [name, "fed_prox", mu, "0"]):
        assert "mu" in _refused(tmp_path, TEXT, *wrong)
    assert "ditto" in _refused(tmp_path, TEXT, name, "dito")
    assert "variate_clip" in _refused(tmp_path, TEXT, name, "scaffold")
    clip = "--training.algorithm.variate-clip"
    variates = _load(tmp_path, TEXT, name, "scaffold", clip, "2")
    assert variates.training.algorithm == sections.ScaffoldConfig("scaffold", 2.0)
    for kind, field, value in (
        ("scaffold", "variate-clip", "2"),
        ("ada_fed_prox", "rise-clip", "0.5"),
        ("fed_dyn", "alpha", "0.1"),
        ("fed_buff", "longest-delay", "3"),
    ):
        own = [name, kind, f"--training.algorithm.{field}", value]
        training = _load(tmp_path, TEXT, *own).training
        assert getattr(training.algorithm, field.replace("-", "_")) == float(value)
        plan = flat_without_privacy(population=99, clients_per_round=9, rounds=4, clip_norm=1.0)
        assert build_algorithm(MLP(4, 3), training, plan).name == kind
        assert "schedule" in _refused(tmp_path, TEXT, *own, "--training.schedule", "linear")
    schedule = ["--training.schedule", "linear"]
    refusal(lambda: registry.load(shipped.find("gan_inversion"), schedule), "not for a GAN")


@pytest.mark.parametrize(
    ("settings", "penalty", "transform", "last"),
    [
        ({}, None, None, None),
        ({"algorithm": sections.ProximalConfig("fed_prox", 0.5)}, Proximal(0.5), None, None),
        ({"algorithm": sections.FedAvgConfig("fed_nova")}, None, per_step, None),
        ({"algorithm": sections.ProximalConfig("ditto", 0.5)}, None, None, None),
        ({"algorithm": sections.ApflConfig("apfl", 0.5)}, None, None, None),
        ({"schedule": "linear"}, None, None, 0.25),
        ({"schedule": "cosine"}, None, None, (1 - 0.5**0.5) / 2),
    ],
)
def test_clients_compute_what_the_config_says(settings, penalty, transform, last):
    """The factor of the last of four rounds is that of three quarters of the schedule."""
    training = sections.TrainingConfig(rounds=4, clients_per_round=10, **settings)
    plan = flat_without_privacy(population=100, clients_per_round=10, rounds=4, clip_norm=1.0)
    (query,) = build_algorithm(MLP(4, 3), training, plan).queries
    client: Any = query.client_fn
    assert (client.penalty, client.transform) == (penalty, transform)
    name = settings.get("algorithm", sections.FedAvgConfig()).name
    if name in ("ditto", "apfl"):
        own = (Ditto, "pull") if name == "ditto" else (APFL, "mix")
        assert (type(client), getattr(client, own[1])) == (own[0], 0.5)
    if last is None:
        assert client.scheduled(0, 4) == 0
    else:
        assert client.scheduled(0, 1).factor == 1
        assert client.scheduled(0, 4).factor == pytest.approx(last)


def test_the_kind_of_model_is_chosen_by_its_name(tmp_path):
    text = TEXT.replace(
        "{name: cifg_lm, vocab_size: 100}",
        "{name: emnist_cnn, image_shape: [28, 28, 1], classes: 62}",
    )
    model = _load(tmp_path, text).model
    assert model == emnist_cnn((28, 28, 1), 62)
    assert "model.name" in _refused(tmp_path, text.replace("emnist_cnn", "emnist"))
    assert "model.image_shape" in _refused(tmp_path, text.replace("[28, 28, 1]", "[28, 28]"))
    for wrong in ("cnn, hidden: 9", "cnn, hidden: 9, features: [[0, true]]"):
        assert "model.features" in _refused(tmp_path, text.replace("emnist_cnn", wrong))
    own = text.replace("emnist_cnn", "cnn, hidden: 9, features: [[4, true]]")
    assert _load(tmp_path, own).model.features == ((4, True),)
    assert "model.crop" in _refused(tmp_path, text.replace("emnist_cnn", "resnet18, crop: 29"))


def test_a_model_has_its_own_settings_and_those_that_follow_from_its_task_are_none(tmp_path):
    config = _load(tmp_path, TEXT, "--model.layers", "2")
    model = build_model(config.model, None)
    assert model == CIFGLanguageModel(100, layers=2, name="cifg_lm")
    for name in ("oov", "output_bias_prior"):
        assert f"model.{name}" in _refused(tmp_path, TEXT.replace("{name:", f"{{{name}: 1, name:"))
        assert name not in reader.to_mapping(config)["model"]
    text = TEXT.replace("cifg_lm", "character_lstm")
    assert "model.vocab_size" in _refused(tmp_path, text)


def test_a_language_model_needs_a_public_corpus(tmp_path):
    """TRUST 8: the vocabulary is declared public."""
    assert "data.public" in _refused(tmp_path, TEXT.replace(', public: "docstrings:numpy"', ""))
