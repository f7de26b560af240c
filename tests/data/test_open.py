"""Sources: their grammar, and errors that say what was meant."""

import re

import pytest

from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError

LINES = '{"client": "a", "text": "x"}\n{"client": "a", "text": "y"}\n{"client": "b", "text": "z"}\n'


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "messages.jsonl"
    file.write_text(LINES)
    return file


def test_path_as_string_or_path(path):
    assert len(open_population(path)) == len(open_population(str(path))) == 2


def test_population_is_its_own_source(path):
    population = open_population(path)
    assert open_population(population) is population


def test_options_follow_a_question_mark(path):
    assert sorted(open_population(f"{path}?min_examples=2").sizes()) == [0, 2]
    swapped = open_population(f"{path}?client=text&text=client")
    assert swapped.client_ids.to_pylist() == ["x", "y", "z"]


def test_environment_variable_is_expanded_and_not_shown(path, monkeypatch):
    monkeypatch.setenv("SOME_FOLDER", str(path.parent))
    for name in ("$SOME_FOLDER/messages.jsonl", "${SOME_FOLDER}/messages.jsonl"):
        population = open_population(name)
        assert population.name == name
        assert str(path.parent) not in repr(population)
    monkeypatch.delenv("SOME_FOLDER")
    with pytest.raises(InputError, match="environment variable SOME_FOLDER is not set"):
        open_population("$SOME_FOLDER/messages.jsonl")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("docstring:jax", "did you mean 'docstrings'?"),
        ("docstrings:scipi", "no package 'scipi' in the snapshot (did you mean 'scipy'?)"),
        ("docstrings:scikit-learn", "did you mean 'sklearn'?"),
        ("docstrings:jax.numpy", "expected names of packages"),
        ("docstrings:optax,optax", "named twice"),
        ("digits?client=3", "no option 'client' (did you mean 'clients'?)"),
        ("digits?clients=many", "clients must be a number, found 'many'"),
        ("digits?clients=2000", "at most 1797"),
        ("digits?alpha=nan", "alpha must be a finite number"),
        ("digits?seed=1&seed=2", "given twice"),
        ("digits?seed", "NAME=VALUE"),
        ("nowhere.jsonl", "there is no such file"),
        ("nowhere.tab", "unknown source"),
        ("", "must be a path or a string"),
    ],
)
def test_bad_source_is_refused_with_the_nearest_name(source, expected):
    """TRUST 10: unknown or misspelt names."""
    with pytest.raises(InputError, match=re.escape(expected)):
        open_population(source)


def test_other_files_and_folders_are_refused(tmp_path):
    (tmp_path / "table.tab").write_text("a,b\n")
    with pytest.raises(InputError, match=r"ending in \.jsonl"):
        open_population(tmp_path / "table.tab")
    with pytest.raises(InputError, match="a folder without a manifest"):
        open_population(tmp_path)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("min_examples=0", "at least 1"),
        ("min_example=2", "did you mean 'min_examples'?"),
        ("split=sentence", "split must be one of 'paragraphs', 'sentences', 'lines'"),
        ("columns=year", "field 'year'"),
    ],
)
def test_bad_option_of_a_file_is_refused(path, option, expected):
    """TRUST 10."""
    with pytest.raises(InputError, match=re.escape(expected)):
        open_population(f"{path}?{option}")
