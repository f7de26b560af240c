"""A conversion that was begun, and whose files were altered before it is gone on with."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl import cli
from jaxpfl.data import staging
from jaxpfl.data.staging import Staging
from jaxpfl.errors import CorruptFile

HELD = {"text": pa.array(["one é", "", "three"], pa.large_string()), "x": np.arange(3)}


@pytest.fixture
def begun(tmp_path):
    folder = tmp_path / ".out.partial" / "staging"
    folder.parent.mkdir()
    with Staging.opened(folder, {"source": "a"}) as found:
        found.append(HELD)
        found.commit()
    return folder


def go_on(folder) -> None:
    with Staging.opened(folder, {"source": "a"}) as found:
        found.append(HELD)
        found.commit()
        found.write(folder / "examples.arrow", list(found.columns), np.array([0, found.examples]))


def test_what_was_begun_is_gone_on_with(begun):
    go_on(begun)
    table = pa.ipc.open_file(begun / "examples.arrow").read_all()
    assert table["text"].to_pylist() == 2 * ["one é", "", "three"]


@pytest.mark.parametrize(
    "edges",
    [[0, 6, 5, 11], [1, 6, 6, 11], [0, 6, 6, 10], [0, 6, 6, 2**40], [-8, 6, 6, 11], [0, -3, 6, 11]],
    ids=str,
)
def test_staged_offsets_that_lead_astray_are_refused(begun, edges, monkeypatch):
    """TRUST 6, 39: Arrow would take texts from wherever they say."""
    monkeypatch.setattr(staging, "_PIECE", 16)
    (begun / "0.offsets").write_bytes(np.array(edges, np.int64).tobytes())
    with pytest.raises(CorruptFile, match=r"journal\.json: column 'text': .* its offsets say"):
        go_on(begun)


ALTERED = {
    "examples": -1,
    "size": -1,
    "bytes": [32, 10],
    "type": {"dtype": "text", "shape": [None]},
    "what": 3,
}


@pytest.mark.parametrize("field", ALTERED)
def test_a_journal_that_was_altered_is_refused(begun, field):
    path = begun / "journal.json"
    journal = json.loads(path.read_text())
    journal["columns"]["text"][field] = ALTERED[field]
    path.write_text(json.dumps(journal))
    with pytest.raises(CorruptFile, match=r"journal\.json: column 'text'"):
        go_on(begun)


def test_a_journal_without_columns_is_refused(begun):
    path = begun / "journal.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"columns": {}}))
    with pytest.raises(CorruptFile, match="there are examples, but no columns that hold them"):
        go_on(begun)


def test_after_the_refusal_the_same_command_begins_anew(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text('{"client": "a", "text": "one"}\n')
    out = tmp_path / "out"
    command = ["convert", f"{source}?client=client|value", str(out)]
    assert cli.main(command) == 0
    staged = tmp_path / ".out.partial" / "staging"
    shutil.rmtree(out)
    staged.mkdir(parents=True)
    (staged / "journal.json").write_text('{"request": {}, "examples": [], "columns": {}}')
    assert cli.main(command) == 2
    assert "journal.json" in capsys.readouterr().err
    assert cli.main(command) == 0
