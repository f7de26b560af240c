"""Small forms of all configs are valid, and what differs between two records of them is found."""

import copy
from pathlib import Path

import pytest

from jaxpfl.experiments import registry
from jaxpfl.experiments.config import reader
from jaxpfl.experiments.sweep.config import load_sweep
from tools import small_runs

CONFIGS = small_runs.configs_of(small_runs.ROOT)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_a_small_form(path: Path, tmp_path: Path):
    small = small_runs.small_form(path, tmp_path)
    if "metric" in reader.read_mapping(small):
        assert 1 <= len(load_sweep(small).points) <= 10
    else:
        registry.load(small)
    assert "$JAXPFL" not in small.read_text("utf-8")


RECORD = {
    "one": {
        "arrays": {"checkpoint:params.bias": "abc", "checkpoint:params.kernel": "def"},
        "rounds": {"out/metrics.jsonl": [{"round": 0}, {"round": 1, "evaluation": {"loss": 0.5}}]},
        "records": {"out/result.json": {"metrics.epsilon": 3.25, "privacy.0": 8.0}},
    }
}
RENAMED = {
    "one": {
        "arrays": {"model:bias": "abc", "model:kernel": "def", "more": "ghi"},
        "rounds": {"runs/metrics.jsonl": [{"round": 0}, {"round": 1, "validation": {"loss": 0.5}}]},
        "records": {"out/result.json": {"epsilon": 3.25, "statement.0": 8}},
    }
}


def test_equal_numbers_under_other_names_are_equal():
    assert small_runs.compare(RECORD, RENAMED) == {"one": []}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one["arrays"].update({"checkpoint:params.bias": "xyz"}), "params.bias"),
        (lambda one: one["arrays"].pop("checkpoint:params.kernel"), "params.kernel"),
        (lambda one: one["rounds"]["out/metrics.jsonl"].pop(), "2 rows are 1"),
        (lambda one: one["rounds"]["out/metrics.jsonl"][1].update(evaluation={}), "'loss': 0.5"),
        (lambda one: one["records"]["out/result.json"].update({"privacy.0": 7.5}), "privacy.0"),
        (lambda one: one.update(failed="out of memory"), "out of memory"),
    ],
)
def test_what_differs_and_what_was_not_run_is_named(change, words: str):
    after = copy.deepcopy(RECORD)
    change(after["one"])
    (fault,) = small_runs.compare(RECORD, after)["one"]
    assert words in fault
    assert "was not run" in small_runs.compare(RECORD, {})["one"][0]
