"""`jaxpfl compare`: scores on the same data side by side, and what all runs cost together."""

import json

import dp_accounting
import pytest

from jaxpfl.cli import main
from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.experiments.compare import compare
from jaxpfl.privacy import Ledger
from jaxpfl.privacy.guarantee import Guarantee

CLIENTS = from_clients({f"{index}": {"x": [float(index)]} for index in range(20)})
NOISE = {"first": 2.0, "second": 3.0}


def write_run(folder, *, ledger=None, noise=2.0, scored_on="validation clients", private=True):
    """The public files of a run of two rounds, one of them evaluated, and its ledger."""
    folder.mkdir(parents=True)
    plan = {"delta": 1e-3, "rounds": 2, "clients_per_round": 5, "noise_multiplier": noise,
            "clip_norm": 1.0, "adaptive_clip": None}  # fmt: skip
    run = {
        "run": folder.name, "label": "fed_avg", "private": private, "note": "",
        "stamp": "" if private else "NOT PRIVATE", "statement": f"planned {folder.name}",
        "config": {"privacy": {"ledger": ledger and str(ledger)}}, "plan": plan,
        "evaluation": scored_on, "population": "clients of the test", "unit": "client",
        "queries": [{"label": "fed_avg", "plan": plan}],
    }  # fmt: skip
    loss = 1.0 / noise
    records = [
        {"round": 0, "evaluation": {"loss": 2.5, "accuracy": 0.1}},
        {"round": 2, "evaluation": {"loss": loss, "accuracy": 0.25}},
    ]
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    result = {"privacy": f"spent by {folder.name}", "rounds": 2}
    (folder / "result.json").write_text(json.dumps(result))
    with Ledger(ledger or folder / "ledger.jsonl", CLIENTS) as opened:
        event = dp_accounting.GaussianDpEvent(noise)
        opened.charge(event, "fed_avg", run=folder.name, round=0, identity=folder.name)
    return folder


def statement(*noises):
    events = [dp_accounting.GaussianDpEvent(noise) for noise in noises]
    return Guarantee.of_events(events, 1e-3).statement()


def test_scores_stand_side_by_side_and_ledgers_add_up(tmp_path, capsys):
    runs = [write_run(tmp_path / name, noise=noise) for name, noise in NOISE.items()]
    out = tmp_path / "out"
    assert main(["compare", *map(str, runs), "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["scores"]["loss"] for row in record["rows"]] == [0.5, pytest.approx(1 / 3)]
    assert {row["scored_on"] for row in record["rows"]} == {"validation clients"}
    assert record["privacy"] == {"first": "spent by first", "second": "spent by second"}
    assert record["jointly"].startswith(statement(2.0, 3.0))
    page = (out / "report.html").read_text()
    assert statement(2.0, 3.0) in page
    assert page.index("first") < page.index("second")
    assert (out / "plots" / "loss.png").exists()
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "text")]) == 0
    assert "25.00 %" in capsys.readouterr().out


def test_metrics_of_a_models_own_are_shown(tmp_path, capsys):
    runs = [write_run(tmp_path / name) for name in NOISE]
    for run in runs:
        evaluation = {"inverted_share": 0.677, "count": 1000.0}
        line = json.dumps({"round": 2, "evaluation": evaluation})
        (run / "metrics.jsonl").write_text(line + "\n")
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "inverted_share" in text
    assert "0.677" in text
    assert "count" not in text.split()


def test_a_shared_ledger_is_counted_once(tmp_path):
    shared = tmp_path / "shared.jsonl"
    runs = [write_run(tmp_path / name, ledger=shared, noise=z) for name, z in NOISE.items()]
    assert compare(runs, tmp_path / "out")["jointly"].startswith(statement(2.0, 3.0))


def test_other_releases_on_a_ledger_are_counted(tmp_path):
    runs = [write_run(tmp_path / name) for name in NOISE]
    with Ledger(runs[0] / "ledger.jsonl", CLIENTS) as ledger:
        event = dp_accounting.GaussianDpEvent(1.0)
        ledger.charge(event, "fred", run="another", round=0, identity="another")
    assert compare(runs, tmp_path / "out")["jointly"].startswith(statement(2.0, 2.0, 1.0))


def test_scores_on_other_data_have_a_table_of_their_own(tmp_path, capsys):
    runs = [write_run(tmp_path / name, scored_on=f"the {name} set") for name in NOISE]
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "Scored on the first set" in text
    assert "Scored on the second set" in text


def test_one_run_without_privacy_takes_it_from_all(tmp_path):
    runs = [write_run(tmp_path / name, private=name == "first") for name in NOISE]
    record = compare(runs, tmp_path / "out")
    assert record["jointly"].startswith("NOT PRIVATE")
    assert "NOT PRIVATE" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("mistake", ["one run", "twice", "no run", "no ledger"])
def test_mistakes_are_named(tmp_path, mistake):
    first, second = (write_run(tmp_path / name) for name in NOISE)
    (tmp_path / "empty").mkdir()
    given = {"one run": [first], "twice": [first, first], "no run": [first, tmp_path / "empty"]}
    if mistake == "no ledger":
        (second / "ledger.jsonl").unlink()
    names = {"one run": "two runs", "twice": "twice", "no run": "empty", "no ledger": "--ledger"}
    with pytest.raises(InputError, match=names[mistake]):
        compare(given.get(mistake, [first, second]), tmp_path / "out")


def test_a_ledger_can_be_named(tmp_path):
    first, second = (write_run(tmp_path / name) for name in NOISE)
    elsewhere = tmp_path / "elsewhere.jsonl"
    (second / "ledger.jsonl").rename(elsewhere)
    assert compare([first, second], tmp_path / "out", ledger=elsewhere)["jointly"]
