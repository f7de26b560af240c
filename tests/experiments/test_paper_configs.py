"""The papers' experiments at full size: every config is valid, and runs on small files of TFF."""

from pathlib import Path

import pytest

from jaxpfl.experiments import registry
from jaxpfl.experiments.config import reader
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.models import count_parameters

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


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
