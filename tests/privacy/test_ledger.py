"""The ledger: what was charged stays charged, adds up, and stops a run in time."""

import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import stat
import warnings

import dp_accounting
import numpy as np
import pytest

from jaxpfl.data import Population
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, RunLocked
from jaxpfl.privacy import Budget, Ledger, accounting, events, sources
from jaxpfl.privacy.chain import Chain
from jaxpfl.privacy.ledger import Charge, SameClientsWarning

NAMES = [hashlib.sha256(f"name {k}".encode()).hexdigest()[:10] for k in range(40)]
ROUND = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5))
OTHER = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(4.0))
EVERYONE = dp_accounting.GaussianDpEvent(8.0)
FIXED = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(2.0))


def people(names=NAMES, seed: int = 0) -> Population:
    """Clients with 3 examples each, which follow from the seed and the client's place."""
    x = np.random.default_rng(seed).normal(size=(3 * len(names), 2))
    return Population({"x": x}, 3 * np.arange(len(names) + 1), list(names))


CLIENTS = people()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "ledger.jsonl"


def charge(ledger, round=0, event=ROUND, label="fed_avg", run="a", identity=None) -> None:
    """Charges under an identity of its own for each (label, run, round)."""
    identity = identity or f"{label} {run} {round}"
    ledger.charge(event, label, run=run, round=round, identity=identity)


def filled(path, rounds: int = 5) -> str:
    """A closed ledger of some rounds; its head."""
    with Ledger(path, CLIENTS) as ledger:
        for round in range(rounds):
            charge(ledger, round)
        return ledger.head


def key_of(path):
    return path.parent / "private" / f"{path.name}.key"


def composed(event, rounds: int, delta: float = 1e-5, accountant="pld") -> float:
    """The epsilon of equal rounds, without a ledger."""
    adjacency = events.adjacency(event)
    repeated = dp_accounting.SelfComposedDpEvent(event, rounds)
    return accounting.epsilon(repeated, delta, accountant, adjacency)


def test_charges_add_up_to_the_composed_epsilon(path):
    """TRUST 29: to the last bit."""
    with Ledger(path, CLIENTS) as ledger:
        assert ledger.spent(1e-5) == 0
        for round in range(1, 8):
            charge(ledger, round)
            assert ledger.spent(1e-5) == composed(ROUND, round)
        assert ledger.spent(1e-5, "rdp") == composed(ROUND, 7, accountant="rdp")
    assert Ledger.read(path).spent(1e-5) == composed(ROUND, 7)


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
        partial = accounting.epsilon(
            dp_accounting.ComposedDpEvent(rest), 1e-5, "pld", "add_or_remove_one"
        )
        assert partial < whole - 1e-3


def synced(monkeypatch) -> list:
    """Which inodes are synced, and at which size, from now on."""
    seen = []
    real = os.fsync

    def watched(descriptor):
        seen.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return seen


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


def test_what_was_charged_before_a_kill_is_synced_before_it_counts(path, monkeypatch):
    """TRUST 34: a line that no fsync followed may not let a replay release without one."""
    filled(path)
    seen = synced(monkeypatch)
    with Ledger(path, CLIENTS) as ledger:
        assert seen == [(path.stat().st_ino, path.stat().st_size)]
        charge(ledger, 4)
        assert len(seen) == 1


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
        with pytest.raises(InputError, match="another event"):
            charge(ledger, 3, OTHER)
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
    with pytest.raises(InputError, match="closed"):
        again.record("fed_avg a 0", "three")


def test_a_record_is_on_the_disk_once_a_head_or_a_charge_is(path, monkeypatch):
    """TRUST 34: a checkpoint keeps a head; the line that it names must not be lost after it."""
    ledger = Ledger(path, CLIENTS)
    charge(ledger, 0)
    file, seen = path.stat().st_ino, synced(monkeypatch)
    for number, then in enumerate((lambda: ledger.head, lambda: charge(ledger, 1), ledger.close)):
        seen.clear()
        ledger.record("fed_avg a 0", f"release {number}")
        assert seen == []
        then()
        assert seen == [(file, path.stat().st_size)]
    assert Ledger.read(path).head == ledger.head


def test_equal_runs_write_equal_ledgers(tmp_path):
    """TRUST 37: no clock, no path, no process in the file; but a secret of its own."""
    filled(tmp_path / "one")
    shutil.copy(key_of(tmp_path / "one"), key_of(tmp_path / "two"))
    for name in ("two", "three"):
        filled(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "three").read_bytes()


def test_the_budget_stops_before_anything_is_written(path):
    """TRUST 30: exactly as many rounds as fit, then nothing, also after reopening."""
    limit = accounting.epsilon(
        dp_accounting.SelfComposedDpEvent(ROUND, 6), 1e-5, "pld", "add_or_remove_one"
    )
    budget = Budget(limit, 1e-5)
    with Ledger(path, CLIENTS, budget=budget) as ledger:
        assert ledger.affordable(ROUND) == 6
        for round in range(6):
            charge(ledger, round)
        assert ledger.affordable(ROUND) == 0
        before = path.read_bytes()
        with pytest.raises(BudgetExhausted, match="nothing was released") as caught:
            charge(ledger, 6)
        assert caught.value.exit_code == 3
        assert path.read_bytes() == before
        assert ledger.spent(1e-5) <= limit
        charge(ledger, 2)  # a replay costs nothing
    with Ledger(path, CLIENTS) as again, pytest.raises(BudgetExhausted):
        charge(again, 0, run="b")
    wider = Budget(100.0, 1e-5)
    with Ledger(path, CLIENTS, budget=wider) as again, pytest.raises(BudgetExhausted):
        charge(again, 0, run="b")
    assert path.read_bytes() == before


def test_a_budget_of_mixed_releases_is_kept(path):
    """TRUST 30: the quick path for equal rounds must not let another kind through."""
    budget = Budget(1.5, 1e-5)
    with Ledger(path, CLIENTS, budget=budget) as ledger:
        made = 0
        with pytest.raises(BudgetExhausted):
            for round in range(10_000):
                for label, event in (("one", ROUND), ("two", OTHER)):
                    charge(ledger, round, event, label)
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
            charge(ledger, round)
    assert 0 < len(computed) <= 20


def test_a_release_without_noise_fits_no_budget_and_is_named(path, tmp_path):
    """TRUST 11: infinite epsilon, in the file and in the summary."""
    nothing = dp_accounting.NonPrivateDpEvent()
    with Ledger(path, CLIENTS, budget=Budget(8.0, 1e-5)) as ledger:
        with pytest.raises(BudgetExhausted):
            charge(ledger, 0, nothing)
        assert len(ledger) == 0
    with Ledger(tmp_path / "free", CLIENTS) as ledger:
        assert ledger.affordable(nothing) is None
        charge(ledger, 0, nothing)
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
        charge(ledger, 0)
        with pytest.raises(InputError, match="no common epsilon"):
            charge(ledger, 1, FIXED)
        assert len(ledger) == 1


def test_rounds_of_fixed_size_are_charged_under_replace_one(path):
    limit = composed(FIXED, 4, 1e-3, "rdp")
    with Ledger(path, CLIENTS, budget=Budget(limit, 1e-3)) as ledger:
        for round in range(4):
            charge(ledger, round, FIXED)
        assert ledger.summary(1e-3)["adjacency"] == "replace_one"
        assert ledger.summary(1e-3)["accountant"] == "rdp"
        assert ledger.spent(1e-3) == limit
        with pytest.raises(BudgetExhausted):
            charge(ledger, 4, FIXED)


SHARING = {
    "part": lambda clients: clients.select([2, 5]),
    "shuffle": lambda clients: clients.select(np.arange(40)[::-1]),
    "train": lambda clients: clients.split({"train": 0.5, "test": 0.5}, seed=0)["train"],
    "test": lambda clients: clients.split({"train": 0.5, "test": 0.5}, seed=0)["test"],
    "large clients": lambda clients: clients.with_min_examples(4),
    "columns": lambda clients: clients.with_columns({"y": np.arange(120)}),
    "examples": lambda clients: clients.with_examples({"y": np.arange(0)}, np.zeros(41, int)),
    "filter": lambda clients: clients.keeping(np.arange(120) % 7 == 0),
    "nobody": lambda clients: clients.select([]),
}


@pytest.mark.parametrize("derive", SHARING.values(), ids=SHARING)
def test_what_is_made_of_a_source_shares_its_ledger(path, derive):
    """TRUST 29: in both directions, without a warning, and adds up."""
    filled(path)
    before = path.read_bytes()
    with Ledger(path, derive(people())) as ledger:
        assert ledger.covers(CLIENTS) and not ledger.covers(people(seed=1))
        assert path.read_bytes() == before
        charge(ledger, 0, run="b")
        assert ledger.spent(1e-5) == composed(ROUND, 6)
    other = path.with_name("other.jsonl")
    Ledger(other, derive(people())).close()
    Ledger(other, CLIENTS).close()


def others(**changes) -> Population:
    parts = {"columns": dict(CLIENTS.columns), "offsets": CLIENTS.offsets, "client_ids": NAMES}
    return Population(**(parts | changes))


def anew(clients: Population) -> Population:
    """The same clients, as if read from a file of their own."""
    return Population(clients.columns, clients.offsets, clients.client_ids)


NUMBERS = [str(k) for k in range(40)]
MOSTLY_THE_SAME = {
    "one client fewer": anew(CLIENTS.select(range(1, 40))),
    "one client more": people([*NAMES, "new"]),
    "half of them": anew(CLIENTS.select(range(0, 40, 2))),
    "reordered": anew(CLIENTS.select(np.arange(40)[::-1])),
    "one more column": others(columns={**CLIENTS.columns, "y": np.arange(120)}),
    "other data": people(seed=1),
    "numbered, one more column": others(
        client_ids=NUMBERS, columns={**CLIENTS.columns, "text": [f"{k}" * 99 for k in range(120)]}
    ),
    "numbered, one client fewer": others(
        columns={"x": CLIENTS.columns["x"][3:]},
        offsets=CLIENTS.offsets[:-1],
        client_ids=NUMBERS[1:],
    ),
}


@pytest.mark.parametrize("clients", MOSTLY_THE_SAME.values(), ids=MOSTLY_THE_SAME)
def test_mostly_the_same_clients_join_the_ledger_with_a_warning(path, clients):
    """TRUST 29: each of these was a fresh budget."""
    filled(path)
    before = path.read_bytes()
    assert clients.fingerprint != CLIENTS.fingerprint
    with pytest.warns(SameClientsWarning, match="most of these clients seem to be") as caught:
        ledger = Ledger(path, clients)
    assert caught[0].filename == __file__
    charge(ledger, 0, run="b")
    assert ledger.spent(1e-5) == composed(ROUND, 6)
    assert ledger.covers(clients) and ledger.covers(CLIENTS)
    population = ledger.summary(1e-5)["population"]
    ledger.close()
    # One line, and from then on it belongs.
    lines = path.read_bytes().removeprefix(before).splitlines()
    assert set(json.loads(lines[0])) == {"bytes", "population", "sketch", "previous", "hash"}
    assert len(lines) == 2
    after = path.read_bytes()
    for known in (CLIENTS, clients, clients.select([0])):
        Ledger(path, known).close()
    assert path.read_bytes() == after
    assert Ledger.read(path).population == population


def test_the_same_data_under_other_ids_are_the_source(path):
    filled(path)
    before = path.read_bytes()
    for ids in (NUMBERS, [f"other {name}" for name in NAMES]):
        Ledger(path, others(client_ids=ids)).close()
    assert path.read_bytes() == before


def test_a_third_source_is_compared_with_all_that_joined(path):
    """Many clients change, twice: nobody of the first source is left."""
    names = [hashlib.sha256(f"row {k}".encode()).hexdigest() for k in range(60)]
    Ledger(path, people(names[:40], seed=1)).close()
    with pytest.raises(InputError, match="another population"):
        Ledger(path, people(names[40:55], seed=2))
    with pytest.warns(SameClientsWarning):
        Ledger(path, people(names[15:55], seed=3)).close()
    with pytest.warns(SameClientsWarning):
        Ledger(path, people(names[40:55], seed=2)).close()


@pytest.mark.parametrize(
    "clients",
    [
        people([f"x{name}" for name in NAMES], seed=1),
        people(NUMBERS, seed=1),
        people([*NAMES[:3], *(f"x{name}" for name in NAMES[3:])], seed=1),
        people(["only one"], seed=1),
        people([], seed=1),
    ],
    ids=["names", "numbers", "few in common", "one", "nobody"],
)
@pytest.mark.parametrize("numbered", [False, True])
def test_a_ledger_of_other_clients_is_refused(path, clients, numbered):
    with Ledger(path, people(NUMBERS) if numbered else CLIENTS) as ledger:
        charge(ledger, 0)
    before = path.read_bytes()
    with pytest.raises(InputError, match="another population"):
        Ledger(path, clients)
    assert path.read_bytes() == before
    Ledger(path, CLIENTS).close()


def test_a_refused_warning_joins_nobody(path):
    filled(path)
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SameClientsWarning):
            Ledger(path, people(seed=1))
    assert path.read_bytes() == before
    Ledger(path, CLIENTS).close()


def test_clients_are_compared_only_when_they_must_be(path, monkeypatch):
    """It passes over the data, so neither a resumed run nor a read may pay for it."""
    filled(path)
    monkeypatch.delattr(sources.Secret, "sketch")
    monkeypatch.delattr(sources.Secret, "overlap")
    Ledger(path, CLIENTS.select([1])).close()
    Ledger.read(path).verify()


def test_a_ledger_needs_a_population(path):
    for wrong in (CLIENTS.fingerprint, None, {}):
        with pytest.raises(InputError, match="needs the Population of its clients"):
            Ledger(path, wrong)
    assert not path.parent.exists()


def test_another_unit_is_refused_before_anybody_joins(path):
    filled(path)
    before = path.read_bytes()
    for clients in (CLIENTS, people(seed=1)):
        with pytest.raises(InputError, match="protects each client, this run each example"):
            Ledger(path, clients, unit="example")
    assert path.read_bytes() == before


def test_nobody_who_sees_a_ledger_can_test_a_guess(tmp_path):
    """TRUST 40: of two ledgers of the same data, nothing about the data is equal."""
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        filled(path)
        with pytest.warns(SameClientsWarning):
            Ledger(path, people(seed=1)).close()
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    for one, two in zip(*lines, strict=True):
        for name in ("population", "key"):
            assert one.get(name) != two.get(name) or one.get(name) is None
        for name, tags in one.get("sketch", {}).items():
            width = 2 * sources._TAG_BYTES
            tags, other = (
                set(re.findall("." * width, held)) for held in (tags, two["sketch"][name])
            )
            assert len(tags) == sources._TAGS and not tags & other
    guesses = [CLIENTS.fingerprint, CLIENTS.content, people(seed=1).fingerprint]
    guesses += NAMES
    contents = [NAMES[0].encode(), CLIENTS.columns["x"][:3].tobytes(), CLIENTS.fingerprint.encode()]
    for content in contents:
        for kind in (hashlib.sha256, hashlib.sha1, hashlib.md5, hashlib.blake2b, hashlib.sha512):
            guesses.append(kind(content).hexdigest())
    for path in paths:
        text = path.read_text()
        assert not [guess for guess in guesses if guess in text or guess[:12] in text]
        assert key_of(path).read_bytes().hex() not in text


def test_a_key_is_made_with_the_ledger_for_its_owner_alone(path):
    filled(path)
    assert stat.S_IMODE(key_of(path).stat().st_mode) == 0o600
    assert stat.S_IMODE(key_of(path).parent.stat().st_mode) == 0o700
    assert {found.name for found in path.parent.rglob("*.*")} == {
        "ledger.jsonl",
        "ledger.jsonl.key",
    }


@pytest.mark.parametrize("damage", ["missing", "short", "another"])
def test_without_its_key_a_ledger_can_be_read_but_not_charged(path, tmp_path, damage):
    filled(path)
    before, key = path.read_bytes(), key_of(path).read_bytes()
    filled(tmp_path / "other")
    if damage == "missing":
        key_of(path).unlink()
    elif damage == "short":
        key_of(path).write_bytes(key[:-1])
    else:
        shutil.copy(key_of(tmp_path / "other"), key_of(path))
    with pytest.raises(CorruptFile, match=r"ledger\.jsonl\.key"):
        Ledger(path, CLIENTS)
    assert key_of(path).exists() == (damage != "missing"), "none is made for an old ledger"
    ledger = Ledger.read(path)
    ledger.verify()
    assert len(ledger) == 5 and ledger.spent(1e-5) > 0
    assert ledger.summary(1e-5)["population"] == json.loads(before.splitlines()[0])["population"]
    with pytest.raises(InputError, match="opened for reading"):
        ledger.covers(CLIENTS)
    key_of(path).write_bytes(key)
    Ledger(path, CLIENTS).close()
    assert path.read_bytes() == before


def test_a_flipped_bit_in_the_key_is_found(path):
    """TRUST 35"""
    filled(path)
    key = key_of(path).read_bytes()
    for bit in range(8 * len(key)):
        damaged = bytearray(key)
        damaged[bit // 8] ^= 1 << bit % 8
        key_of(path).write_bytes(damaged)
        with pytest.raises(CorruptFile, match="is not the key of"):
            Ledger(path, CLIENTS)


def test_a_crash_before_the_first_line_keeps_the_key(path):
    """A key that is there may be of a ledger that somebody is about to restore."""
    filled(path)
    key, whole = key_of(path).read_bytes(), path.read_bytes()
    path.write_bytes(b"")
    Ledger(path, CLIENTS).close()
    assert key_of(path).read_bytes() == key
    path.write_bytes(whole)
    Ledger(path, CLIENTS).close()


def test_every_flipped_bit_is_found_when_a_ledger_is_opened(path, monkeypatch):
    """TRUST 35, 40: of header, charges and records, and their newlines; nothing is deleted."""
    monkeypatch.setattr(sources, "_TAGS", 2)
    with Ledger(path, CLIENTS) as ledger:
        charge(ledger, 0, EVERYONE)
        ledger.record("fed_avg a 0", "released")
        charge(ledger, 1, EVERYONE)
    whole = path.read_bytes()
    # In place: making the file anew takes ten times as long.
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            os.pwrite(file.fileno(), damaged, 0)
            with pytest.raises(CorruptFile, match="line [1-4] was altered"):
                Ledger(path, CLIENTS)
            assert path.read_bytes() == damaged
    path.write_bytes(whole)
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
    key_of(tmp_path / "forged").parent.mkdir()
    shutil.copy(key_of(path), key_of(tmp_path / "forged"))
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
            charge(ledger, 3)
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
            charge(ledger, 5)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="closed"):
        charge(ledger, 5)
    with Ledger(path, CLIENTS) as again:
        charge(again, 5)


def test_a_ledger_opened_for_reading_cannot_be_charged(path):
    filled(path)
    ledger = Ledger.read(path)
    with pytest.raises(InputError, match="reading"):
        charge(ledger, 9)
    with pytest.raises(InputError, match="reading"):
        ledger.record("fed_avg a 0", "one")


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
def test_a_charge_needs_a_round_a_label_a_run_and_an_identity(path, round):
    with Ledger(path, CLIENTS) as ledger:
        with pytest.raises(InputError, match="round"):
            charge(ledger, round)
        good = {"label": "fed_avg", "run": "a", "identity": "i"}
        for name in good:
            for wrong in ("", None, 3):
                with pytest.raises(InputError, match=name):
                    ledger.charge(ROUND, round=0, **(good | {name: wrong}))
        assert len(ledger) == 0


def test_the_file_holds_public_things_only(path):
    """TRUST 40: exactly these fields; no times, ids, sizes or keys."""
    filled(path)
    with Ledger(path, CLIENTS) as ledger:
        ledger.record("fed_avg a 0", "released")
    header, *charges, record = (json.loads(line) for line in path.read_text().splitlines())
    seal = {"bytes", "previous", "hash"}
    assert set(header) == {"format", "key", "population", "sketch", "unit", "budget"} | seal
    for line in charges:
        assert set(line) == {"run", "label", "round", "event", "identity"} | seal
    assert set(record) == {"identity", "release"} | seal


@pytest.mark.parametrize(
    "fields",
    [
        {"event": {"type": "gaussian", "noise_multiplier": "x"}},
        {"event": {"type": "something else"}},
        {"event": 3},
        {"run": "a"},
        {"population": "x", "sketch": {"ids": "zz", "contents": ""}},
        {"population": "x", "sketch": []},
        {},
    ],
    ids=str,
)
def test_a_sealed_line_that_says_nothing_known_is_refused(path, fields):
    """Whoever seals lines can also seal nonsense."""
    filled(path)
    chain = Chain(path)
    chain.append(fields)
    chain.close()
    for open_it in (Ledger.read, lambda path: Ledger(path, CLIENTS)):
        with pytest.raises(CorruptFile, match="line 7 was altered"):
            open_it(path)


def test_another_format_is_refused(path):
    chain = Chain(path)
    chain.append({"format": "jaxpfl ledger 3"})
    chain.close()
    with pytest.raises(CorruptFile, match="expected the format 'jaxpfl ledger 2'"):
        Ledger.read(path)
