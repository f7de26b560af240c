"""`jaxpfl synthesize`: from a table to a chosen public corpus, by one release."""

import json
import shlex
from functools import partial

import numpy as np
import pandas as pd
import pytest

import jaxpfl as jp
from jaxpfl.cli import main, parser
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.own_table import config_of
from jaxpfl.experiments.systems.chosen_corpus import run as corpus_run
from jaxpfl.experiments.systems.chosen_corpus import study as corpus_study
from jaxpfl.privacy import Ledger, verify
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.experiments.crashes import stopped
from tests.refusals import refusal

CLIENTS, LINES, TEXTS = 173, 4, 30
WANTED = {"card.md", "certificate.json", "corpus.jsonl", "ledger.jsonl", "report.html"}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def mine(table):
    return table / "mine.jsonl"


@pytest.fixture
def table(tmp_path):
    """A table of one's own, and a folder of two public corpora, one of which is like it."""
    write_lines(tmp_path / "mine.jsonl", NEAR, CLIENTS, LINES, "canarytext{}")
    (tmp_path / "public").mkdir()
    for name, words in (("far", FAR), ("near", NEAR)):
        path = tmp_path / "public" / f"{name}.jsonl"
        write_lines(path, words, 40, LINES, f"{name}{{}}")
        rows = [{**row, "license": f"of {name}"} for row in rows_of(path)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    (tmp_path / "public" / "notes.md").write_text("no corpus")
    return tmp_path


def command(table, *more):
    given = [
        "--public",
        f"{table}/public/far.jsonl",
        f"near={table}/public/near.jsonl?columns=license",
    ]
    given += ["--epsilon", 40, "--texts", TEXTS, "--out"]
    return list(map(str, [*given, table / "out", "--embedder", "hashed:8", *more]))


def config(table, *more, **settings):
    """The config that the command carries out, with noise that can be drawn again."""
    settings = {"epsilon": 40, "texts": TEXTS, "embedder": "hashed:8"} | settings
    path = table / "config.yaml"
    path.write_text(config_of(f"{table}/mine.jsonl", [f"{table}/public"], **settings))
    return registry.load(path, ["--run.devices", "2", *more])


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_table_becomes_a_corpus_by_one_release(table, form, capsys):
    file = table / f"own.{form}"
    rows = rows_of(table / "mine.jsonl")
    frame = pd.DataFrame(rows).rename(columns={"client": "user", "text": "a message"})
    if form == "csv":
        frame.to_csv(file, index=False)
    else:
        frame.to_json(file, orient="records", lines=True)
    columns = ["--client", "user", "--text", "a message"]
    assert main(["synthesize", str(file), *columns, *command(table), "--json"]) == 0
    record, out = json.loads(capsys.readouterr().out), table / "out"
    assert WANTED <= {path.name for path in out.iterdir()}
    texts = rows_of(out / "corpus.jsonl")
    assert len(texts) == len({row["text"] for row in texts}) == TEXTS
    public = "".join((table / "public" / f"{name}.jsonl").read_text() for name in ("near", "far"))
    for row in texts:
        assert json.dumps(row["text"]) in public
        assert row["license"] == ("of near" if row["source"] == "near" else None)
    drawn = {row["corpus"]: row["chosen"] for row in record["corpora"]}
    assert drawn["near"] > 2 * drawn["far"] and sum(drawn.values()) == TEXTS
    # Both corpora are in their files twice.
    assert record["repeated"] == 2 * 40 * LINES
    ledger = Ledger.read(out / "ledger.jsonl")
    assert len({charge.run for charge in ledger.charges}) == 1
    assert ledger.spent(1e-4) <= 40 * 1.001 and "delta = 0.0001" in record["privacy"]
    sayings = verify.verified([out / "certificate.json"], [out / "ledger.jsonl"], None, False)
    assert f"{out / 'ledger.jsonl'}: fits" in list(sayings)
    card = (out / "card.md").read_text()
    for told in (record["privacy"], "of near", f"{CLIENTS} clients, whose number is public"):
        assert told in card
    for name in WANTED:
        content = (out / name).read_text()
        assert "canaryid" not in content and "canarytext" not in content, name


# Without labels, what `test_a_judge_decides_nothing` carries out.
@pytest.mark.parametrize(
    "more", [pytest.param((), marks=pytest.mark.long), ("--label", "topic", "--labels", "near,far")]
)
def test_several_embedders_choose_and_another_judges_by_one_release(table, more, capsys):
    rows = [
        {**row, "topic": "near" if n % 3 else "far"} for n, row in enumerate(rows_of(mine(table)))
    ]
    mine(table).write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["synthesize", f"{table}/mine.jsonl", *command(table, *more), "--json"]
    several = ["--epsilon", "400", "--embedder", "hashed:8", "hashed:9", "--judge", "hashed:7"]
    assert main([*given, *several]) == 0
    record, out = json.loads(capsys.readouterr().out), table / "out"
    drawn = {row["corpus"]: row["chosen"] for row in record["corpora"]}
    assert drawn["near"] > 2 * drawn["far"]
    ledger = Ledger.read(out / "ledger.jsonl")
    assert len(ledger.charges) == (3 if more else 2)
    assert ledger.spent(1e-4) == pytest.approx(400, rel=1e-2)
    judged = record["choice"]["judged"]
    assert judged["chosen"] < judged["mixture"]
    for name in ("card.md", "report.html"):
        content = (out / name).read_text()
        assert "hashed:8" in content and "hashed:9" in content
        assert "hashed:7 decided nothing" in content and "canaryid" not in content
    again = carry_out.resume(out, progress=False).record
    assert (
        again["choice"] == record["choice"] and len(Ledger.read(out / "ledger.jsonl").charges) < 4
    )


def test_a_judge_decides_nothing(table, monkeypatch):
    """With any other numbers of its own, the same texts are chosen."""
    choices, settings = [], {"embedder": ["hashed:8", "hashed:9"], "judge": "hashed:7"}
    made = config(table, "--run.reproducible_noise", "true", **settings)
    original = corpus_run.choose
    for factor in (1, -3):

        def altered(evidence, *given, factor=factor, judge, **more):
            own = judge.embeddings_NxD
            other = judge._replace(embeddings_NxD=factor * own)
            evidence = [other if part.embeddings_NxD is own else part for part in evidence]
            return original(evidence, *given, judge=other, **more)

        monkeypatch.setattr(corpus_run, "choose", altered)
        choices.append(carry_out.run(made, table / f"{factor}", progress=False).record["choice"])
    assert choices[0].pop("judged") != choices[1].pop("judged")
    assert choices[0] == choices[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--embedder", "[hashed:8, hashed:8]"], "embedder differ"),
        (["--embedder", "[hashed:8, hashed:9]", "--judge", "hashed:9"], "judge differ"),
        (["--embedder", "[]"], "embedder list of one or more"),
        (["--embedder", "[hashed:8, 3]"], "embedder text 3"),
    ],
)
def test_embedders_that_cannot_be_are_refused(table, more, words):
    refusal(lambda: config(table, *more), words)


def test_an_embedder_that_noise_hides_is_refused_before_the_charge_and_named_after(
    table, monkeypatch
):
    """Of two, one with too many dimensions for so few clients."""
    two = {"embedder": ["hashed:8", "hashed:256"], "epsilon": 8}
    made = config(table, **two)
    refusal(lambda: carry_out.run(made, table / "out", progress=False), "with hashed:256: nothing")
    assert not (table / "out" / "ledger.jsonl").exists()
    nothing, visible = (np.zeros(0), np.zeros((1, 0)), np.zeros((1, 1))), corpus_study.visible

    def by_few_dimensions(released):
        return visible(released) if released.moments.dimension < 256 else nothing

    monkeypatch.setattr(corpus_study, "visible", by_few_dimensions)
    monkeypatch.setattr(corpus_study.Study, "require_visible", lambda *_: None)
    record = carry_out.run(made, table / "again", progress=False).record
    assert any("by hashed:256, which chose none" in text for text in record["cautions"])


def test_a_data_frame_in_python(table):
    rows = rows_of(table / "mine.jsonl")
    clients = jp.data.from_dataframe(pd.DataFrame(rows), client="client", text="text")
    settings = {"epsilon": 40.0, "texts": TEXTS, "embedder": "hashed:8", "progress": False}
    made = partial(jp.synthesize, clients, out=table / "out", **settings)
    refusal(lambda: made(f"{table}/mine.jsonl"), "holds the private clients' own data")
    assert not (table / "out" / "private" / "clients").exists()
    outcome = made(f"{table}/public")
    assert len((table / "out" / "corpus.jsonl").read_text().splitlines()) == TEXTS
    assert "epsilon = 40" in outcome.record["privacy"]
    assert (table / "out" / "private").stat().st_mode & 0o77 == 0


def test_killed_after_the_charge_it_goes_on_at_no_further_cost(table):
    reproducible = config(table, "--run.reproducible_noise", "true")
    straight = carry_out.run(reproducible, table / "straight", progress=False).record
    out = table / "out"
    for owner, name in ((corpus_run.Workspace, "train"), (corpus_run.text_pool, "write")):
        with stopped(owner, name, after=name == "train"):
            if out.exists():
                carry_out.resume(out, progress=False)
            else:
                carry_out.run(reproducible, out, progress=False)
        assert len(Ledger.read(out / "ledger.jsonl").charges) == 2
    again = carry_out.resume(out, progress=False).record
    assert again["metrics"] == straight["metrics"]
    assert len(Ledger.read(out / "ledger.jsonl").charges) == 2
    written = [(folder / "corpus.jsonl").read_text() for folder in (out, table / "straight")]
    assert written[0] == written[1]


def test_what_noise_would_hide_is_refused_before_the_charge(table):
    """The number of clients with which it would not is then enough."""
    said = refusal(
        lambda: carry_out.run(config(table, epsilon=0.3), table / "out", progress=False),
        f"{CLIENTS} clients with nothing released",
    )
    needed = int(said.partition("with about ")[2].partition(" clients")[0].replace(",", ""))
    assert needed > CLIENTS
    assert not (table / "out" / "ledger.jsonl").exists()
    with open(table / "mine.jsonl", "a") as file:
        for number in range(CLIENTS, needed):
            file.write(json.dumps({"client": f"canaryid{number}", "text": "one more"}) + "\n")
    enough = config(table, epsilon=0.3, delta=1e-4)
    study = registry.system_of(enough.system).part("study").prepare(enough)
    study.require_visible({"embedding": np.diag([study_of_pool(study), *[1e-9] * 7])})


def study_of_pool(study):
    """The largest eigenvalue of the covariance of the pool's embeddings."""
    texts = [text for corpus in study.pool.values() for text in corpus.columns["text"].to_pylist()]
    return np.linalg.eigvalsh(np.cov(study.embedders["embedding"](texts).T, bias=True))[-1]


def test_a_release_in_which_nothing_stands_out_is_refused(table, monkeypatch):
    """Here all clients say the same; by chance alone one in six releases would show a direction."""
    nothing = np.zeros(0), np.zeros((1, 0)), np.zeros((1, 1))
    monkeypatch.setattr("jaxpfl.experiments.systems.chosen_corpus.study.visible", lambda _: nothing)
    with open(table / "mine.jsonl", "w") as file:
        for number in range(CLIENTS):
            file.write(json.dumps({"client": f"canaryid{number}", "text": "all the same"}) + "\n")
    refusal(
        lambda: carry_out.run(config(table, epsilon=4), table / "out", progress=False),
        "the clients' texts stands out with about was charged",
    )
    assert not (table / "out" / "corpus.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--texts", "320"], "texts 320"),
        (["--cut", "tokens:5"], "words:N"),
        (["--public", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--public", "{table}/empty"], "{table}/empty without"),
        (["--embedder", "hashing"], "hashing"),
        (["--epsilon", "0"], "epsilon"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_a_charge(table, more, words, capsys):
    (table / "empty").mkdir()
    more = [word.format(table=table) for word in more]
    assert main(["synthesize", f"{table}/mine.jsonl", *command(table), *more]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words.format(table=table).split())
    assert not (table / "out" / "ledger.jsonl").exists()


def test_public_texts_say_which_language_the_embedder_may_not_know(table, monkeypatch):
    """By public texts alone: the clients' are never read for it."""
    real = corpus_study.embedder
    monkeypatch.setattr(corpus_study, "embedder", lambda name: real("hashed:8"))
    for name, words in (("german", "der Hund und die Katze im Haus"), ("english", "the cat is in")):
        with open(table / "public" / "far.jsonl", "w") as file:
            for number in range(2_000):
                file.write(json.dumps({"text": f"{words} {number}"}) + "\n")
        made = config(table, embedder="minilm")
        record = carry_out.run(made, table / name, progress=False).record
        warned = any("do not look like English" in caution for caution in record["cautions"])
        assert warned == (name == "german")


def test_public_texts_that_are_not_like_the_clients_are_told(table):
    (table / "public" / "near.jsonl").unlink()
    made = config(table, embedder="hashed:32")
    record = carry_out.run(made, table / "out", progress=False).record
    assert any("No public text is much like" in caution for caution in record["cautions"])
    assert "No public text is much like" in (table / "out" / "card.md").read_text()


def test_init_shows_the_command(capsys):
    given = ["init", "my table.csv", "--client", "user", "--text", "message"]
    assert main([*given, "--task", "synthetic_text"]) == 0
    shown = shlex.split(capsys.readouterr().out)
    parsed = parser().parse_args(shown[1:])
    assert (parsed.file, parsed.client, parsed.text) == ("my table.csv", "user", "message")
