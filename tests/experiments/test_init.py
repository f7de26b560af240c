"""`jaxpfl init`: what it guesses, what it refuses, and that its config runs."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from jaxpfl.cli import main
from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments.init import init
from jaxpfl.experiments.registry import from_mapping, load

SECRET = "canary7f3"
CLIENTS = 30


def texts(name="user_id", text="message"):
    return [
        {"id": k, name: f"{SECRET}{k % CLIENTS}", "when": "2020-01-01", text: f"{SECRET} is a word"}
        for k in range(90)
    ]


def numbers(name="patient", label="outcome"):
    draw = np.random.default_rng(0)
    return [
        {
            name: k % CLIENTS,
            "age": k % 70,
            "bmi": float(draw.normal()),
            "ill": k % 3 == 0,
            label: k % 4,
        }
        for k in range(90)
    ]


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(name, rows) -> str:
        if name.endswith(".csv"):
            lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
            (tmp_path / name).write_text("\n".join(lines))
        elif name.endswith(".parquet"):
            parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        elif name.endswith(".arrow"):
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(tmp_path / name, table.schema) as writer:
                writer.write_table(table)
        else:
            content = rows if name.endswith(".json") else None
            lines = "\n".join(map(json.dumps, rows))
            (tmp_path / name).write_text(json.dumps(content) if content else lines)
        return name

    return written


FORMS = ["own.csv", "own.json", "own.jsonl", "own.parquet", "own.arrow"]


@pytest.mark.parametrize("form", FORMS)
def test_texts_of_clients(write, form):
    config, said = init(write(form, texts()))
    assert SECRET not in config + "".join(said)
    assert f'source: "{form}?client=user_id&text=message"' in config
    assert f"clients: {CLIENTS}\n" in config
    assert said[0] == "client    'user_id': its name has the word 'user'"


@pytest.mark.parametrize("form", FORMS)
def test_labels_and_features(write, form):
    config, said = init(write(form, numbers()))
    assert f'source: "{form}?client=patient&label=outcome&features=age,bmi,ill"' in config
    assert "features: 3\n" in config and "classes: 4\n" in config
    assert said[2].startswith("features  'age', 'bmi', 'ill'")


def test_a_column_is_guessed_by_its_values_where_no_name_helps(write):
    config, said = init(write("own.jsonl", texts("who_wrote", "words")))
    assert "client=who_wrote&text=words" in config
    assert "its values repeat" in said[0] and "longest texts" in said[1]
    config, said = init(write("own.csv", numbers("x1", "x2")))
    assert "client=*&label=x2" in config and "each row is a client" in said[0]


def test_columns_can_be_given(write):
    rows = [{**text, **number} for text, number in zip(texts(), numbers(), strict=True)]
    file = write("own.jsonl", rows)
    assert "client=when&text=user_id" not in init(file)[0]
    config, said = init(file, client="patient", label="ill")
    assert "client=patient&label=ill&features=age,bmi,outcome" in config
    assert said[0].endswith("as given")
    with pytest.raises(InputError, match="no column 'colour', found 'id', 'user_id'"):
        init(file, client="colour")


def test_names_of_columns_survive_the_source(write):
    rows = [{"a user & co": row["user_id"], "my=text é": row["message"]} for row in texts()]
    config, _ = init(write("own.jsonl", rows))
    from jaxpfl.experiments.config.reader import _parse_yaml

    found = from_mapping(_parse_yaml(config, "x"), "x")
    assert len(open_population(found.data.source)) == CLIENTS


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"day": "a", "hour": "b"}] * 60, "found no column of texts, .* 'day' \\(text\\)"),
        (texts()[:19], "fewer than 20 clients"),
        ([{**row, "message": None} for row in texts()], "found no column of texts"),
        ([*texts(), {"user_id": "a"}], "row 91: field 'message' must be a string, found no such"),
    ],
)
def test_what_cannot_be_guessed_is_said(write, rows, expected):
    file = write("own.jsonl", rows)
    with pytest.raises(InputError, match=expected) as error:
        init(file, client="user_id" if "user_id" in rows[0] else None)
    assert SECRET not in str(error.value)


def test_a_file_that_is_there_is_kept(write, tmp_path, capsys):
    file = write("own.csv", texts())
    (tmp_path / "own.yaml").write_text("mine")
    assert main(["init", file]) == 2
    assert "own.yaml exists already" in capsys.readouterr().err
    assert (tmp_path / "own.yaml").read_text() == "mine"
    assert main(["init", "nowhere.csv"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "own.yaml"), "--out", "x.yaml"]) == 2
    assert "expected a table" in capsys.readouterr().err


def test_its_config_loads_and_says_what_was_written(write, capsys):
    assert main(["init", write("own.csv", texts()), "--out", "mine.yaml", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"] == "mine.yaml" and SECRET not in json.dumps(record)
    config = load("mine.yaml")
    assert config.privacy.private and config.data.split.test == 0.1
    assert 0 < config.privacy.delta < 1 / CLIENTS


@pytest.mark.parametrize(
    "rows",
    [pytest.param(texts(), marks=pytest.mark.long), pytest.param(numbers())],
    ids=["texts", "numbers"],
)
def test_its_config_passes_a_dry_run(write, rows, capsys):
    assert main(["init", write("own.csv", rows)]) == 0
    assert main(["run", "own.yaml", "--dry-run"]) == 0
    assert "epsilon = 8" in capsys.readouterr().out


@pytest.mark.long
def test_its_config_runs(write, capsys):
    """Privately, in two rounds."""
    assert main(["init", write("own.csv", numbers())]) == 0
    few = ["--training.rounds", "2", "--evaluation.every", "2", "--run.devices", "2"]
    assert main(["run", "own.yaml", "--out", "run", *few, "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "epsilon = 8" in json.dumps(record)
