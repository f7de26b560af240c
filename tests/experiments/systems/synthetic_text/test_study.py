"""The study of synthetic text: every method end to end, its charges, secrets and crashes."""

import importlib
import json
import stat
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxpfl import files
from jaxpfl.algorithms.frechet import moments as frechet_moments
from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, score
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.export import export
from jaxpfl.experiments.records import artifacts
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.experiments.systems.synthetic_text import methods
from jaxpfl.experiments.systems.synthetic_text import run as running
from jaxpfl.experiments.systems.synthetic_text.study import prepare
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.progress import Progress
from jaxpfl.text.embed import embed, embedder
from jaxpfl.text.metrics.repeats import longest_repeats
from tests.experiments import canaries
from tests.experiments.crashes import stopped
from tests.experiments.ledgers import assert_same_records, certified
from tests.experiments.statements import of_lines, of_page
from tests.loopback import completions

# The package has a function of that name.
popri = importlib.import_module("jaxpfl.algorithms.popri")
METHODS = {
    "public": (),
    "generator": (),
    "fed_avg": (),
    "dp_ftrl": ("--privacy.sampling", "cyclic", "--privacy.noise", "banded"),
    "private_evolution": (),
    "pre_text": ("--evolution.form", "pre_text", "--evolution.threshold", "0.5"),
    "pe_sft": (),
    "popri": (),
    "one_look": (
        *("--popri.clients_send", "moments", "--popri.corpus", "nearest"),
        *("--popri.checkpoint", "judged", "--popri.judge", "hashed:16"),
    ),
}
NEAREST_ALONE = METHODS["one_look"][:4]
ALSO = {"dp_ftrl": "fed_avg", "pre_text": "private_evolution", "one_look": "popri"}
SLOW = ("dp_ftrl", "generator")
LONG = ("pe_sft", "pre_text", "private_evolution", "fed_avg")
MARKED = [
    pytest.param(
        name,
        marks=pytest.mark.slow if name in SLOW else pytest.mark.long if name in LONG else (),
    )
    for name in METHODS
]
# So that two runs can be compared: the noise of both follows the seed.
SAME_NOISE = ("--run.reproducible_noise", "True")


@pytest.fixture(scope="module")
def finished(synthetic_config, tmp_path_factory):
    """Runs a method once, in a directory of its own."""
    folder = tmp_path_factory.mktemp("runs")
    outcomes = {}

    def run(name):
        if name not in outcomes:
            config = synthetic_config(ALSO.get(name, name), *METHODS[name])
            outcomes[name] = carry_out.run(config, folder / name, progress=False)
        return outcomes[name]

    return run


def charges(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "event" in line]


@pytest.mark.long
@pytest.mark.parametrize("name", ["popri", "fed_avg", "one_look"])
def test_the_noise_of_a_larger_population_is_named_in_every_statement(
    synthetic_config, tmp_path, name
):
    larger = ("--simulated.population", "100000", "--simulated.delta", "1e-6")
    method = ALSO.get(name, name)
    changes = NEAREST_ALONE if name == "one_look" else METHODS[name]
    small = synthetic_config(method).training.clients_per_round
    more = (*larger, "--simulated.clients_per_round", str(10 * small))
    config = synthetic_config(method, *changes, *more)
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    took = f"{small} clients scaled as if {10 * small} of 100,000"
    if name == "one_look":
        all_clients = len(prepare(config).clients)
        took = f"{all_clients} clients scaled as if 100,000 of 100,000"
    label = f"SIMULATED: noise of {took} took part"
    record, ledger = outcome.record, Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert record["privacy"].startswith(f"{label}; no guarantee")
    assert record["privacy"].count("SIMULATED") == 1
    assert "the larger population would have (epsilon = " in record["privacy"]
    assert not record["private"]
    spent = ledger.spent(config.privacy.delta)
    assert record["metrics"]["epsilon"] == pytest.approx(spent)
    assert record["stamp"].startswith(label)
    assert label in outcome.lines[-1]
    assert label in (tmp_path / "run" / "report.html").read_text()
    assert all("SIMULATED" in charge.label for charge in ledger.charges)


@pytest.mark.parametrize("name", MARKED)
def test_every_method_runs_and_has_its_page(finished, name):
    outcome = finished(name)
    record, out = outcome.record, outcome.out
    metrics = record["metrics"]
    assert 0 <= metrics["accuracy"] <= 1
    assert np.isfinite(metrics["perplexity"])
    assert record["method"] == ALSO.get(name, name)
    page = (out / "report.html").read_text()
    assert record["privacy"] in page
    assert f"{out / 'certificate.json'}: fits" in certified(out)
    assert f"Synthetic text: {record['method']}" in page
    assert ("one look" in page) == (name == "one_look")
    assert outcome.lines[-1].endswith(record["privacy"])
    sends = name not in ("public", "generator")
    assert record["private"]
    assert (metrics["epsilon"] > 0) == sends
    assert (out / "ledger.jsonl").exists() == sends
    # Every method starts from the same public model, which is named by its hash.
    start = finished("public").record
    assert record["public_models"]["downstream"] == start["public_models"]["downstream"]
    assert metrics["public_perplexity"] == start["metrics"]["perplexity"]
    assert (metrics["perplexity"] == metrics["public_perplexity"]) == (name == "public")
    # All of them were scored on the same tokens.
    table = {row["model"]: row for row in record["table"]}
    assert table.keys() == {"the public model", "unigram", "this run"}
    assert len({row["count"] for row in table.values()}) == 1
    assert table["this run"]["perplexity"] == metrics["perplexity"]
    assert table["unigram"] == start["table"][1]
    if record["method"] not in ("public", "fed_avg"):
        lines = (out / "corpus.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert len(texts) == record["corpus"] > 0
        assert all(texts)
        assert texts[:12] == record["texts"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("popri", ["poisson_sampled"] * 2),
        ("one_look", ["gaussian"] * 5),
        pytest.param("private_evolution", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("pre_text", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("pe_sft", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("fed_avg", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("dp_ftrl", ["gaussian"], marks=pytest.mark.slow),
    ],
)
def test_the_ledger_holds_a_charge_a_round_and_the_epsilon_that_is_stated(finished, name, kinds):
    """TRUST 13, 29: what is stated is what was charged, and at most what was asked for."""
    outcome = finished(name)
    path = outcome.out / "ledger.jsonl"
    assert [line["event"]["type"] for line in charges(path)] == kinds
    ledger = Ledger.read(path)
    ledger.verify()
    assert ledger.spent(1e-3) == pytest.approx(outcome.record["metrics"]["epsilon"], rel=1e-6)
    assert 7.9 < ledger.spent(1e-3) <= 8.0
    assert len({line["run"] for line in charges(path)}) == 1
    assert outcome.record["privacy"].endswith("if nothing else is released from these clients")


@pytest.mark.parametrize("name", MARKED)
def test_every_number_says_what_it_is_of_and_nothing_private_is_written(finished, name):
    """SPEC C.3, TRUST 40: ids and texts of clients are on no public file; the faulty code writes
    the participants' ids, and an un-noised "recovery percentage"."""
    outcome = finished(name)
    out, record = outcome.out, outcome.record
    data_sets = [record[name] for name in ("tested_on", "validated_on", "trained_on")]
    assert data_sets[0].startswith("test clients of ")
    assert of_lines(outcome.lines, data_sets) == []
    page = (out / "report.html").read_text()
    assert len(of_page(page.replace(data_sets[0], ""), data_sets)) >= 6
    for each in (out / "report.html", *(out / "runs").glob("*/report.html")):
        assert of_page(each.read_text(), data_sets) == []
    public = canaries.public_files(out)
    assert len(public) >= 3
    canaries.assert_in_none(canaries.CLIENTS, public)
    # Nor how long it took, which follows from how much the clients hold.
    assert "recovery" not in json.dumps(record) and "seconds" not in json.dumps(record)
    for folder in out.rglob("private"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = {"ledger.jsonl.key", "repeats.json", "repeats.html"}
    assert {path.name for path in (out / "private").glob("*")} <= kept


def test_a_phase_of_scores_holds_the_release_alone(finished):
    """SPEC C.3: no cohort, no sum without noise beside it."""
    out = finished("popri").out
    with np.load(out / "artifacts" / "round_1_scores" / "arrays.npz") as arrays:
        assert arrays.files == ["scores"]
        kept = arrays["scores"]
    assert kept.shape == (4, 4)
    assert np.isfinite(kept).all()


def test_what_the_corpus_repeats_of_clients_is_told_beside_what_the_untuned_model_repeats(
    finished, synthetic_config
):
    """TRUST 48: exact, so that it stays in the private folder, as a simulation's."""
    out = finished("popri").out
    found = json.loads((out / "private" / "repeats.json").read_text())["words"]
    clients = prepare(synthetic_config("popri")).clients.columns["text"].to_pylist()
    corpus = [json.loads(line)["text"] for line in (out / "corpus.jsonl").read_text().splitlines()]
    first = files.read_npz(out / "artifacts" / "round_1_responses" / "arrays.npz")["texts"]
    written = {"this run": corpus, "the untuned generator": list(filter(None, first.ravel()))}
    number = min(map(len, written.values()))
    for model, texts in written.items():
        assert found[model] == longest_repeats(texts[:number], clients).tolist()
    shown = (out / "private" / "repeats.html").read_text()
    assert "SIMULATION" in shown and "Nothing on this page is covered" in shown
    table = shown.partition("<table")[2]
    for model, words in found.items():
        row = table.partition(model)[2].partition("</tr>")[0]
        assert f">{max(words)}<" in row and f">{np.mean(words):.2f}<" in row
    for path in canaries.public_files(out):
        assert b"repeats" not in path.read_bytes(), path


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
        after(popri, "respond"),
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
        in_training,
        stored("corpus"),
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
    synthetic_config, tmp_path, method
):
    """TRUST 33, 34: one directory is killed in each phase in turn, and resumed every time."""
    config = synthetic_config(method, *SAME_NOISE)
    whole = carry_out.run(config, tmp_path / "whole", progress=False)
    parts = tmp_path / "parts"
    died(config, parts, CRASHES[method])
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
    for method in ("popri", "pe_sft"):
        with pytest.raises(InputError, match="generator.api must be absent with method"):
            from_mapping(mapping | {"method": method}, "here")
    for wrong in ("here:80/v1", "http://me:hidden-key-5@here/v1", "http://here/v1?key=5"):
        mapping["generator"]["api"] = wrong
        with pytest.raises(InputError, match="generator.api must be http.*another form$"):
            from_mapping(mapping, "here")


def test_one_look_chooses_the_nearest_corpus_at_no_further_cost(finished):
    outcome = finished("one_look")
    scores = outcome.record["corpora"]
    assert scores["names"] == ["near", "far"]
    assert scores["corrected"] == sorted(scores["corrected"])
    parts = ("count", "sum", "second", "judge sum", "judge second")
    labels = [charge["label"] for charge in charges(outcome.out / "ledger.jsonl")]
    assert labels == [f"one look {part}" for part in parts]
    assert "The nearest public corpus" in (outcome.out / "report.html").read_text()


def test_a_judge_that_no_reward_sees_chooses_the_round(finished):
    """By the distances of what each round wrote from the released moments of its own embedder."""
    outcome = finished("one_look")
    found, artifacts = outcome.record["checkpoint"], outcome.out / "artifacts"
    released = files.read_npz(artifacts / "moments" / "arrays.npz")
    plan = FredPlan.without_privacy()  # whose clip norm is the study's
    judge = PrivateMoments.of_arrays(
        {name: released[f"judge.{name}"] for name in ("count", "mean", "covariance", "noise")}, plan
    )
    assert judge.moments.dimension == 16 and judge.noise.mean > 0
    assert judge.moments.count == released["embedding.count"]
    written = [
        files.read_npz(artifacts / f"round_{number}_responses" / "arrays.npz")["texts"]
        for number in (1, 2)
    ]
    embed_ = embedder("hashed:16")
    texts = [[text for text in each.ravel().tolist() if text] for each in written]
    moments = [frechet_moments(np.asarray(embed_(each)), 1.0) for each in texts]
    scored = sorted(score(judge, dict(zip("12", moments, strict=True))))
    # The noise's bias is simulated, here without the texts of the last round.
    expected = [each.corrected for each in scored]
    assert found["distances"][:2] == pytest.approx(expected, abs=0.05)
    assert found["distances"][found["round"]] == min(found["distances"])
    assert "When to stop" in (outcome.out / "report.html").read_text()


@pytest.mark.long
def test_one_look_is_released_once_wherever_it_is_killed(synthetic_config, tmp_path):
    """Its charges are made together, and rounds and later texts ask nobody."""
    config = synthetic_config("popri", *METHODS["one_look"], *SAME_NOISE)
    whole = carry_out.run(config, tmp_path / "whole", progress=False).out
    parts = tmp_path / "parts"
    crashes = after(Ledger, "charge"), stored("moments"), stored("nearest_corpus")
    died(config, parts, (*crashes, stored("round_2_adapters"), before("result.json")))
    assert_same_records(parts, whole)
    assert len(charges(parts / "ledger.jsonl")) == 5
    export(parts, tmp_path / "more", texts=40, progress=False)
    assert len(charges(parts / "ledger.jsonl")) == 5


@pytest.mark.parametrize("judge", [(), METHODS["one_look"][4:]])
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
    assert len(charges(out / "ledger.jsonl")) == (5 if judge else 3)
    found = json.loads((out / "result.json").read_text())["tried"]
    pairs = [(each["temperature"], each["samples"]) for each in found["choices"]]
    assert pairs == [(0, ["far"]), (0, ["near"]), (1.5, ["far"]), (1.5, ["near"])]
    column, function = ("judge", "hashed:16") if judge else ("embedding", "hashed:32")
    released = files.read_npz(out / "artifacts" / "moments" / "arrays.npz")
    names = ("count", "mean", "covariance", "noise")
    private = PrivateMoments.of_arrays(
        {name: released[f"{column}.{name}"] for name in names}, FredPlan.without_privacy()
    )
    embed_, moments = embedder(function), {}
    for index in range(4):
        texts = files.read_npz(out / "artifacts" / f"tried_{index}" / "arrays.npz")["texts"]
        # A setting with which nothing is written is never the nearest.
        if some := [text for text in texts.ravel().tolist() if text]:
            moments[str(index)] = frechet_moments(np.asarray(embed_(some)), 1.0)
    nearest = score(private, moments)
    assert found["distances"][int(nearest[0].name)] == pytest.approx(nearest[0].corrected)
    assert found["chosen"] == int(nearest[0].name)
    temperature, samples = pairs[found["chosen"]]
    assert used == {(temperature, tuple(samples))}
    assert "What was tried" in (out / "report.html").read_text()


def test_a_look_that_a_budget_has_no_room_for_is_not_begun(synthetic_config, tmp_path):
    """Not even its count, which alone would fit."""
    tight = ("--privacy.budget_epsilon", "7.9")
    config = synthetic_config("popri", *METHODS["one_look"], *tight)
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        carry_out.run(config, tmp_path / "run", progress=False)
    assert charges(tmp_path / "run" / "ledger.jsonl") == []


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
    with pytest.raises(CorruptFile, match=r"ledger\.jsonl"):
        carry_out.resume(out, progress=False)
    ledger.write_bytes(content)
    secret.unlink()
    with pytest.raises(CorruptFile, match=r"secret\.json: is missing"):
        carry_out.resume(out, progress=False)
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


@pytest.mark.parametrize("stamp", ["NOT PRIVATE: trained", "NOT PRIVATE: the noise can be drawn"])
def test_a_study_that_is_not_private_says_so_everywhere(synthetic_config, tmp_path, stamp):
    """TRUST 11, 21: without noise, and with noise that follows from the seed."""
    changes = ("--training.rounds", "1", *SAME_NOISE)
    if "trained" in stamp:
        changes = ("--training.rounds", "1", "--privacy.private", "false")
        changes += ("--privacy.epsilon", "null", "--privacy.delta", "null")
    record = carry_out.run(synthetic_config("popri", *changes), tmp_path, progress=False).record
    assert record["private"] is False and record["privacy"].startswith("NOT PRIVATE")
    assert (record["metrics"]["epsilon"] is None) == ("trained" in stamp)
    assert record["stamp"].startswith(stamp)
    assert "NOT PRIVATE" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "config.yaml").read_text().startswith(f"# {stamp}")
