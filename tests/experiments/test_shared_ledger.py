"""Several systems on the same clients and one ledger: each statement shows what all cost."""

import json
import re

import dp_accounting
import pytest

from jaxpfl.cli import main
from jaxpfl.experiments import carry_out
from jaxpfl.privacy import accounting
from jaxpfl.privacy.ledger import Ledger, guarantee_of

# Of `tiny_config`: private, with a budget that its ledger keeps.
PRIVATE = [
    *("--privacy.epsilon", "8", "--privacy.noise_multiplier", "null"),
    *("--privacy.accountant", "null", "--privacy.budget_epsilon", "30"),
]


def run_of(config, ledger, *more) -> list[str]:
    """The command of a run on a ledger."""
    changes = ["--training.rounds", "2", "--evaluation.every", "0", "--privacy.ledger", ledger]
    changes += ["--evaluation.declared_public", "False", "--run.reproducible_noise", "False"]
    return [*map(str, ["run", config, *changes, *more])]


def carried_out(capsys, *arguments) -> str:
    """The statement that a command ends with."""
    assert main([*map(str, arguments), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    return record.get("privacy") or record["statement"]


def epsilons(statement: str) -> list[float]:
    return [float(found) for found in re.findall(r"epsilon = ([0-9.]+)", statement)]


def spent(ledger: Ledger, runs: set[str]) -> float:
    own = [charge for charge in ledger.charges if charge.run in runs]
    return guarantee_of(own, 1e-3).epsilon()


def test_fred_on_the_source_and_a_run_on_its_training_split_share_one_ledger(
    tiny_config, tmp_path, capsys
):
    """TRUST 29: a split keeps the clients of its source, so both are charged to the one ledger."""
    shared, data = tmp_path / "shared.jsonl", tiny_config.parent
    fred = carried_out(
        capsys, "fred", "--private", data / "clients.jsonl", "--candidates",
        data / "public.jsonl", "--epsilon", 4, "--delta", 1e-3, "--embedder", "hashed:8",
        "--ledger", shared, "--out", tmp_path / "fred",
    )  # fmt: skip
    first = {charge.run for charge in Ledger.read(shared).charges}
    run = carried_out(capsys, *run_of(tiny_config, shared, *PRIVATE, "--out", tmp_path / "run"))
    ledger = Ledger.read(shared)
    second = {charge.run for charge in ledger.charges} - first
    assert (len(first), len(second)) == (1, 1)
    assert len(ledger) == 3 + 2
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    total = ledger.spent(1e-3)
    for found, expected in (
        (epsilons(fred), [spent(ledger, first)]),
        (epsilons(run), [spent(ledger, second), total]),
    ):
        assert found == pytest.approx(expected, rel=1e-3)
    assert total > 1.1 * max(spent(ledger, first), spent(ledger, second))
    assert fred.endswith("if nothing else is released from these clients")


def test_a_later_run_keeps_the_limit_that_the_first_one_gave_the_ledger(
    tiny_config, tmp_path, capsys
):
    """Without one of its own, its epsilon of 8 is no limit of what all cost."""
    shared, without = tmp_path / "shared.jsonl", PRIVATE[:-2]
    carried_out(capsys, *run_of(tiny_config, shared, *PRIVATE, "--out", tmp_path / "a"))
    carried_out(capsys, *run_of(tiny_config, shared, *without, "--out", tmp_path / "b"))
    assert 8 < Ledger.read(shared).spent(1e-3) < 30
    # Where the first run names none, its epsilon is that of all.
    shared = tmp_path / "own.jsonl"
    carried_out(capsys, *run_of(tiny_config, shared, *without, "--out", tmp_path / "c"))
    assert main(run_of(tiny_config, shared, *without, "--out", tmp_path / "d")) == 3
    assert len(Ledger.read(shared)) == 2


def test_a_sweep_on_one_ledger_says_what_all_points_cost_by_both_accountants(
    pipeline_config, tmp_path, capsys
):
    """By hand with dp_accounting: FreD, and the rounds of both points, as they are charged."""
    shared, sweep = tmp_path / "shared.jsonl", tmp_path / "sweep.yaml"
    changes = {
        "privacy.ledger": [str(shared)],
        "privacy.budget_epsilon": [20.0],
        "privacy.accountant": ["rdp"],
        "prefinetune.other_candidates": [False],
    }
    mapping = {"base": str(pipeline_config), "metric": "epsilon", "grid": changes}
    mapping["cases"] = {"one": {}, "other": {"training.rounds": 2}}
    sweep.write_text(json.dumps(mapping))
    assert main(["sweep", str(sweep), "--out", str(tmp_path / "out")]) == 0
    shown, record = capsys.readouterr().out, json.loads((tmp_path / "out/sweep.json").read_text())
    rows, events = record["ledger"], [charge.event for charge in Ledger.read(shared).charges]
    assert [row["releases of"] for row in rows] == [
        "fred",
        "fed_avg",
        "fred",
        "fed_avg",
        "together",
    ]
    assert rows[-1]["releases"] == len(events) == 2 * 3 + 3 + 2
    for name, accountant in (
        ("epsilon by PLD", dp_accounting.pld.PLDAccountant(value_discretization_interval=5e-4)),
        ("epsilon by RDP", dp_accounting.rdp.RdpAccountant(accounting.RDP_ORDERS)),
    ):
        for event in events:
            accountant.compose(event)
        assert rows[-1][name] == pytest.approx(accountant.get_epsilon(1e-3), rel=2e-3)
    pld, rdp = ([row[f"epsilon by {name}"] for row in rows] for name in ("PLD", "RDP"))
    assert max(pld[:-1]) < pld[-1] < rdp[-1] < 20.0
    assert "epsilon by PLD" in shown and "epsilon by RDP" in shown
    assert record["note"].endswith(rows[-1]["statement"])
    assert "One ledger" in (tmp_path / "out" / "report.html").read_text()


def test_a_study_whose_ledger_lies_elsewhere_writes_what_is_private(synthetic_config, tmp_path):
    """Nothing else has made its private folder."""
    config = synthetic_config("popri", "--privacy.ledger", str(tmp_path / "shared.jsonl"))
    out = carry_out.run(config, tmp_path / "run", progress=False).out
    assert (out / "private" / "leakage.json").exists()
    assert (out / "private").stat().st_mode & 0o77 == 0


def test_a_run_without_privacy_that_no_budget_has_room_for_says_so(tiny_config, tmp_path, capsys):
    """And not that its delta, which it has none of, is wrong."""
    ledger = tmp_path / "shared.jsonl"
    carried_out(capsys, *run_of(tiny_config, ledger, *PRIVATE, "--out", tmp_path / "first"))
    without = ["--privacy.private", "False", "--privacy.noise_multiplier", "null"]
    without += ["--privacy.delta", "null", "--out", tmp_path / "second"]
    assert main(run_of(tiny_config, ledger, *without)) == 3
    assert "would exceed the budget" in capsys.readouterr().err
    assert len(Ledger.read(ledger).charges) == 2
