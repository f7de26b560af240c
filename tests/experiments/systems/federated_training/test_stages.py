"""The three stages as one run: one budget, nothing private in the open, the same after a crash."""

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from jaxpfl.algorithms.fred import query as fred_query
from jaxpfl.data import open as open_population
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, Interrupted
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.carry_out import Outcome, report
from jaxpfl.experiments.export import export
from jaxpfl.experiments.records import artifacts
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts
from jaxpfl.experiments.systems.federated_training import run as pipeline
from jaxpfl.experiments.systems.federated_training.run import NOTE
from jaxpfl.experiments.systems.federated_training.study import Study
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.release import prepared_query
from jaxpfl.federated.release.query import Execution
from jaxpfl.federated.release.releaser import Releaser
from jaxpfl.privacy import verify
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from tests.experiments import canaries
from tests.experiments.conftest import FAR, NEAR, PIPELINE, changed_config, write_lines
from tests.experiments.crashes import stopped
from tests.experiments.ledgers import assert_same_records, certified
from tests.experiments.statements import of_page
from tests.refusals import refusal

MOMENTS = "runs/FreD/checkpoints/round_00000001/record.json"
PARAMETERS = "artifacts/prefinetuned_far/arrays.npz"
REPRODUCIBLE = ("--run.reproducible_noise", "True")


@pytest.fixture(scope="module")
def finished(pipeline_config, tmp_path_factory) -> Outcome:
    """An uninterrupted run with noise of the operating system."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return carry_out.run(registry.load(pipeline_config), out, progress=False)


def _simulation(finished: Outcome) -> dict[str, Any]:
    return json.loads((finished.out / "simulation.json").read_text())


@pytest.fixture(scope="module")
def straight(pipeline_config, tmp_path_factory) -> Path:
    """The directory of an uninterrupted run whose noise can be drawn again."""
    out = tmp_path_factory.mktemp("straight") / "run"
    carry_out.run(registry.load(pipeline_config, REPRODUCIBLE), out, progress=False)
    return out


def test_the_exports_statement_covers_fred_and_the_rounds(finished, tmp_path):
    found = export(finished.out, tmp_path / "exported", progress=False)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f"\n{finished.record['privacy']}\n" in card
    assert "| before the rounds | prefinetuned on " in card
    assert found["stamp"] == ""
    # Of the run's ledger, and of no simulation's; the export has hashes of its files beside it.
    assert certified(finished.out).count("ledger.jsonl: fits") == 1
    folder = tmp_path / "exported"
    verify.main([str(folder / "certificate.json"), "--weights", str(folder)])


def _pld_epsilon(releases: Sequence[tuple[dp_accounting.DpEvent, int]], delta: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=5e-4)
    for event, times in releases:
        accountant.compose(event, times)
    return accountant.get_epsilon(delta)


def test_all_releases_are_in_one_ledger_and_compose_to_the_target(finished):
    """TRUST 29: FreD and the rounds on one population cost one epsilon; neither is forgotten."""
    ledger = Ledger.read(finished.out / "ledger.jsonl")
    spent = ledger.summary(1e-3)
    assert spent["labels"].pop("fed_avg") == 3
    assert spent["labels"] and all(label.startswith("fred ") for label in spent["labels"])
    run = json.loads((finished.out / "run.json").read_text())
    fred = json.loads((finished.out / "artifacts/fred_scores/record.json").read_text())
    rounds = (
        dp_accounting.PoissonSampledDpEvent(
            run["plan"]["clients_per_round"] / run["plan"]["population"],
            dp_accounting.GaussianDpEvent(run["plan"]["noise_multiplier"]),
        ),
        3,
    )
    query = [(dp_accounting.GaussianDpEvent(z), 1) for z in fred["plan"]["multipliers"]]
    total = _pld_epsilon([*query, rounds], 1e-3)
    assert spent["epsilon"] == pytest.approx(total, rel=1e-4)
    assert 8.0 * (1 - 2e-3) < total <= 8.0
    of_query = _pld_epsilon(query, 1e-3)
    assert of_query == pytest.approx(4.0, rel=1e-3)
    # Without either of the two the run would have claimed far less.
    assert max(of_query, _pld_epsilon([rounds], 1e-3)) < 7.5
    record = json.loads((finished.out / "result.json").read_text())
    for statement in (finished.record["privacy"], record["privacy"]):
        assert "epsilon = 8," in statement
        # FreD is a part of it, so that nothing else is on the ledger.
        assert statement.endswith("if nothing else is released from these clients")
    assert record["metrics"]["epsilon"] == pytest.approx(8.0, rel=2e-3)
    first = json.loads((finished.out / "metrics.jsonl").read_text().splitlines()[0])
    assert first["epsilon"] == pytest.approx(4.0, rel=1e-3)
    assert "epsilon = 8," in (finished.out / "report.html").read_text()


def test_other_candidates_are_simulation_on_ledgers_of_their_own(finished):
    assert finished.record["fred"] is not None
    rows = finished.record["fred"]["candidates"]
    assert [row["candidate"] for row in rows] == ["near", "mostly far", "far"]
    for row in rows[1:]:
        folder = finished.out / "other_candidates" / row["candidate"]
        summary = Ledger.read(folder / "ledger.jsonl").summary(1e-3)
        assert summary["labels"] == {f"fed_avg from {row['candidate']}": 3}
        assert summary["epsilon"] < 8.0 - 0.5
        note = NOTE.format(row["candidate"])
        assert json.loads((folder / "run.json").read_text())["note"] == note
        assert json.loads((folder / "result.json").read_text())["privacy"].endswith(note)
        assert "SIMULATION" in (folder / "report.html").read_text()


def test_what_the_run_releases_holds_nothing_of_its_simulations(finished):
    """Everything on the page is covered by the statement that stands on it."""
    simulated = [row for row in _simulation(finished)["table"] if row["folder"]]
    assert [row["model"] for row in simulated] == [
        "the same run from mostly far",
        "the same run from far",
    ]
    # As result.json writes them, in full: few digits of another model's number may be the same by
    # chance, so that the page's short form would say nothing.
    secrets = [str(row["loss"]) for row in simulated]
    secrets += [str(row["perplexity"]) for row in simulated]
    # The page rounds to four digits. A number that a public row shares with a simulated one up to
    # rounding is left out.
    shown = [row["perplexity"] for row in finished.record["table"]]
    secrets += [
        f"{row['perplexity']:.4g}"
        for row in simulated
        if all(abs(row["perplexity"] - public) > 0.1 for public in shown)
        and len(f"{row['perplexity']:.4g}") == 5
    ]
    page = (finished.out / "report.html").read_text()
    public = page[: page.index("How it was run")]
    for name in ("result.json", "run.json", "metrics.jsonl", "artifacts/fred_scores/record.json"):
        public += (finished.out / name).read_text()
    # What a PNG draws is not text: the plots are those of the run, drawn from its own records.
    public = re.sub(r"data:image/png;base64,[^\"]*", "", public)
    for secret in secrets:
        assert secret not in public
    assert "the same run from" not in public and '"after"' not in public
    assert "SIMULATION" not in page
    assert page.count("simulation.html") == 1
    assert {path.name for path in (finished.out / "plots").iterdir()} == {
        "fred.png", "perplexity.png", "loss.png", "accuracy.png",
        "epsilon.png", "update_norm.png",
    }  # fmt: skip


def test_the_page_of_simulations_says_what_it_is(finished):
    page = (finished.out / "simulation.html").read_text()
    assert "Nothing on this page is covered by the statement" in page
    assert '<div class="banner">SIMULATION</div>' in page
    for row in _simulation(finished)["table"]:
        assert row["model"] in page
        assert row["privacy"] in page.replace("&#39;", "'")
        assert f"{row['perplexity']:.4g}" in page
    assert "other_candidates/mostly%20far/report.html" in page
    # On the terminal it stands below the statement and a line that says so.
    above, note, below = "\n".join(finished.lines).partition("SIMULATION: ")
    assert note and "unit = client, adjacency" in above.splitlines()[-2]
    assert "the same run from" not in above and "the same run from far" in below
    assert "simulation.html" in below


def test_the_ranking_holds_every_candidates_model(finished):
    assert finished.record["fred"] is not None
    rows = finished.record["fred"]["candidates"]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    distances = [row["distance"] for row in rows]
    assert distances == sorted(distances)
    both = _simulation(finished)["fred"]["candidates"]
    assert [row["before"] for row in both] == [row["before"] for row in rows]
    for row in both:
        assert all(1 < row[stage]["perplexity"] < 100 for stage in ("before", "after"))
    # The clients' own words help more than others do.
    assert rows[0]["before"]["loss"] < rows[2]["before"]["loss"]
    assert finished.record["fred"]["spearman"] == {"before": pytest.approx(1.0)}
    by_name = {row["model"]: row for row in finished.record["table"]}
    assert by_name["prefinetuned on near"]["loss"] == rows[0]["before"]["loss"]
    assert by_name["this run"]["loss"] == both[0]["after"]["loss"]


def test_every_figure_says_what_it_was_measured_on(pipeline_config, finished):
    source = pipeline_config.parent / "clients.jsonl"
    test = f"test clients of {source} (declared public)"
    valid = f"validation clients of {source} (declared public)"
    record = json.loads((finished.out / "result.json").read_text())
    assert record["tested_on"] == finished.record["tested_on"] == test
    frequencies = {row["model"]: row.get("frequencies") for row in record["table"]}
    assert frequencies["unigram"] == valid
    assert frequencies["this run"] is None
    for name in ("report.html", "simulation.html"):
        page = (finished.out / name).read_text()
        assert f"Compared on {test}" in page
        assert "held-out" not in page
    page = (finished.out / "report.html").read_text()
    assert of_page(page, [test, valid, "what the private clients hold"]) == []
    assert f"word frequencies of {valid}" in page
    assert f"the words of {pipeline_config.parent / 'vocabulary.jsonl'} (declared public)" in page
    run_file = finished.out / "run.json"
    run = json.loads(run_file.read_text())
    copied = finished.out.parent / "named"
    shutil.copytree(finished.out, copied)
    (copied / "run.json").write_text(json.dumps({**run, "evaluation": valid}))
    page = report(copied).read_text()
    assert f"<td>on {valid}</td>" in page
    assert f'alt="Perplexity on {valid}"' in page


def test_nothing_of_a_client_leaves_the_private_folder(pipeline_config, finished):
    """TRUST 40: ids, texts and keys stay in private/, in those of the other candidates too."""
    # The secrets are gone: FreD's, the run's and those of the other candidates'.
    assert not list(finished.out.rglob("*secret*"))
    keys = list(finished.out.rglob("*.key"))
    assert len(keys) == 3
    for key in keys:
        assert key.parent.name == "private"
        assert key.parent.stat().st_mode & 0o777 == 0o700
    words = {word for key in keys for word in (key.read_bytes(), key.read_bytes().hex().encode())}
    public = canaries.public_files(finished.out)
    assert len(public) > 30
    canaries.assert_in_none(canaries.CLIENTS | words, public)


def test_a_pipeline_that_dies_in_every_stage_resumes_to_the_same_bits(
    pipeline_config, straight, tmp_path, monkeypatch
):
    """TRUST 33, 34: one run dies again and again, and nothing is released or charged twice."""
    out = tmp_path / "run"

    def dies_at(target: object, name: str, call: int, go_on=carry_out.resume) -> None:
        with stopped(target, name, call):
            go_on(out, progress=False)

    config = registry.load(pipeline_config, REPRODUCIBLE)
    # FreD's first sum is released, and its second charged.
    dies_at(prepared_query, "Cohort", 2, go_on=partial(carry_out.run, config))
    dies_at(artifacts, "commit", 1)  # all are released, and not on the disk
    dies_at(pipeline, "score", 1)  # released, and not scored
    monkeypatch.setattr(Study, "embedded", None)  # nothing is released again
    dies_at(Artifacts, "save", 1)  # scored, and not on the disk
    dies_at(Artifacts, "save", 2)  # the winner is prefinetuned, and not on the disk
    dies_at(pipeline, "prefinetune", 2)  # another candidate is not prefinetuned
    dies_at(prepared_query, "Cohort", 3)  # inside the winner's rounds
    assert (out / "checkpoints" / "round_00000002").exists()
    # After the winner's last round, inside another candidate's.
    dies_at(prepared_query, "Cohort", 1 + 2)
    other = out / "other_candidates" / "mostly far"
    assert len(Ledger.read(other / "ledger.jsonl")) == 2

    real = prepared_query.Cohort

    def signalling(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(prepared_query, "Cohort", signalling)
        # The whole run's directory is named, not the candidate's.
        with pytest.raises(Interrupted, match=f"resume {out}$"):
            carry_out.resume(out, progress=False)
    carry_out.resume(out, progress=False)
    names = assert_same_records(out, straight)
    assert {PARAMETERS, "runs/FreD/result.json", "simulation.json"} <= names
    assert "other_candidates/far/metrics.jsonl" in names


def test_with_secret_noise_a_crash_does_not_lead_to_a_second_release(
    pipeline_config, tmp_path, monkeypatch
):
    """The secret is on the disk before its first use.

    TRUST 40: nor is a lost charge forgotten, also before the first round's checkpoint.
    """
    out, seen = tmp_path / "run", []

    def watched(*arguments, **options):
        seen.append(real(*arguments, **options))
        return seen[-1]

    real = Releaser.release
    monkeypatch.setattr(Releaser, "release", watched)
    with stopped(Releaser, "release", 3, after=True):
        carry_out.run(registry.load(pipeline_config), out, progress=False)
    with stopped(pipeline, "prefinetune"):
        carry_out.resume(out, progress=False)
    assert len(seen) == 6
    for first, second in zip(seen[:3], seen[3:], strict=True):
        np.testing.assert_array_equal(np.asarray(first.value), np.asarray(second.value))
    ledger = out / "ledger.jsonl"
    assert len(Ledger.read(ledger)) == 3
    lines = ledger.read_text().splitlines(keepends=True)
    # The last charge, and what was recorded after it.
    last = max(number for number, line in enumerate(lines) if '"event"' in line)
    ledger.write_text("".join(lines[:last]))
    refusal(lambda: carry_out.resume(out, progress=False), "ledger", CorruptFile)


def test_a_release_that_was_altered_blocks_the_resume(straight, tmp_path):
    """TRUST 35: FreD's secret is gone, so that it cannot be made again."""
    out = Path(shutil.copytree(straight, tmp_path / "run"))
    path = out / MOMENTS
    path.write_bytes(path.read_bytes()[:-1])
    refusal(lambda: carry_out.resume(out, progress=False), f"{MOMENTS}: was altered", CorruptFile)


def test_a_release_that_was_deleted_is_not_made_again(straight, tmp_path):
    out = Path(shutil.copytree(straight, tmp_path / "run"))
    shutil.rmtree(out / "runs" / "FreD")
    charges = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(CorruptFile, match="runs/FreD/run.json: is missing"):
        carry_out.resume(out, progress=False)
    assert (out / "ledger.jsonl").read_bytes() == charges


def test_a_finished_release_is_of_the_clients_that_the_rounds_ask(tmp_path):
    """TRUST 55: also where the ledger is theirs and nothing of the release is asked again."""
    write_lines(tmp_path / "clients.jsonl", NEAR, 40, 3)
    for name, words in (("near", NEAR), ("far", FAR), ("vocabulary", NEAR + FAR)):
        write_lines(tmp_path / f"{name}.jsonl", words, 30, 4, f"public{name}")
    path, out = tmp_path / "pipeline.yaml", tmp_path / "run"
    path.write_text(PIPELINE.format(folder=tmp_path))
    with stopped(pipeline, "prefinetune"):
        carry_out.run(registry.load(path), out, progress=False)
    write_lines(tmp_path / "clients.jsonl", FAR, 40, 3)
    Ledger.add_source(out / "ledger.jsonl", open_population(str(tmp_path / "clients.jsonl")))
    charges = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match="runs/FreD: the clients are not those with which"):
        carry_out.resume(out, progress=False)
    assert (out / "ledger.jsonl").read_bytes() == charges


def test_a_signal_ends_an_embedding_at_once(pipeline_config, tmp_path, monkeypatch):
    """It may take long, and nothing is charged before it ends."""
    out, embedded = tmp_path / "run", []

    def embedding(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        embedded.extend(range(2))

    monkeypatch.setattr(Study, "embedded", embedding)
    with pytest.raises(Interrupted, match=f"resume {out}$"):
        carry_out.run(registry.load(pipeline_config), out, progress=False)
    assert not embedded and len(Ledger.read(out / "ledger.jsonl")) == 0


@pytest.mark.parametrize("charged", [3, 6])
def test_it_goes_on_on_other_devices(pipeline_config, tmp_path, monkeypatch, charged):
    """A finished release is read; one that was not finished is another one, and is stated so."""
    out = tmp_path / "run"
    owner, name = (pipeline, "score") if charged == 3 else (artifacts, "commit")
    with stopped(owner, name, 1):
        carry_out.run(registry.load(pipeline_config), out, progress=False)
    monkeypatch.setattr(fred_query, "Execution", lambda: Execution(client_mesh(1)))
    with stopped(pipeline, "prefinetune"):
        carry_out.resume(out, progress=False)
    ledger = Ledger.read(out / "ledger.jsonl")
    assert len(ledger) == charged
    fred = json.loads((out / "artifacts/fred_scores/record.json").read_text())
    assert fred["statement"] == guarantee_of(ledger.charges, 1e-3).statement()


@pytest.mark.parametrize("name", ["fred_scores", "prefinetuned_far"])
def test_a_stage_that_was_altered_or_is_of_another_run_blocks_the_resume(straight, tmp_path, name):
    """TRUST 35: a flipped bit is found and the file is named."""
    out = Path(shutil.copytree(straight, tmp_path / "run"))
    path = out / "artifacts" / name / ("record.json" if name == "fred_scores" else "arrays.npz")
    whole = path.read_bytes()
    content = bytearray(whole)
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refusal(lambda: carry_out.resume(out, progress=False), f"{name}/{path.name}", CorruptFile)
    path.write_bytes(whole)
    record = json.loads((path.parent / "record.json").read_text())
    Artifacts(out / "artifacts", run="another").save(name, Artifact(record))
    refusal(lambda: carry_out.resume(out, progress=False), f"{name}: belongs to run")


def test_a_budget_below_fred_releases_nothing(pipeline_config, tmp_path):
    out = tmp_path / "run"
    config = registry.load(pipeline_config, ("--privacy.budget_epsilon", "2"))
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        carry_out.run(config, out, progress=False)
    assert not out.exists()


def test_a_pipeline_without_privacy_says_so_everywhere(pipeline_config, tmp_path):
    config = changed_config(
        pipeline_config,
        ("epsilon: 8.0, delta: 1e-3, clip_norm", "private: false, clip_norm"),
        ("  epsilon: 4.0\n", ""),
        ("other_candidates: true", "other_candidates: false"),
    )
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    assert outcome.record["fred"] is not None
    assert not outcome.record["private"]
    assert not outcome.record["fred"]["private"]
    assert outcome.record["fred"]["statement"].startswith("NOT PRIVATE")
    assert [row["private"] for row in outcome.record["table"]] == [True, True, False, False]
    candidates = outcome.record["fred"]["candidates"]
    assert [row["before"] is not None for row in candidates] == [True, False, False]
    assert outcome.record["fred"]["spearman"] == {"before": None}
    assert not (tmp_path / "run" / "simulation.html").exists()
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("NOT PRIVATE") > 4
    assert "SIMULATION" not in page


def test_prefinetuning_without_fred_uses_the_public_corpus(pipeline_config, tmp_path):
    text = pipeline_config.read_text()
    fred = text[text.index("fred:") : text.index("prefinetune:")]
    others = "other_candidates: true", "other_candidates: false"
    config = changed_config(pipeline_config, (fred, ""), others)
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    assert outcome.record["fred"] is None
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").summary(1e-3)["labels"] == {"fed_avg": 3}
    by_name = {row["model"]: row for row in outcome.record["table"]}
    assert by_name["prefinetuned on public"]["private"]
    assert by_name["prefinetuned on public"]["loss"] < by_name["untrained"]["loss"]
    assert "FreD" not in outcome.record["privacy"]
