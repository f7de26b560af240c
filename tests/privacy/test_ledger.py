"""The ledger: what was charged stays charged, adds up, and stops a run in time."""

import json
import math
import shutil

import dp_accounting
import pytest

from jaxpfl import cli
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.privacy import Budget, Ledger, accounting, events
from jaxpfl.privacy.ledger import Charge
from tests.plans import epsilon_of
from tests.privacy.ledgers import (
    CLIENTS,
    EVERYONE,
    FIXED,
    OTHER,
    ROUND,
    charge,
    composed,
    filled,
    key_of,
    synced,
)
from tests.refusals import refusal


def test_several_algorithms_compose_and_none_can_be_forgotten(path):
    """TRUST 29: labels and runs share one epsilon; without any one it is smaller."""
    kinds = {"fed_avg": (ROUND, 10), "fed_avg_gan": (OTHER, 3), "fred": (EVERYONE, 1)}
    with Ledger(path, CLIENTS) as ledger:
        for label, (event, rounds) in kinds.items():
            for round in range(rounds):
                charge(ledger, round, event, label)
        whole = ledger.spent(1e-5)
        summary = ledger.summary(1e-5)
    assert summary["labels"] == {"fed_avg": 10, "fed_avg_gan": 3, "fred": 1}
    assert summary["epsilon"] == whole
    assert summary["unit"] == "client"
    assert summary["adjacency"] == "add_or_remove_one"
    assert summary["accountant"] == "pld"
    for left_out in kinds:
        rest = [
            dp_accounting.SelfComposedDpEvent(event, rounds)
            for label, (event, rounds) in kinds.items()
            if label != left_out
        ]
        partial = epsilon_of(dp_accounting.ComposedDpEvent(rest), 1e-5, "pld", "add_or_remove_one")
        assert partial < whole - 1e-3


def test_a_charge_is_on_the_disk_before_it_returns(path, monkeypatch):
    """TRUST 34: written, then fsynced, with key and folder at creation; then it returns."""
    seen = synced(monkeypatch)
    ledger = Ledger(path, CLIENTS)
    places = path, key_of(path), path.parent, key_of(path).parent
    file, key, folder, private = (place.stat().st_ino for place in places)
    size = path.stat().st_size
    assert {inode for inode, _ in seen} == {file, key, folder, private}
    # The key before the first line, which comes last.
    assert seen[-1] == (file, size) and (key, 32) in seen
    assert all(size == 0 for inode, size in seen[:-1] if inode == file)
    seen.clear()
    charge(ledger, 0)
    assert seen == [(file, path.stat().st_size)]
    assert json.loads(path.read_text().splitlines()[-1])["round"] == 0
    ledger.close()


def test_a_repeated_release_is_charged_once(path):
    """TRUST 34: a resumed run replays charges; another event under its identity is refused."""
    filled(path)
    before = path.read_bytes()
    with Ledger(path, CLIENTS) as ledger:
        assert ledger.charges[3] == Charge("a", "fed_avg", 3, ROUND, "fed_avg a 3")
        assert ledger.charged("fed_avg a 3") and not ledger.charged("fed_avg b 3")
        for round in range(5):
            charge(ledger, round)
        # Run, label and round are for people.
        charge(ledger, 7, label="x", run="y", identity="fed_avg a 3")
        assert path.read_bytes() == before
        refusal(lambda: charge(ledger, 3, OTHER), "another event")
        assert path.read_bytes() == before
        spent = ledger.spent(1e-5)
        charge(ledger, 3, identity="another one")
        charge(ledger, 3, OTHER, identity="a third")
        assert len(ledger) == 7 and ledger.charged("a third")
        assert ledger.spent(1e-5) > spent
    assert Ledger.read(path).charges == ledger.charges


def test_what_came_out_is_recorded_and_the_first_one_counts(path):
    with Ledger(path, CLIENTS) as ledger:
        charge(ledger, 0)
        assert ledger.recorded("fed_avg a 0") is None
        ledger.record("fed_avg a 0", "one")
        before = path.read_bytes()
        ledger.record("fed_avg a 0", "one")
        assert path.read_bytes() == before, "a replay adds nothing"
        charge(ledger, 1)
        ledger.record("fed_avg a 0", "two")
        ledger.record("fed_avg a 0", "one")
        ledger.record("fed_avg a 1", "two")
        for refused in ("", None, 3):
            with pytest.raises(InputError, match="hash of a release"):
                ledger.record("fed_avg a 0", refused)
    with Ledger(path, CLIENTS) as again:
        for found in (ledger, again, Ledger.read(path)):
            assert found.recorded("fed_avg a 0") == "one"
            assert found.recorded("fed_avg a 1") == "two"
            assert found.recorded("fed_avg a 2") is None
            assert len(found) == 2
        size = path.stat().st_size
        again.record("fed_avg a 0", "two")
        assert path.stat().st_size == size
    refusal(lambda: again.record("fed_avg a 0", "three"), "closed")


def test_equal_runs_write_equal_ledgers(tmp_path):
    """TRUST 37: no clock, no path, no process in the file; but a secret of its own."""
    filled(tmp_path / "one")
    shutil.copy(key_of(tmp_path / "one"), key_of(tmp_path / "two"))
    for name in ("two", "three"):
        filled(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "three").read_bytes()


def test_the_budget_stops_before_anything_is_written(path):
    """TRUST 29, 30: charges add up to the last bit, and exactly as many fit as should."""
    limit = composed(ROUND, 6)
    budget = Budget(limit, 1e-5)
    with Ledger(path, CLIENTS, budget=budget) as ledger:
        assert ledger.spent(1e-5) == 0
        assert ledger.fits(dp_accounting.SelfComposedDpEvent(ROUND, 6))
        assert not ledger.fits(dp_accounting.SelfComposedDpEvent(ROUND, 7))
        for round in range(6):
            charge(ledger, round)
            assert ledger.spent(1e-5) == composed(ROUND, round + 1)
        assert ledger.spent(1e-5, "rdp") == composed(ROUND, 6, accountant="rdp")
        assert not ledger.fits(ROUND)
        before = path.read_bytes()
        with pytest.raises(BudgetExhausted, match="nothing was released") as caught:
            charge(ledger, 6)
        assert caught.value.exit_code == 3
        charge(ledger, 2)  # a replay costs nothing
    assert Ledger.read(path).spent(1e-5) == limit
    for again in (None, Budget(100.0, 1e-5)):
        with Ledger(path, CLIENTS, budget=again) as ledger, pytest.raises(BudgetExhausted):
            charge(ledger, 0, run="b")
    assert path.read_bytes() == before


def test_a_budget_of_mixed_releases_is_kept(path):
    """TRUST 30: the quick path for equal rounds must not let another kind through."""
    budget = Budget(1.0, 1e-5)
    with Ledger(path, CLIENTS, budget=budget) as ledger:
        made = 0
        with pytest.raises(BudgetExhausted):
            for round in range(10_000):
                for label, event in (("one", ROUND), ("two", OTHER)):
                    charge(ledger, round, event, label)
                    made += 1
        assert made == len(ledger) > 2
        assert 0.9 < ledger.spent(1e-5) <= 1.0


@pytest.mark.parametrize("planned", [False, True])
def test_a_steady_run_does_not_account_anew_for_every_charge(planned, path, monkeypatch):
    """Epsilon is computed ahead: a charge costs no composition, but for a few; of a plan, none."""
    computed = []
    real = accounting.epsilon_of_counts

    def counting(*arguments):
        computed.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(accounting, "epsilon_of_counts", counting)
    with Ledger(path, CLIENTS, budget=Budget(8.0, 1e-5)) as ledger:
        if planned:
            assert ledger.fits(dp_accounting.SelfComposedDpEvent(ROUND, 200))
        for round in range(200):
            charge(ledger, round)
    assert 0 < len(computed) <= (1 if planned else 20)


def test_a_release_without_noise_fits_no_budget_and_is_named(path, tmp_path):
    """TRUST 11: infinite epsilon, in the file and in the summary."""
    nothing = dp_accounting.NonPrivateDpEvent()
    with Ledger(path, CLIENTS, budget=Budget(8.0, 1e-5)) as ledger:
        with pytest.raises(BudgetExhausted):
            charge(ledger, 0, nothing)
        assert len(ledger) == 0
    with Ledger(tmp_path / "free", CLIENTS) as ledger:
        assert ledger.fits(nothing)
        charge(ledger, 0, nothing)
        assert ledger.spent(1e-5) == math.inf
        assert ledger.summary(1e-5)["private"] is False
    assert '"non_private"' in (tmp_path / "free").read_text()


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf"), "8", True, None])
def test_a_budget_must_be_two_good_numbers(value):
    """TRUST 9"""
    refusal(lambda: Budget(value, 1e-5), "budget epsilon")
    refusal(lambda: Budget(1.0, value), "budget delta")


def test_several_ledgers_cost_what_all_their_charges_cost(tmp_path, capsys):
    """TRUST 29: as one ledger; where there is no common epsilon, a sentence says so."""
    names = ["one", "two", "fixed", "example"]
    one, two, other, unit = (tmp_path / name / "ledger.jsonl" for name in names)
    for path, rounds, event in ((one, 5, ROUND), (two, 3, ROUND), (other, 2, FIXED)):
        filled(path, rounds, event)
    Ledger(unit, CLIENTS, unit="example").close()
    assert cli.main(["budget", str(one), str(two), "--delta", "1e-5", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["epsilon"] == composed(ROUND, 8) and record["charges"] == 8
    assert [each["epsilon"] for each in record["ledgers"]] == [composed(ROUND, n) for n in (5, 3)]
    shutil.copytree(one.parent, tmp_path / "copy")
    refused = {
        tmp_path / "copy/ledger.jsonl": "a copy of it",
        other: "replace one",
        unit: "example",
    }
    for path, said in refused.items():
        assert cli.main(["budget", str(one), str(path), "--delta", "1e-5"]) == 2
        assert said in capsys.readouterr().err


def test_rounds_of_fixed_size_are_charged_under_replace_one(path):
    """TRUST 13: and share no file with others, as there is no common epsilon."""
    limit = composed(FIXED, 4, 1e-3, "rdp")
    with Ledger(path, CLIENTS, budget=Budget(limit, 1e-3)) as ledger:
        for round in range(4):
            charge(ledger, round, FIXED)
        refusal(lambda: charge(ledger, 4, ROUND), "no common epsilon")
        assert ledger.summary(1e-3)["adjacency"] == "replace_one"
        assert ledger.summary(1e-3)["accountant"] == "rdp"
        assert ledger.spent(1e-3) == limit
        with pytest.raises(BudgetExhausted):
            charge(ledger, 4, FIXED)


@pytest.mark.parametrize(
    "event",
    [
        ROUND,
        EVERYONE,
        FIXED,
        dp_accounting.NonPrivateDpEvent(),
        dp_accounting.NoOpDpEvent(),
        dp_accounting.SelfComposedDpEvent(ROUND, 3),
        dp_accounting.ComposedDpEvent([ROUND, dp_accounting.SelfComposedDpEvent(OTHER, 2)]),
        dp_accounting.GaussianDpEvent(0.1 + 0.2),
    ],
    ids=str,
)
def test_an_event_survives_the_file(event):
    """Bit for bit, also 0.1 + 0.2."""
    text = json.dumps(events.to_json(event), allow_nan=False)
    assert events.from_json(json.loads(text)) == event


@pytest.mark.parametrize("round", [-1, 1.5, True, "1", None])
def test_a_charge_needs_a_round_a_label_a_run_and_an_identity(path, round):
    with Ledger(path, CLIENTS) as ledger:
        refusal(lambda: charge(ledger, round), "round")
        good = {"label": "fed_avg", "run": "a", "identity": "i"}
        for name in good:
            for wrong in ("", None, 3):
                with pytest.raises(InputError, match=name):
                    ledger.charge(ROUND, round=0, **(good | {name: wrong}))
        assert len(ledger) == 0
