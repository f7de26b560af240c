"""Configs that come with jaxpfl are found by name, and none is taken for a file of the user's."""

from pathlib import Path

import jax
import pytest

from jaxpfl.cli import main
from jaxpfl.experiments import registry
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.config.reader import read_mapping, to_mapping
from jaxpfl.experiments.engine.build import build_model
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.models import count_parameters
from jaxpfl.text.character.words import char_lm
from tests.refusals import refusal

FILES = sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_config_is_found_by_its_name_from_any_folder():
    found = [shipped.find(name) for name in shipped.names()]
    assert sorted(found) == FILES
    assert registry.load(shipped.find("quickstart")) is not None


def test_a_file_is_taken_as_it_is_and_a_name_that_is_also_one_is_refused(tmp_path: Path):
    path = tmp_path / "configs" / "quickstart.yaml"
    path.parent.mkdir()
    path.write_text("x: 1")
    assert shipped.find("configs/quickstart.yaml").samefile(path)
    assert shipped.find(path) == path
    (tmp_path / "quickstart.yaml").write_text("x: 1")
    refusal(lambda: shipped.find("quickstart"), "quickstart.yaml is a file here")
    assert shipped.find("quickstart.yaml") == Path("quickstart.yaml")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("configs/quickstart.yaml", "named quickstart,"),
        ("quickstart.yaml", "named quickstart,"),
        ("absent.yaml", "jaxpfl configs"),
        ("quikstart", "did you mean 'quickstart'"),
        ("mine", "name mine.yaml"),
        ("zzzzzzzzzzz", "jaxpfl configs"),
        ("", "neither a file"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_write(tmp_path: Path, given, expected):
    (tmp_path / "mine.yaml").write_text("x: 1")
    refusal(lambda: shipped.find(given), expected)


def test_what_a_config_says_of_itself_is_true():
    for name in shipped.names():
        about = shipped.about(name)
        sweeps = "base" in read_mapping(shipped.find(name))
        assert about.command == ("sweep" if sweeps else "run"), name
        assert about.sentence.endswith((".", "?")), name
    assert shipped.about("quickstart").needs == ()
    assert shipped.about("irc_word_lm").needs == ("JAXPFL_DATA",)
    # A sweep needs what its base needs.
    assert shipped.about("popri_table").needs == ("JAXPFL_DATA",)


def test_the_command_lists_them_and_prints_one(capsys: pytest.CaptureFixture[str]):
    assert main(["configs"]) == 0
    printed = capsys.readouterr().out
    for name in shipped.names():
        assert f"jaxpfl {shipped.about(name).command} {name}" in printed
    assert main(["configs", "quickstart"]) == 0
    assert capsys.readouterr().out == shipped.find("quickstart").read_text("utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_is_valid_and_says_how_it_is_run(path):
    if "metric" in read_mapping(path):
        configs = [point.config for point in load_sweep(path).points]
    else:
        configs = [registry.load(path)]
    for config in configs:
        assert registry.from_mapping(to_mapping(config), "again") == config
    head = path.read_text().split("\n\n")[0]
    for word in ("Command:", "Expected:"):
        assert word in head, f"{path.name} does not say {word}"


def test_the_language_models_at_full_size_have_the_papers_parameters():
    config = registry.load(shipped.find("stackoverflow_oov_concatenation"))
    key = jax.eval_shape(lambda: jax.random.key(0))
    named = ("embedding", "hidden", "projection", "layers")
    sizes = {name: getattr(config.characters.model, name) for name in named}
    assert count_parameters(jax.eval_shape(char_lm(**sizes).init, key)) == 756_738
    words = build_model(config.words.model, None)
    # 1,422,250 and the four special tokens: a row of the embedding and a bias each.
    assert count_parameters(jax.eval_shape(words.init, key)) == 1_422_250 + 4 * 97
