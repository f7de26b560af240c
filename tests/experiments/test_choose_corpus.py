"""`jaxpfl fred`: the ranking, what it writes, what it costs, and what it refuses."""

import json
import re
import shutil
from functools import partial

import pyarrow.parquet as pq
import pytest

from jaxpfl.algorithms.fred import FredPlan, PrivateMoments
from jaxpfl.cli import main
from jaxpfl.data import Population
from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments import choose_corpus
from jaxpfl.experiments.choose_corpus import named, table
from jaxpfl.experiments.report import chosen
from jaxpfl.privacy import Ledger, verify
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import embed, embeddings_of
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.experiments.statements import of_lines
from tests.federated.two_processes import ended, free_address, start
from tests.refusals import refusal


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def sources(tmp_path):
    """The private clients, and two public corpora."""
    write_lines(tmp_path / "private.jsonl", NEAR, 60, 4, "canarytext{}")
    for name, words in (("far", FAR), ("near", NEAR)):
        write_lines(tmp_path / f"{name}.jsonl", words, 40, 4)
    private, *public = (str(tmp_path / f"{name}.jsonl") for name in ("private", "far", "near"))
    return private, public


def fred(capsys, private, public, out, *more, epsilon=50.0):
    """The record of a command that ends well."""
    given = ["--private", private, "--candidates", *public, "--epsilon", epsilon, "--delta", 1e-3]
    given += ["--embedder", "hashed:8", "--out", out, *more, "--json"]
    assert main(["fred", *map(str, given)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_the_nearest_corpus_is_first_and_its_cost_is_charged(
    tmp_path, capsys, sources, monkeypatch, unit
):
    """Only examples that are used are embedded.

    With the unit example there is no cap: without one example, another one would be let in.
    """
    private, public = sources
    out, embedded = tmp_path / "out", []

    def spy(population, function, **settings):
        embedded.append(population.sizes().tolist())
        return embed(population, function, **settings)

    monkeypatch.setattr(choose_corpus, "embed", spy)
    known = 60 if unit == "client" else None
    more = ["--population", known] if known else []
    record = fred(capsys, private, public, out, "--unit", unit, "--max-examples", 3, *more)
    assert (record["released_count"] == 60) == (known is not None)
    assert embedded == [[3 if unit == "client" else 4] * 60]
    assert record["plan"]["max_examples"] == 3
    assert record["private"]
    assert record["candidates"][0]["candidate"] == "near"
    assert f"unit = {unit}" in record["statement"]
    assert {path.name for path in out.iterdir()} == {
        "certificate.json", "fred.json", "fred.png", "moments.npz", "ledger.jsonl", "private",
    }  # fmt: skip
    found = verify.verified([out / "certificate.json"], [out / "ledger.jsonl"], None, False)
    assert f"{out / 'ledger.jsonl'}: fits" in list(found)
    assert (out / "private").stat().st_mode & 0o77 == 0
    assert record["statement"].endswith("if nothing else is released from these clients")
    best = record["best_mixture"]
    assert best["nearest"] == next(iter(best["shares"])) == "near"
    assert best["distance"] <= best["nearest_distance"]
    assert f"best mixture: {best['shares']['near']:.1%} near" in table(record)
    assert "All are tied" not in table(record)
    assert of_lines(table(record).splitlines(), [f"what the clients of {private} hold"]) == []
    assert json.loads((out / "fred.json").read_text()) == record
    ledger = Ledger.read(out / "ledger.jsonl")
    assert ledger.unit == unit
    assert ledger.spent(1e-3) == pytest.approx(50, rel=1e-3)
    plan = FredPlan.calibrated(epsilon=50, delta=1e-3, unit=unit, population=known, max_examples=3)
    assert PrivateMoments.load(out / "moments.npz", plan).moments.count == record["released_count"]


def test_what_was_embedded_once_is_found_by_its_content(tmp_path, capsys, sources, monkeypatch):
    """Public moments in the user's cache, private embeddings in the run's private/ alone."""
    (private, public), out = sources, tmp_path / "out"
    fred(capsys, private, public, out)
    assert len(list((tmp_path / "cache" / "jaxpfl" / "moments").iterdir())) == 2
    kept = [path for path in (out / "private").iterdir() if path.is_dir()]
    assert len(kept) == 1 and len(embeddings_of(Population.load(kept[0]))) == 60 * 4

    def never(population, *_, **__):
        raise InputError(f"{population.name} is embedded again")

    monkeypatch.setattr(choose_corpus, "embed", never)
    monkeypatch.setattr(choose_corpus, "public_moments", never)
    copied = shutil.copy(public[0], tmp_path / "copied.jsonl")
    fred(capsys, private, [public[1], copied], out)
    settings = {"plan": FredPlan.calibrated(epsilon=50, delta=1e-3), "embedder_name": "hashed:8"}
    files = {"out": out, "ledger": tmp_path / "ledger.jsonl"}
    again = partial(choose_corpus.choose_corpus, private, public[1:], **settings, **files)
    for changed in (private, public[1]):
        with open(changed, "a") as file:
            file.write('{"client": "canaryid1", "text": "one more"}\n')
        refusal(again, f"{changed} is embedded again")


def test_what_is_written_holds_nothing_of_the_clients(tmp_path, capsys):
    """TRUST 40: ids, texts and the true number of clients stay inside."""
    private, public, out = tmp_path / "private.jsonl", tmp_path / "public.jsonl", tmp_path / "out"
    write_lines(private, NEAR, 173, 4, "canarytext{}")
    write_lines(public, FAR, 40, 4)
    fred(capsys, private, [public], out, epsilon=0.5)
    written = [path for path in out.iterdir() if path.is_file()]
    assert {path.name for path in written} >= {"fred.json", "moments.npz", "ledger.jsonl"}
    for path in written:
        # In hashes, in fractions and in the folder's name any three digits occur by chance.
        content = path.read_bytes().replace(bytes(tmp_path), b"")
        content = re.sub(rb"[0-9a-f]{12,}|[0-9]+[.][0-9]+", b"", content)
        for secret in (b"canaryid", b"canarytext", b"173"):
            assert secret not in content or path.suffix in (".npz", ".png"), path


def test_candidates_have_names():
    assert named(["docstrings:numpy", "near=/a/b.jsonl?client=x", "/a/c.jsonl.gz?text=t"]) == {
        "numpy": "docstrings:numpy",
        "near": "/a/b.jsonl?client=x",
        "c": "/a/c.jsonl.gz?text=t",
    }
    assert named(["digits?clients=3"]) == {"digits": "digits?clients=3"}
    refusal(lambda: named(["/x/b.txt", "/y/b.txt"]), "'b'")


def test_a_file_that_is_one_text_is_refused_before_a_charge(tmp_path, sources):
    (tmp_path / "one.txt").write_text("one line\nand another\n")
    settings = {"plan": FredPlan.calibrated(epsilon=1, delta=1e-3), "out": tmp_path / "out"}
    call = partial(choose_corpus.choose_corpus, sources[0], [f"{tmp_path}/one.txt"], **settings)
    refusal(lambda: call(progress=False), "split=lines")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rule", ["words:7", "sentences", "messages"])
def test_clients_and_candidates_are_cut_alike(tmp_path, capsys, sources, monkeypatch, rule):
    """What is embedded on either side are pieces by one rule, which the table names."""
    private, public = sources[0], [f"{source}?client=client" for source in sources[1]]
    embedded = []

    def spy(make):
        def spied(population, *more, **settings):
            embedded.append(population.columns["text"].to_pylist())
            return make(population, *more, **settings)

        return spied

    for name in ("embed", "public_moments"):
        monkeypatch.setattr(choose_corpus, name, spy(getattr(choose_corpus, name)))
    record = fred(capsys, private, public, tmp_path / "out", "--cut", rule)
    assert record["cut"] == rule
    assert (f"cut alike, to {rule}" in table(record)) == (rule != "messages")
    cut = Cut.parse(rule)
    for source, texts in zip([*public, private], embedded, strict=True):
        assert texts == cut.population(open_population(source)).columns["text"].to_pylist()
    # A document is four lines of five words.
    assert len(embedded[0]) == 40 * (3 if rule == "words:7" else 4)


def test_texts_of_another_form_are_told_by_public_facts_alone(tmp_path, capsys, sources):
    (private, public), out = sources, tmp_path / "out"
    public[0] += "?split=sentences"
    record = fred(capsys, private, public, out)
    (caution,) = record["cautions"]
    assert "far (median: 5 words) are sentences, and those of clients are whole texts" in caution
    assert f"caution: {caution}" in table(record)
    assert fred(capsys, private, public, out, "--cut", "sentences")["cautions"] == []
    assert fred(capsys, f"{private}?split=lines", public[1:], out)["cautions"]
    joined = [f"{tmp_path}/near.jsonl?client=client"]
    short, *others = fred(capsys, private, public, out, "--cut", "words:7")["cautions"]
    assert "far (median: 5 words) are mostly shorter than words:7" in short and len(others) == 1
    assert fred(capsys, private, joined, out, "--cut", "words:7")["cautions"] == []


def with_terms(path, words, clients, terms):
    """A corpus of documents of four sentences each, with a column of terms of use."""
    write_lines(path, words, clients, 4)
    rows = [{**json.loads(line), "licence": terms} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{path}?client=client&columns=licence"


@pytest.mark.parametrize(("rule", "ending"), [("messages", "jsonl"), ("words:20", "parquet")])
def test_texts_of_all_candidates_are_chosen_by_the_one_release(tmp_path, capsys, rule, ending):
    """What clients hold is half like one corpus and half like another: texts of both are chosen.

    Each of them is in its corpus several times, and is chosen once.
    """
    private, out, file = tmp_path / "private.jsonl", tmp_path / "out", tmp_path / f"texts.{ending}"
    write_lines(private, NEAR[:10] + FAR[:10], 200, 4, "canarytext{}")
    public = [with_terms(tmp_path / f"{n}.jsonl", w, 60, f"of {n}") for n, w in WORDS.items()]
    more = ["--choose", 20, "--texts", file, "--cut", rule, "--population", 200]
    record = fred(capsys, private, public, out, *more, epsilon=500.0)
    choice = record["choice"]
    pool = {
        name: Cut.parse(rule).population(open_population(one)).columns["text"].to_pylist()
        for name, one in zip(WORDS, public, strict=True)
    }
    texts = [text for of_corpus in pool.values() for text in of_corpus]
    number = len(set(texts))
    assert (choice["texts"], choice["pool"], choice["file"]) == (20, number, str(file))
    assert choice["repeated"] == len(texts) - number > 0
    assert f"{choice['repeated']} texts were empty, or in the pool before" in table(record)
    assert choice["examples"] == []  # they are in the file
    assert sum(choice["shares"].values()) == pytest.approx(1)
    for line in (*chosen.lines(choice), *chosen.cautions(choice)):
        assert line in table(record)
    assert Ledger.read(out / "ledger.jsonl").spent(1e-3) == pytest.approx(500, rel=1e-3)
    assert len({charge.run for charge in Ledger.read(out / "ledger.jsonl").charges}) == 1
    read = pq.read_table(file).to_pylist() if ending == "parquet" else None
    rows = read or [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 20 and {row["source"] for row in rows} == {"far", "near"}
    assert len({row["text"] for row in rows}) == 20
    for row in rows:
        assert row["text"] in pool[row["source"]]
        assert row["licence"] == f"of {row['source']}"
        assert 0 < row["weight"] <= 1 / 20
    assert "canary" not in json.dumps(rows)
    opened = open_population(f"{file}?client=source")
    assert opened.num_examples == 20


WORDS = {"far": FAR, "near": NEAR}


def test_a_choice_that_cannot_be_made_is_refused_before_a_charge(tmp_path, sources):
    private, public = sources
    settings = {"plan": FredPlan.calibrated(epsilon=1, delta=1e-3), "embedder_name": "hashed:8"}
    given = {"out": tmp_path / "out", "ledger": tmp_path / "ledger.jsonl", "progress": False}
    call = partial(choose_corpus.choose_corpus, private, public, **settings, **given)
    refusal(lambda: call(choose=40), "40")  # 320 texts, of which 40 differ
    refusal(lambda: call(choose=0), "0")
    refusal(lambda: call(choose=2, texts=tmp_path / "texts.csv"), "texts.csv")
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.long
def test_two_processes_share_a_ranking_which_one_writes_and_charges(tmp_path, sources):
    out, address = tmp_path / "out", free_address()
    command = ["-m", "jaxpfl", "fred", "--private", sources[0], "--candidates", *sources[1]]
    command += ["--epsilon", "50", "--delta", "1e-3", "--embedder", "hashed:8", "--json", "--out"]
    joined = [["--distributed", f"{address},{index}/2"] for index in range(2)]
    found = ended([start([*command, str(out), *each]) for each in joined])
    records = [json.loads(said[said.index('{"') :]) for _, said, _ in found]
    assert records == [json.loads((out / "fred.json").read_text())] * 2
    assert records[0]["candidates"][0]["candidate"] == "near"
    assert Ledger.read(out / "ledger.jsonl").spent(1e-3) == pytest.approx(50, rel=1e-3)
