"""Sources: their grammar, and errors that say what was meant."""

import re

import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.open import divided_into
from jaxpfl.errors import InputError
from tests.data.hub import stand_in
from tests.data.test_hugging_face import REVISION, ROWS, SOURCE
from tests.refusals import refusal

LINES = '{"client": "a", "text": "x"}\n{"client": "a", "text": "y"}\n{"client": "b", "text": "z"}\n'


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "messages.jsonl"
    file.write_text(LINES)
    return file


def test_a_source_is_a_path_with_options_or_a_population(path):
    population = open_population(path)
    assert open_population(population) is population
    assert len(population) == len(open_population(str(path))) == 2
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
        ("PATH?min_examples=0", "at least 1"),
        ("PATH?min_example=2", "did you mean 'min_examples'?"),
        ("PATH?split=sentence", "split must be one of 'paragraphs', 'sentences', 'lines'"),
        ("PATH?columns=year", "field 'year'"),
        ("PATH?client=*&partition=dirichlet", "partition needs the option 'clients'"),
        ("PATH?client=*&partition=zipf&clients=3", "partition must be one of 'iid'"),
        ("PATH?client=*&partition=iid&clients=few", "clients must be a number"),
        ("PATH?client=*&partition=iid&clients=3&alpha=1", "no option 'alpha'"),
        ("PATH?client=*&partition=iid&clients=0", "clients must be at least 1"),
        ("PATH?client=*&partition=dirichlet&clients=3&by=stars", "a column 'stars'"),
        ("huggingface:owner/abstracts", "revision must be a commit"),
        ("huggingface:owner/abstracts?revision=main", "40 hexadecimal digits, found 'main'"),
        (f"huggingface:abstracts?revision={REVISION}", "OWNER/NAME on the hub, found 'abstracts'"),
        (f"huggingface:../etc/x?revision={REVISION}", "OWNER/NAME on the hub"),
        (f"{SOURCE}&text=body", "no field 'body', found 'abstract', 'journal', 'year'"),
        (f"{SOURCE}&text=abstract&split=words", "found 'words'"),
        (f"{SOURCE}&text=abstract&clients=year", "did you mean 'client'"),
        ("huggingfaces:owner/abstracts", "did you mean 'huggingface'"),
    ],
)
def test_bad_source_is_refused_with_the_nearest_name(source, expected, path, monkeypatch):
    """TRUST 10: unknown or misspelt names; a field alone is missed once the rows are there."""
    hub = stand_in(monkeypatch, ROWS)
    with pytest.raises(InputError, match=re.escape(expected)):
        open_population(source.replace("PATH", str(path)))
    assert not hub.asked or "text=body" in source


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("docstrings:jax", "sentences"),
        ("a.txt", "paragraphs"),
        ("a.tar.xz?split=lines", "lines"),
        ("$NOWHERE/a.jsonl?client=x", "whole texts"),
        ("a.csv?client=*&split=sentences", "sentences"),
        (f"{SOURCE}&split=paragraphs", "paragraphs"),
        ("a.sqlite?dataset=shakespeare&split=test", ""),
        ("digits", ""),
    ],
)
def test_what_an_example_is_follows_from_the_options(source, expected):
    """No file is read."""
    assert divided_into(source) == expected


def test_other_files_and_folders_are_refused(tmp_path):
    (tmp_path / "table.tab").write_text("a,b\n")
    refusal(lambda: open_population(tmp_path / "table.tab"), "ending in .jsonl")
    refusal(lambda: open_population(tmp_path), "a folder without a manifest")
