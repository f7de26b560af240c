"""The papers' experiments at full size: every config is valid, and runs on small files of TFF."""

from pathlib import Path

import pytest

from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.config import reader
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.models import count_parameters

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture
def fixtures(data_folder) -> Path:
    folder = data_folder.parent / "fixtures" / "tff"
    if not folder.is_dir():
        pytest.skip("the files written by TensorFlow Federated are not beside JAXPFL_DATA")
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_says_how_it_is_run(path):
    if "metric" in reader.read_mapping(path):
        configs = [point.config for point in load_sweep(path).points]
    else:
        configs = [registry.load(path)]
    for config in configs:
        assert registry.from_mapping(reader.to_mapping(config), "again") == config
    head = path.read_text().split("\n\n")[0]
    for word in ("Command:", "Expected:"):
        assert word in head, f"{path.name} does not say {word}"


@pytest.mark.long
@pytest.mark.parametrize("by", ["user", "example"])
def test_the_image_study_runs_on_federated_emnist(by, fixtures, tmp_path, monkeypatch):
    """One round of each GAN, on two writers; at the paper's width nothing but time would differ."""
    monkeypatch.setenv("JAXPFL_TFF", str(fixtures))
    config = registry.load(
        ROOT / "configs" / "papers" / f"gan_by_{by}.yaml",
        [
            "--data.source", "$JAXPFL_TFF/tff_emnist_synthetic.sqlite?dataset=emnist_36",
            "--data.split.train", "0.5", "--data.split.public", "0.5", "--data.split-seed", "0",
            "--gan.model.width", "0.03125", "--gan.generator.steps", "1", "--images", "64",
            "--training.rounds", "1", "--training.clients-per-round", "1",
            "--training.batch-size", "4", "--training.max-examples", "8",
            "--classifier.epochs", "1", "--run.reproducible-noise", "True",
            # Of one client, a histogram at a sensible epsilon is all noise, and refused.
            "--selection.epsilon", "100",
            "--training.clients-per-bucket", "2",
        ],
    )  # fmt: skip
    outcome = carry_out.run(config, tmp_path / "study", progress=False)
    assert set(outcome.record["runs"]) == {"bug_low", "bug_high", "fixed_low", "fixed_high"}
    (scale,) = outcome.record["at_scale"]
    assert scale.startswith("everything, in a deployment of 2,000,000 clients with 100 times")
    assert (tmp_path / "study" / "pictures" / "gans.png").exists()


@pytest.mark.long
def test_the_text_study_runs_on_stack_overflow(fixtures, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPFL_TFF", str(fixtures))
    source = "$JAXPFL_TFF/tff_stackoverflow_synthetic.sqlite?dataset=stackoverflow"
    public = tmp_path / "public.txt"
    public.write_text("How do I sort a list of words by another list?")
    config = registry.load(
        ROOT / "configs" / "stackoverflow_oov_concatenation.yaml",
        [
            "--data.source", source, "--data.public", str(public),
            "--words.model.vocab-size", "8", "--words.model.hidden", "8",
            "--characters.model.hidden", "8", "--characters.model.layers", "1",
            *(f"--{kind}.training.{name}" if value is None else value
              for kind in ("words", "characters")
              for name, number in (("rounds", "1"), ("clients-per-round", "2"))
              for value in (None, number)),
            "--bug.probabilities", "[0.0, 1.0]",
            "--drawn.sentences", "64", "--drawn.words", "64", "--drawn.top", "3",
        ],
    )  # fmt: skip
    outcome = carry_out.run(config, tmp_path / "study", progress=False)
    worlds = outcome.record["worlds"]
    assert list(worlds) == ["bug_0_percent", "bug_100_percent"]
    assert all(world["composed_guarantee"]["epsilon"] > 0 for world in worlds.values())


def test_the_language_models_at_full_size_have_the_papers_parameters():
    import jax

    from jaxpfl.experiments.engine.build import build_model
    from jaxpfl.text.character.words import char_lm

    config = registry.load(ROOT / "configs" / "stackoverflow_oov_concatenation.yaml")
    key = jax.eval_shape(lambda: jax.random.key(0))
    sizes = {
        name: getattr(config.characters.model, name)
        for name in ("embedding", "hidden", "projection", "layers")
    }
    assert count_parameters(jax.eval_shape(char_lm(**sizes).init, key)) == 756_738
    words = build_model(config.words.model, None)
    # 1,422,250 and the four special tokens: a row of the embedding and a bias each.
    assert count_parameters(jax.eval_shape(words.init, key)) == 1_422_250 + 4 * 97
