"""A study of synthetic text that is killed, altered or resumed elsewhere, and its charges."""

import json
import stat
from functools import partial

import numpy as np
import pytest

from jaxpfl import files
from jaxpfl.data import open as open_population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.export import export
from jaxpfl.experiments.records import artifacts
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.systems.synthetic_text import methods, questions
from jaxpfl.experiments.systems.synthetic_text import run as running
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.progress import Progress
from jaxpfl.text.columns import texts_of
from jaxpfl.text.embed import embed
from tests.experiments import canaries
from tests.experiments.crashes import stopped
from tests.experiments.ledgers import assert_same_records
from tests.experiments.systems.synthetic_text.test_study import (
    METHODS,
    charges,
    says_everywhere,
    scores_of,
)
from tests.loopback import completions
from tests.refusals import refusal

# So that two runs can be compared: the noise of both follows the seed.
SAME_NOISE = ("--run.reproducible_noise", "True")


def before(name):
    return partial(
        stopped, files, "write_atomically", when=lambda path, *_, **__: path.name == name
    )


def stored(name):
    return partial(stopped, artifacts, "commit", when=lambda _, path, __: path.name == name)


def after(owner, name):
    return partial(stopped, owner, name, after=True)


in_training = partial(stopped, Progress, "update")
CRASHES = {
    "popri": [
        stored("round_1_responses"),
        after(Ledger, "charge"),
        stored("round_1_scores"),
        stored("round_1_adapters"),
        stored("round_2_scores"),
        stored("round_2_adapters"),
        after(methods, "synthesise"),
        before("corpus.jsonl"),
        in_training,
        before("result.json"),
        before("report.html"),
    ],
    "pe_sft": [
        after(methods, "synthesise"),
        after(Ledger, "charge"),
        stored("round_1_votes"),
        stored("round_1_texts"),
        stored("round_2_votes"),
        stored("corpus"),
        in_training,
    ],
}


def died(config, out, crashes):
    """Ends a run at each of these instants in turn, resumes it every time, and at last to its end.

    What it charged is looked at on the way: each round at most once, wherever it was stopped.
    """
    for number, crash in enumerate(crashes):
        with crash():
            if number == 0:
                carry_out.run(config, out, progress=False)
                continue
            carry_out.resume(out, progress=False)
        if (out / "ledger.jsonl").exists():
            found = [(each["round"], each["label"]) for each in charges(out / "ledger.jsonl")]
            assert len(found) == len(set(found))
    return carry_out.resume(out, progress=False)


@pytest.mark.parametrize("method", ["popri", pytest.param("pe_sft", marks=pytest.mark.slow)])
def test_killed_in_any_phase_it_resumes_to_the_same_bits_without_a_second_charge(
    synthetic_config, tmp_path, monkeypatch, method
):
    """TRUST 33, 34: one directory is killed in each phase in turn, and resumed every time."""
    config = synthetic_config(method, *SAME_NOISE)
    whole = carry_out.run(config, tmp_path / "whole", progress=False)
    # TRUST 11: noise that follows from the seed is no noise.
    says_everywhere("NOT PRIVATE: the noise can be drawn", whole)
    assert whole.record["metrics"]["epsilon"] is not None
    parts, embedded = tmp_path / "parts", []

    def counted(clients, *arguments, **options):
        embedded.append(clients)
        return embed(clients, *arguments, **options)

    monkeypatch.setattr(running, "embed", counted)
    died(config, parts, CRASHES[method])
    # Only attempts that lacked a release, of which some were stopped before it was stored.
    assert len(embedded) == 5
    assert_same_records(parts, whole.out)
    assert not list(parts.rglob("secret.json"))
    # A finished study is found as it is.
    assert carry_out.resume(parts, progress=False).record["metrics"] == whole.record["metrics"]
    assert len(charges(parts / "ledger.jsonl")) == 2


def test_a_generator_behind_an_address_is_asked_and_sees_no_client(
    synthetic_config, tmp_path, monkeypatch
):
    """Killed and resumed, it writes other texts, and no round is charged twice for them."""
    monkeypatch.setenv("JAXPFL_API_KEY", "hidden-key-5")
    mapping = to_mapping(synthetic_config("private_evolution", *METHODS["pre_text"]))

    with completions(lambda _, number: (200, f" {number} ka lo\nand more")) as (address, asked):
        mapping["generator"] = {"api": address, "model": "far"}
        mapping["evolution"]["variation"] = "rephrase"
        crashes = after(Ledger, "charge"), stored("round_1_votes"), stored("corpus")
        out = died(from_mapping(mapping, "here"), tmp_path / "run", crashes).out
        export(out, tmp_path / "more", texts=40, progress=False)
    assert len(charges(out / "ledger.jsonl")) == 2
    assert {key for _, key, _ in asked} == {"Bearer hidden-key-5"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    canaries.assert_in_none({b"hidden-key-5"}, written)
    prompts = "\n".join(body["prompt"] for *_, body in asked)
    assert "ka" in prompts and "canary" not in prompts
    about = json.loads((out / "result.json").read_text())["public_models"]["generator"]
    assert (about["api"], about["model"]) == (address, "far")
    for page in (out / "report.html", tmp_path / "more" / "README.md"):
        assert ("nor a resumed one" if page.parent == out else "far behind") in page.read_text()
    for method in ("popri", "pe_sft", "steered"):
        with pytest.raises(InputError, match="generator.api must be absent with method"):
            from_mapping(mapping | {"method": method}, "here")
    for wrong in ("here:80/v1", "http://me:hidden-key-5@here/v1", "http://here/v1?key=5"):
        mapping["generator"]["api"] = wrong
        with pytest.raises(InputError, match="generator.api must be http.*another form$"):
            from_mapping(mapping, "here")


@pytest.mark.long
def test_one_look_is_released_once_wherever_it_is_killed(synthetic_config, tmp_path):
    """Its charges are made together, and rounds and later texts ask nobody."""
    config = synthetic_config("popri", *METHODS["one_look"], *SAME_NOISE)
    whole = carry_out.run(config, tmp_path / "whole", progress=False).out
    parts = tmp_path / "parts"
    crashes = after(Ledger, "charge"), stored("moments"), stored("nearest_corpus")
    died(config, parts, (*crashes, stored("round_2_adapters"), before("result.json")))
    assert_same_records(parts, whole)
    assert len(charges(parts / "ledger.jsonl")) == 3
    export(parts, tmp_path / "more", texts=40, progress=False)
    assert len(charges(parts / "ledger.jsonl")) == 3


CHOSEN = ("--popri.clients_send", "moments", "--popri.corpus", "chosen", *SAME_NOISE)


def test_prompts_are_made_of_texts_that_one_look_chose_once(
    synthetic_config, tmp_path, monkeypatch
):
    """Of all corpora, by its one release; a run that was killed does not choose anew."""
    prompted, choices = [], []

    def spy(owner, name, seen):
        original = getattr(owner, name)

        def spied(first, second, *more, **options):
            seen.append(second)
            return original(first, second, *more, **options)

        monkeypatch.setattr(owner, name, spied)

    for name in ("popri", "synthesise"):
        spy(methods, name, prompted)
    spy(questions, "choose_from", choices)
    config = synthetic_config("popri", *CHOSEN)
    crashes = stored("moments"), stored("chosen_texts")
    out = died(config, tmp_path / "run", [*crashes, stored("round_1_responses")]).out
    assert [list(pool) for pool in choices] == [["near", "far"]] * 2  # once before it was stored
    texts = files.read_npz(out / "artifacts" / "chosen_texts" / "arrays.npz")["texts"].tolist()
    sources = config.corpora.values()
    pool = [text for source in sources for text in texts_of(open_population(source))]
    assert len(texts) == config.corpus.texts and set(texts) <= set(pool)
    assert prompted and all(samples == texts for samples in prompted)
    assert len(charges(out / "ledger.jsonl")) == 3
    choice = json.loads((out / "result.json").read_text())["chosen_texts"]
    assert (choice["texts"], choice["pool"]) == (len(texts), len(pool))
    page = (out / "report.html").read_text()
    for line in (*chosen.lines(choice), *chosen.cautions(choice), *choice["examples"]):
        assert line.replace("'", "&#39;") in page


FINAL = ("--corpus.pool", "[public, written]", "--corpus.chosen", "20")


def test_the_corpus_is_chosen_of_written_and_public_texts_by_the_one_look(
    synthetic_config, tmp_path
):
    """A run that was killed in between has the same corpus; nothing more is charged."""
    config = synthetic_config("popri", *CHOSEN[:2], *SAME_NOISE, *FINAL)
    crashes = stored("written"), stored("corpus")
    out = died(config, tmp_path / "run", crashes).out
    rows = [json.loads(line) for line in (out / "corpus.jsonl").read_text().splitlines()]
    texts_by = {row["source"]: set() for row in rows}
    for row in rows:
        texts_by[row["source"]].add(row["text"])
    written = files.read_npz(out / "artifacts" / "written" / "arrays.npz")["texts"].tolist()
    assert len(rows) == 20 and texts_by.keys() - {"written"}
    assert texts_by.pop("written", set()) <= set(written)
    for name, texts in texts_by.items():
        assert texts <= set(texts_of(open_population(config.corpora[name])))
    assert len(charges(out / "ledger.jsonl")) == 3
    record = json.loads((out / "result.json").read_text())
    assert record["corpus"] == record["final_corpus"]["texts"] == 20
    assert "written and public texts" in (out / "report.html").read_text()
    exported = export(out, tmp_path / "exported", progress=False)
    assert exported and len(charges(out / "ledger.jsonl")) == 3
    with pytest.raises(InputError, match="20 chosen texts.* found 21"):
        export(out, tmp_path / "more", texts=21, progress=False)


def test_a_pool_of_too_few_texts_is_refused_before_the_look(synthetic_config, tmp_path):
    config = synthetic_config("popri", *CHOSEN, "--corpus.texts", "240")
    with pytest.raises(InputError, match=r"corpus.texts .* 240 in all .* found 240"):
        carry_out.run(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_steering_vectors_are_released_once_wherever_it_is_killed(synthetic_config, tmp_path):
    """More texts follow from what is stored, and the clients are not read for them."""
    config = synthetic_config("steered", *SAME_NOISE, "--steering.layers", "[0.5, 1]")
    whole = carry_out.run(config, tmp_path / "whole", progress=False).out
    parts = tmp_path / "parts"
    crashes = stored("first_texts"), after(Ledger, "charge"), stored("steering"), stored("corpus")
    died(config, parts, (*crashes, before("result.json")))
    assert_same_records(parts, whole)
    assert len(charges(parts / "ledger.jsonl")) == 1


@pytest.mark.parametrize(
    "judge", [pytest.param((), marks=pytest.mark.long), METHODS["one_look"][4:]]
)
def test_how_the_generator_writes_is_tried_and_chosen_at_no_cost(
    synthetic_config, tmp_path, monkeypatch, judge
):
    """The nearest of all that was tried, by the stored texts; killed in between, it is the same."""
    tried = ("--popri.tune.temperature", "[0, 1.5]", "--popri.tune.samples", "[far, near]")
    changes = (
        "--popri.clients_send",
        "moments",
        "--popri.responses",
        "9",
        *judge,
        *SAME_NOISE,
        *tried,
    )
    config = synthetic_config("popri", *changes)
    used, original = set(), methods.synthesise

    def spy(writer, samples, number, settings, **shown):
        used.add((settings.temperature, settings.samples))
        return original(writer, samples, number, settings, **shown)

    monkeypatch.setattr(methods, "synthesise", spy)
    out = died(config, tmp_path / "run", [stored("tried_1"), stored("tried_settings")]).out
    export(out, tmp_path / "more", texts=40, progress=False)
    assert len(charges(out / "ledger.jsonl")) == 3
    found = json.loads((out / "result.json").read_text())["tried"]
    pairs = [(each["temperature"], each["samples"]) for each in found["choices"]]
    assert pairs == [(0, ["far"]), (0, ["near"]), (1.5, ["far"]), (1.5, ["near"])]
    column, function = ("judge", "hashed:16") if judge else ("embedding", "hashed:32")
    texts = [
        files.read_npz(out / "artifacts" / f"tried_{index}" / "arrays.npz")["texts"]
        for index in range(4)
    ]
    # A setting with which nothing is written is never the nearest.
    nearest = scores_of(out, column, function, texts)[0]
    assert found["distances"][int(nearest.name)] == pytest.approx(nearest.corrected)
    assert found["chosen"] == int(nearest.name)
    temperature, samples = pairs[found["chosen"]]
    assert used == {(temperature, tuple(samples))}
    assert "What was tried" in (out / "report.html").read_text()


def test_what_was_altered_or_cut_off_is_not_gone_on_with(synthetic_config, tmp_path):
    """TRUST 34, 35, 40: a ledger that lost a charge, no secret or another, another config."""
    out = tmp_path / "run"
    config = synthetic_config("popri")
    with stored("round_2_responses")():
        carry_out.run(config, out, progress=False)
    ledger, secret = out / "ledger.jsonl", out / "runs/popri/private/secret.json"
    content, words = ledger.read_bytes(), secret.read_bytes()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    ledger.write_bytes(content.splitlines(keepends=True)[0])
    refusal(lambda: carry_out.resume(out, progress=False), "ledger.jsonl", CorruptFile)
    ledger.write_bytes(content)
    secret.unlink()
    refusal(lambda: carry_out.resume(out, progress=False), "secret.json: is missing", CorruptFile)
    secret.write_bytes(words)
    text = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(text.replace("rejected_rank: 3", "rejected_rank: 2"))
    with pytest.raises(InputError, match="the field 'config' of the run is not what it was"):
        carry_out.resume(out, progress=False)
    assert ledger.read_bytes() == content
    (out / "config.yaml").write_text(text)
    assert len(charges(carry_out.resume(out, progress=False).out / "ledger.jsonl")) == 2


def test_a_release_made_again_on_another_machine_is_charged_and_stated(
    synthetic_config, tmp_path, monkeypatch
):
    """TRUST 34: where embeddings differ in a bit, the replayed round is another release."""
    config = synthetic_config("popri", "--privacy.budget_epsilon", "30")
    out = tmp_path / "run"
    with stored("round_1_scores")():
        carry_out.run(config, out, progress=False)

    def elsewhere(clients, function, *, progress):
        found = embed(clients, function, progress=progress).columns["embedding"]
        return clients.with_columns({"embedding": np.nextafter(found, np.float32(2))})

    monkeypatch.setattr(running, "embed", elsewhere)
    record = carry_out.resume(out, progress=False).record
    ledger = Ledger.read(out / "ledger.jsonl")
    assert [charge.round for charge in ledger.charges] == [1, 1, 2]
    assert record["metrics"]["epsilon"] == pytest.approx(ledger.spent(1e-3), rel=1e-6)
    assert record["metrics"]["epsilon"] > 8.3
    assert "epsilon = 8," not in record["privacy"]
