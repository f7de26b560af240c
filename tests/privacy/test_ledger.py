"""The ledger: what was charged stays charged, adds up, and stops a run in time."""

import json
import math
import multiprocessing
import os

import dp_accounting
import pytest

from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, RunLocked
from jaxpfl.privacy import Budget, Ledger, Plan, accounting, events
from tests.plans import flat_plan

CLIENTS = "f" * 64
ROUND = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5))
OTHER = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(4.0))
EVERYONE = dp_accounting.GaussianDpEvent(8.0)
FIXED = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(2.0))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "ledger.jsonl"


def filled(path, rounds: int = 5) -> str:
    """A closed ledger of some rounds; its head."""
    with Ledger(path, CLIENTS) as ledger:
        for round in range(rounds):
            ledger.charge(ROUND, "fed_avg", run="a", round=round)
        return ledger.head


def test_charges_add_up_to_the_plans_epsilon(path):
    """TRUST 29: the ledger and the plan agree to the last bit."""
    plan = flat_plan(
        population=1000,
        clients_per_round=50,
        rounds=7,
        clip_norm=1,
        noise_multiplier=1.2,
        delta=1e-5,
    )
    with Ledger(path, CLIENTS) as ledger:
        assert ledger.spent(1e-5) == 0
        for round in range(1, 8):
            ledger.charge(plan.round_event(), "fed_avg", run="a", round=round)
            assert ledger.spent(1e-5) == plan.epsilon(round)
        assert ledger.spent(1e-5, "rdp") == plan.epsilon(accountant="rdp")
    assert Ledger.read(path).spent(1e-5) == plan.epsilon()


def test_several_algorithms_compose_and_none_can_be_forgotten(path):
    """TRUST 29: labels and runs share one epsilon; without any one it is smaller."""
    kinds = {"fed_avg": (ROUND, 10), "fed_avg_gan": (OTHER, 3), "fred": (EVERYONE, 1)}
    with Ledger(path, CLIENTS) as ledger:
        for label, (event, rounds) in kinds.items():
            for round in range(rounds):
                ledger.charge(event, label, run=label, round=round)
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
        partial = accounting.epsilon(
            dp_accounting.ComposedDpEvent(rest), 1e-5, "pld", "add_or_remove_one"
        )
        assert partial < whole - 1e-3


def test_a_charge_is_on_the_disk_before_it_returns(path, monkeypatch):
    """TRUST 34: written, then fsynced, file and at creation folder; then only it returns."""
    synced = []
    real = os.fsync

    def watched(descriptor):
        synced.append((os.fstat(descriptor).st_ino, path.stat().st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    ledger = Ledger(path, CLIENTS)
    file, folder = path.stat().st_ino, path.parent.stat().st_ino
    assert {inode for inode, _ in synced} == {file, folder}
    synced.clear()
    ledger.charge(ROUND, "fed_avg", run="a", round=0)
    assert synced == [(file, path.stat().st_size)]
    assert json.loads(path.read_text().splitlines()[-1])["round"] == 0
    ledger.close()


def test_a_repeated_round_is_charged_once(path):
    """TRUST 34: a resumed run replays charges; another event under the name is refused."""
    filled(path)
    before = path.read_bytes()
    with Ledger(path, CLIENTS) as ledger:
        for round in range(5):
            ledger.charge(ROUND, "fed_avg", run="a", round=round)
        assert path.read_bytes() == before
        with pytest.raises(InputError, match="another event"):
            ledger.charge(OTHER, "fed_avg", run="a", round=3)
        assert path.read_bytes() == before
        spent = ledger.spent(1e-5)
        ledger.charge(ROUND, "fed_avg", run="b", round=3)
        ledger.charge(ROUND, "again", run="a", round=3)
        assert len(ledger) == 7
        assert ledger.spent(1e-5) > spent


def test_equal_runs_write_equal_ledgers(tmp_path):
    """TRUST 37: no clock, no path, no process in the file."""
    for name in ("one", "two"):
        filled(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_budget_stops_before_anything_is_written(path):
    """TRUST 30: exactly as many rounds as fit, then nothing, also after reopening."""
    limit = accounting.epsilon(
        dp_accounting.SelfComposedDpEvent(ROUND, 6), 1e-5, "pld", "add_or_remove_one"
    )
    budget = Budget(limit, 1e-5)
    with Ledger(path, CLIENTS, budget=budget) as ledger:
        assert ledger.affordable(ROUND) == 6
        for round in range(6):
            ledger.charge(ROUND, "fed_avg", run="a", round=round)
        assert ledger.affordable(ROUND) == 0
        before = path.read_bytes()
        with pytest.raises(BudgetExhausted, match="nothing was released") as caught:
            ledger.charge(ROUND, "fed_avg", run="a", round=6)
        assert caught.value.exit_code == 3
        assert path.read_bytes() == before
        assert ledger.spent(1e-5) <= limit
        ledger.charge(ROUND, "fed_avg", run="a", round=2)  # a replay costs nothing
    with Ledger(path, CLIENTS) as again, pytest.raises(BudgetExhausted):
        again.charge(ROUND, "fed_avg", run="b", round=0)
    wider = Budget(100.0, 1e-5)
    with Ledger(path, CLIENTS, budget=wider) as again, pytest.raises(BudgetExhausted):
        again.charge(ROUND, "fed_avg", run="b", round=0)
    assert path.read_bytes() == before


def test_a_budget_of_mixed_releases_is_kept(path):
    """TRUST 30: the quick path for equal rounds must not let another kind through."""
    budget = Budget(1.5, 1e-5)
    with Ledger(path, CLIENTS, budget=budget) as ledger:
        made = 0
        with pytest.raises(BudgetExhausted):
            for round in range(10_000):
                for label, event in (("one", ROUND), ("two", OTHER)):
                    ledger.charge(event, label, run="a", round=round)
                    made += 1
        assert made == len(ledger) > 2
        assert 1.4 < ledger.spent(1e-5) <= 1.5


def test_a_steady_run_does_not_account_anew_for_every_charge(path, monkeypatch):
    """Epsilon is computed ahead: a charge costs no composition, but for a few."""
    computed = []
    real = accounting.epsilon_of_counts

    def counting(*arguments):
        computed.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(accounting, "epsilon_of_counts", counting)
    with Ledger(path, CLIENTS, budget=Budget(8.0, 1e-5)) as ledger:
        for round in range(200):
            ledger.charge(ROUND, "fed_avg", run="a", round=round)
    assert 0 < len(computed) <= 20


def test_a_release_without_noise_fits_no_budget_and_is_named(path, tmp_path):
    """TRUST 11: infinite epsilon, in the file and in the summary."""
    nothing = Plan.without_privacy(population=10, clients_per_round=5, rounds=2).round_event()
    with Ledger(path, CLIENTS, budget=Budget(8.0, 1e-5)) as ledger:
        with pytest.raises(BudgetExhausted):
            ledger.charge(nothing, "fed_avg", run="a", round=0)
        assert len(ledger) == 0
    with Ledger(tmp_path / "free", CLIENTS) as ledger:
        assert ledger.affordable(nothing) is None
        ledger.charge(nothing, "fed_avg", run="a", round=0)
        assert ledger.spent(1e-5) == math.inf
        assert ledger.summary(1e-5)["private"] is False
    assert '"non_private"' in (tmp_path / "free").read_text()


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf"), "8", True, None])
def test_a_budget_must_be_two_good_numbers(value):
    """TRUST 9"""
    with pytest.raises(InputError, match="budget epsilon"):
        Budget(value, 1e-5)
    with pytest.raises(InputError, match="budget delta"):
        Budget(1.0, value)


def test_two_adjacencies_do_not_share_a_ledger(path):
    """TRUST 13: no common epsilon, so no common file."""
    with Ledger(path, CLIENTS) as ledger:
        ledger.charge(ROUND, "fed_avg", run="a", round=0)
        with pytest.raises(InputError, match="no common epsilon"):
            ledger.charge(FIXED, "fed_avg", run="a", round=1)
        assert len(ledger) == 1


def test_rounds_of_fixed_size_are_charged_under_replace_one(path):
    plan = flat_plan(
        population=100,
        clients_per_round=10,
        rounds=4,
        clip_norm=1,
        noise_multiplier=4.0,
        delta=1e-3,
        sampling="fixed",
    )
    with Ledger(path, CLIENTS, budget=Budget(plan.epsilon(), 1e-3)) as ledger:
        for round in range(4):
            ledger.charge(plan.round_event(), "fed_avg", run="a", round=round)
        assert ledger.summary(1e-3)["adjacency"] == "replace_one"
        assert ledger.spent(1e-3) == plan.epsilon()
        with pytest.raises(BudgetExhausted):
            ledger.charge(plan.round_event(), "fed_avg", run="a", round=4)


def test_a_ledger_belongs_to_its_population(path):
    filled(path)
    with pytest.raises(InputError, match="another population"):
        Ledger(path, "e" * 64)
    Ledger(path, CLIENTS).close()


def _edit(lines):
    lines[3] = lines[3].replace('"round":2', '"round":9')


def _cheaper(lines):
    lines[3] = lines[3].replace('"noise_multiplier":1.5', '"noise_multiplier":99.0')


def _delete(lines):
    del lines[3]


def _swap(lines):
    lines[2], lines[3] = lines[3], lines[2]


def _repeat(lines):
    lines.insert(3, lines[2])


def _other_budget(lines):
    lines[0] = lines[0].replace('"budget":null', '"budget":{"delta":0.1,"epsilon":99.0}')


def _space(lines):
    lines[3] = lines[3].replace(":", ": ", 1)


def _no_json(lines):
    lines[3] = "x" + lines[3]


@pytest.mark.parametrize(
    "damage",
    [_edit, _cheaper, _delete, _swap, _repeat, _other_budget, _space, _no_json],
)
def test_an_altered_line_is_refused_by_file_and_number(path, damage):
    """TRUST 40: edited, reordered, deleted, inserted; on opening, reading and verifying."""
    filled(path)
    open_before = Ledger.read(path)
    lines = path.read_text().splitlines()
    damage(lines)
    path.write_text("\n".join(lines) + "\n")
    number = r"line [1-5] was altered"
    with pytest.raises(CorruptFile, match=number) as caught:
        Ledger(path, CLIENTS)
    assert str(path) in str(caught.value)
    for look in (lambda: Ledger.read(path), open_before.verify):
        with pytest.raises(CorruptFile, match=number):
            look()


def test_a_forged_chain_does_not_contain_the_old_head(path, tmp_path):
    """TRUST 40: whoever recomputes all hashes still misses what a checkpoint kept."""
    head = filled(path)
    forged = filled(tmp_path / "forged", rounds=4)
    assert Ledger.read(path).contains(forged)
    path.write_bytes((tmp_path / "forged").read_bytes())
    ledger = Ledger.read(path)
    assert not ledger.contains(head)
    with pytest.raises(CorruptFile, match="cut off or replaced"):
        ledger.verify(head)
    ledger.verify(forged)


def test_lines_cut_off_the_end_are_found_by_the_head(path):
    """TRUST 40: the chain alone cannot tell; the head kept elsewhere can."""
    head = filled(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-2]) + "\n")
    with Ledger(path, CLIENTS) as ledger:
        assert len(ledger) == 3
        with pytest.raises(CorruptFile, match="cut off"):
            ledger.verify(head)


def test_an_open_ledger_notices_that_its_file_was_replaced(path, tmp_path):
    """TRUST 40"""
    filled(tmp_path / "short", rounds=2)
    filled(path)
    with Ledger(path, CLIENTS) as ledger:
        path.write_bytes((tmp_path / "short").read_bytes())
        with pytest.raises(CorruptFile, match="altered while it was open"):
            ledger.verify()


def test_a_torn_last_line_is_a_charge_that_never_returned(path):
    """TRUST 33: after a crash at any byte of the last write the charge is whole or gone."""
    filled(path, rounds=3)
    whole = path.read_bytes()
    filled(path, rounds=4)
    longer = path.read_bytes()
    for cut in range(len(whole), len(longer) + 1):
        path.write_bytes(longer[:cut])
        assert len(Ledger.read(path)) == (4 if cut >= len(longer) - 1 else 3)
        with Ledger(path, CLIENTS) as ledger:
            kept = cut >= len(longer) - 1
            assert path.read_bytes() == (longer if kept else whole)
            ledger.charge(ROUND, "fed_avg", run="a", round=3)
        assert path.read_bytes() == longer


def test_a_torn_first_line_is_an_empty_ledger(path):
    """TRUST 33: a crash at creation."""
    filled(path, rounds=0)
    header = path.read_bytes()
    for cut in (0, 1, len(header) // 2, len(header) - 2):
        path.write_bytes(header[:cut])
        with pytest.raises(CorruptFile, match="empty"):
            Ledger.read(path)
        Ledger(path, CLIENTS).close()
        assert path.read_bytes() == header


def test_a_torn_line_in_the_middle_is_no_crash(path):
    """TRUST 40: only the last write can be cut short."""
    filled(path)
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CorruptFile, match="line 3"):
        Ledger(path, CLIENTS)


def test_a_full_disk_leaves_no_charge_and_no_half_line(path, monkeypatch):
    """TRUST 36: the error is the system's, the file is as before, nobody goes on charging."""
    filled(path)
    before = path.read_bytes()
    ledger = Ledger(path, CLIENTS)
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))
        with pytest.raises(OSError, match="cannot be written"):
            ledger.charge(ROUND, "fed_avg", run="a", round=5)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="closed"):
        ledger.charge(ROUND, "fed_avg", run="a", round=5)
    with Ledger(path, CLIENTS) as again:
        again.charge(ROUND, "fed_avg", run="a", round=5)


def test_a_ledger_opened_for_reading_cannot_be_charged(path):
    filled(path)
    with pytest.raises(InputError, match="reading"):
        Ledger.read(path).charge(ROUND, "fed_avg", run="a", round=9)


def _try_to_open(path, answer):
    try:
        Ledger(path, CLIENTS).close()
        answer.put("opened")
    except RunLocked as error:
        answer.put(str(error))


def test_a_second_process_is_refused(path):
    """TRUST 37: the kernel's lock, gone with its holder; readers need none."""
    filled(path)
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()

    def ask() -> str:
        process = context.Process(target=_try_to_open, args=(path, answer))
        process.start()
        said = answer.get(timeout=120)
        process.join()
        return said

    with Ledger(path, CLIENTS):
        assert "another run holds this ledger" in ask()
        assert len(Ledger.read(path)) == 5
        with pytest.raises(RunLocked):
            Ledger(path, CLIENTS)
    assert ask() == "opened"


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
def test_a_charge_needs_a_round_a_label_and_a_run(path, round):
    with Ledger(path, CLIENTS) as ledger:
        with pytest.raises(InputError, match="round"):
            ledger.charge(ROUND, "fed_avg", run="a", round=round)
        with pytest.raises(InputError, match="label"):
            ledger.charge(ROUND, "", run="a", round=0)
        with pytest.raises(InputError, match="run"):
            ledger.charge(ROUND, "fed_avg", run=None, round=0)  # type: ignore
        assert len(ledger) == 0


def test_the_file_holds_public_things_only(path):
    """TRUST 40: exactly these fields; no times, ids, sizes or keys."""
    filled(path)
    header, *charges = (json.loads(line) for line in path.read_text().splitlines())
    assert set(header) == {"format", "population", "unit", "budget", "previous", "hash"}
    for charge in charges:
        assert set(charge) == {"run", "label", "round", "event", "previous", "hash"}
