"""Tables whose clients are computed from columns, against a plain dictionary."""

import json
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl.data
from jaxpfl.data import stream
from jaxpfl.data.folders import convert
from jaxpfl.data.population import Population
from jaxpfl.data.readers.plain_text import pieces
from jaxpfl.errors import CorruptFile, InputError
from tests.data import hub

ROWS = [
    {
        "url": f"https://site{n * n % 7}.org/{n}",
        "text": f"Text {n}. And more é.",
        "n": n,
        "x": n / 2,
    }
    for n in range(60)
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Shards of several forms and folders, and what tools leave beside them."""
    folder = tmp_path / "c4"
    (folder / "deeper").mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(ROWS[:25]), folder / "a.parquet", row_group_size=7)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS[25:40])
    (folder / "b.jsonl").write_text(lines)
    (folder / ".ipynb_checkpoints").mkdir()
    for copy in (".ipynb_checkpoints/b.jsonl", ".hidden.jsonl", "~$m.xlsx"):
        (folder / copy).write_text(lines)
    parquet.write_table(pa.Table.from_pylist(ROWS[40:]), folder / "deeper" / "c.parquet")
    return folder


def plainly(rows=ROWS) -> dict[str, list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[urlsplit(row["url"]).hostname].append(row)
    return found


def check(population: Population, expected: dict[str, list[dict]]) -> None:
    assert sorted(population.client_ids.to_pylist()) == sorted(expected)
    for index, client in enumerate(population.client_ids.to_pylist()):
        held = population.examples(index)
        assert held["text"].to_pylist() == [row["text"] for row in expected[client]]
        if "n" in held:
            np.testing.assert_array_equal(held["n"], [row["n"] for row in expected[client]])
            np.testing.assert_array_equal(held["x"], [row["x"] for row in expected[client]])


@pytest.mark.parametrize(("bits", "dealt_bytes"), [(8, 2**25), (1, 1_000), (20, 1_000)])
def test_rows_of_all_shards_are_grouped_by_domain(folder, tmp_path, monkeypatch, bits, dealt_bytes):
    """However much fits the memory, with the same fingerprint."""
    source = f"{folder}?client=url|domain&columns=n,x"
    population = jaxpfl.data.open(source)
    check(population, plainly())
    monkeypatch.setattr(stream, "_BITS", bits)
    monkeypatch.setattr(stream, "_DEALT_BYTES", dealt_bytes)
    convert(source, tmp_path / "stored", progress=False)
    stored = jaxpfl.data.open(tmp_path / "stored")
    assert stored.fingerprint == population.fingerprint
    manifest = json.loads((tmp_path / "stored" / "manifest.json").read_text())
    assert manifest["unit"] == 'all rows with one value of the domain of "url"'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c4", "stored"]


def test_a_domain_is_the_host_of_a_url(tmp_path):
    path = tmp_path / "x.jsonl"
    urls = ["https://www.Example.org:8080/a?b=c#d", "http://user:word@www.example.org", "ftp://b.c"]
    path.write_text("".join(json.dumps({"url": url, "text": "x"}) + "\n" for url in urls))
    found = jaxpfl.data.open(f"{path}?client=url|domain")
    assert sorted(found.client_ids.to_pylist()) == ["b.c", "www.example.org"]
    for bad in ("no url", "http://[", 7):
        path.write_text(json.dumps({"url": bad, "text": "x"}))
        with pytest.raises(InputError, match="row 1: field 'url' must be a URL with a host"):
            jaxpfl.data.open(f"{path}?client=url|domain")


def test_sentences_of_a_text_and_clients_without_any(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [("a", "One two. Three four."), ("b", " "), ("a", "Five six.")]
    path.write_text("".join(json.dumps({"who": w, "text": t, "n": 1}) + "\n" for w, t in rows))
    found = jaxpfl.data.open(f"{path}?client=who|value&split=sentences&columns=n")
    held = {
        client: found.examples(index)["text"].to_pylist()
        for index, client in enumerate(found.client_ids.to_pylist())
    }
    sentences = [part for _, text in rows for part in pieces([text], "sentences")]
    assert held == {"a": sentences, "b": []}
    assert len(sentences) == 3
    assert found.columns["n"].tolist() == [1, 1, 1]


def test_a_set_of_the_hub_is_streamed(monkeypatch):
    module = hub.stand_in(monkeypatch, {name: [row[name] for row in ROWS] for name in ROWS[0]})
    revision = "0" * 40
    source = f"huggingface:allenai/c4?revision={revision}&config=en&client=url|domain"
    population = jaxpfl.data.open(source)
    check(population, plainly())
    assert population.name == "huggingface:allenai/c4 [train]"
    options = {"split": "train", "revision": revision, "name": "en", "streaming": True}
    assert module.asked == [("allenai/c4", options)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("client=url|host", r"client must be FIELD, FIELD\|domain, FIELD\|value"),
        ("client=|domain", r"client must be FIELD, FIELD\|domain, FIELD\|value"),
        ("client=link|domain", r"a\.parquet: there is no field 'link', found 'url', 'text'"),
        ("client=text|domain", r"a\.parquet, row 1: field 'text' must be a URL with a host"),
        ("client=url|domain&text=n", r"row 1: field 'n' must be a string, found int"),
        ("client=url|domain&columns=text", "must be different"),
        ("text=text", "no field 'client'"),
        ("client=url|domain&colums=n", "did you mean 'columns'"),
    ],
)
def test_what_does_not_fit_is_one_sentence_without_a_value(folder, options, message):
    with pytest.raises(InputError, match=message) as caught:
        jaxpfl.data.open(f"{folder}?{options}")
    assert "site" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_shards_are_refused(folder, tmp_path):
    (folder / "d.jsonl").write_text('{"url": "https://x.org/"}\n')
    with pytest.raises(InputError, match=r"d\.jsonl, row 1: there is no field"):
        jaxpfl.data.open(f"{folder}?client=url|domain")
    (folder / "d.jsonl").unlink()
    whole = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFile, match=r"a\.parquet"):
        convert(f"{folder}?client=url|domain", tmp_path / "stored", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["c4"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="expected a folder of"):
        jaxpfl.data.open(f"{tmp_path}/empty?client=url|domain")
