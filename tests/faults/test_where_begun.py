"""Relative paths of a run mean the folder where it was begun, from wherever it is resumed."""

import shutil

import pytest

from jaxpfl.cli import main
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.privacy import Ledger
from tests.faults.runs import config_of, in_round

RELATIVE = ["--data.source", "clients.jsonl", "--data.public", "public.jsonl"]


@pytest.fixture
def project(tiny_config, tmp_path, monkeypatch):
    """A folder with data, a run that ended in round 3, and a ledger, all named relative to it."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.mkdir()
    for name in ("clients.jsonl", "public.jsonl"):
        shutil.copy(tiny_config.parent / name, folder)
    monkeypatch.chdir(folder)
    config: Config = config_of(tiny_config, [*RELATIVE, "--privacy.ledger", "shared.jsonl"])
    with in_round(3):
        carry_out.run(config, "run", progress=False)
    monkeypatch.chdir(elsewhere)
    return folder


def test_a_run_is_resumed_from_another_folder(project, monkeypatch):
    assert (project / "run/private/begun_in").read_text() == str(project)
    public = [path for path in (project / "run").iterdir() if path.is_file()]
    assert not any(str(project).encode() in path.read_bytes() for path in public)
    assert carry_out.resume("../project/run", progress=False).record["rounds"] == 7
    assert len(Ledger.read(project / "shared.jsonl")) == 7
    assert not list(project.parent.joinpath("elsewhere").iterdir())


def test_a_project_that_was_moved_is_resumed_in_it(project, monkeypatch, capsys):
    moved = project.rename(project.with_name("moved"))
    with pytest.raises(InputError) as caught:
        carry_out.resume(moved / "run", progress=False)
    # Where it was looked for, and where it was begun.
    assert str(project) in str(caught.value) and str(moved.with_name("elsewhere")) in str(
        caught.value
    )
    monkeypatch.chdir(moved)
    assert carry_out.resume("run", progress=False).record["rounds"] == 7


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "t.yaml"],
        ["sweep", "t.yaml"],
        ["audit", "t.yaml"],
        ["resume", "t"],
        ["export", "t", "u"],
        ["report", "t"],
        ["compare", "t", "u"],
        ["budget", "t.jsonl", "--delta", "1e-5"],
        ["convert", "t.csv?client=c", "u"],
        ["convert-model", "t.gguf", "u"],
        ["init", "t.csv"],
        ["synthesize", "t.csv", "--public", "t.csv", "--epsilon", "1"],
    ],
)
def test_a_relative_path_that_is_not_found_says_where(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert f"in {tmp_path}" in capsys.readouterr().err
