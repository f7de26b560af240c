"""`jaxpfl init`: what it writes, what it refuses, and that its config runs."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from jaxpfl.cli import main
from jaxpfl.data import open as open_population
from jaxpfl.experiments.own_table import init
from jaxpfl.experiments.registry import load
from tests.refusals import refusal

SECRET = "canary7f3"
CLIENTS = 30
DRAW = np.random.default_rng(0)
ROWS = [
    {
        "a user & co": f"{SECRET}{k % CLIENTS}", "my=text é": f"{SECRET} is a word",
        "age": k % 70, "bmi": float(DRAW.normal()), "outcome": k % 4,
    }
    for k in range(90)
]  # fmt: skip
TEXTS = {"client": "a user & co", "text": "my=text é"}
NUMBERS = {"client": "*", "label": "outcome", "features": "age,bmi"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(name, rows) -> str:
        if name.endswith(".csv"):
            lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
            (tmp_path / name).write_text("\n".join(lines))
        elif name.endswith(".parquet"):
            parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return name

    return written


@pytest.mark.parametrize("form", ["own.csv", "own.jsonl", "own.parquet"])
def test_its_config_is_of_the_table(write, form, capsys):
    options = [word for name, each in TEXTS.items() for word in (f"--{name}", each)]
    assert main(["init", write(form, ROWS), *options, "--out", "mine.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"config": "mine.yaml"}
    config = load("mine.yaml")
    assert len(open_population(config.data.source)) == config.data.clients == CLIENTS
    assert config.data.public == "split:public"
    assert vars(config.data.split) == {"train": 0.7, "valid": 0.1, "test": 0.1, "public": 0.1}
    assert config.privacy.private and 0 < config.privacy.delta <= 0.1 / CLIENTS
    with open("mine.yaml") as file:
        assert SECRET not in file.read()
    config = init(form, **NUMBERS)
    assert config == init(f"{form}?client=*&label=outcome&features=age,bmi")
    assert f'source: "{form}?client=*&label=outcome&features=age,bmi"' in config
    assert "clients: 90 " in config and "features: 2\n" in config and "classes: 4\n" in config


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        (ROWS, {}, "row 1: no field 'client'"),
        (ROWS[:19], TEXTS, "fewer than 20 clients"),
        (ROWS, {"client": "*", "label": "outcome"}, "a text, or a label and features"),
        ([*ROWS, {TEXTS["client"]: "a"}], TEXTS, "row 91: no field 'my=text"),
    ],
)
def test_what_does_not_fit_is_refused(write, rows, columns, words):
    path = write("own.jsonl", rows)
    assert SECRET not in refusal(lambda: init(path, **columns), words)


def test_a_file_that_is_there_is_kept(write, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("mine")
    assert main(["init", write("own.csv", ROWS)]) == 2
    assert "own.yaml exists already" in capsys.readouterr().err
    assert (tmp_path / "own.yaml").read_text() == "mine"


@pytest.mark.parametrize("columns", [pytest.param(TEXTS, marks=pytest.mark.long), NUMBERS])
def test_its_config_passes_a_dry_run(write, tmp_path, columns, capsys):
    (tmp_path / "own.yaml").write_text(init(write("own.csv", ROWS), **columns))
    assert main(["run", "own.yaml", "--dry-run"]) == 0
    assert "epsilon = 8" in capsys.readouterr().out
