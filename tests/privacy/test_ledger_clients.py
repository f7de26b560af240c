"""Whose ledger it is: parts of one source share it, other clients are refused, nobody is shown."""

import hashlib
import json

import numpy as np
import pytest

from jaxpfl.data import Population
from jaxpfl.errors import InputError
from jaxpfl.privacy import Ledger
from tests.privacy.ledgers import CLIENTS, NAMES, ROUND, charge, composed, filled, key_of, people
from tests.refusals import refusal

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


NUMBERS = [str(k) for k in range(40)]
ONE_FEWER = Population(
    *(getattr(CLIENTS.select(range(1, 40)), name) for name in ("columns", "offsets", "client_ids"))
)


def test_a_source_that_is_added_shares_the_ledger_from_then_on(path):
    """TRUST 29: a file with one client fewer is another source until somebody says so."""
    refusal(lambda: Ledger.add_source(path, ONE_FEWER), "there is no such ledger")
    filled(path)
    before = path.read_bytes()
    refusal(lambda: Ledger(path, ONE_FEWER), "another population say so once")
    assert path.read_bytes() == before
    Ledger.add_source(path, ONE_FEWER)
    added = path.read_bytes().removeprefix(before)
    assert set(json.loads(added)) == {"bytes", "population", "previous", "hash"}
    for known in (ONE_FEWER, CLIENTS, ONE_FEWER.select([0])):
        Ledger.add_source(path, known)
        Ledger(path, known).close()
    assert path.read_bytes() == before + added
    with Ledger(path, ONE_FEWER) as ledger:
        charge(ledger, 0, run="b")
        assert ledger.spent(1e-5) == composed(ROUND, 6)
    refusal(lambda: Ledger(path, people(seed=1)), "another population")


def test_the_same_data_under_other_ids_are_the_source(path):
    filled(path)
    before = path.read_bytes()
    for ids in (NUMBERS, [f"other {name}" for name in NAMES]):
        Ledger(path, others(client_ids=ids)).close()
    assert path.read_bytes() == before


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
    refusal(lambda: Ledger(path, clients), "another population")
    for held in (CLIENTS, clients):
        with pytest.raises(InputError, match="protects each client, this run each example"):
            Ledger(path, held, unit="example")
    other = path.with_name("other.jsonl")
    refusal(lambda: Ledger(other, clients.fingerprint), "needs the Population of its clients")
    assert path.read_bytes() == before and not other.exists()
    Ledger(path, CLIENTS).close()


def test_nobody_who_sees_a_ledger_can_test_a_guess(tmp_path):
    """TRUST 40: of two ledgers of the same data, nothing about the data is equal."""
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        filled(path)
        Ledger.add_source(path, people(seed=1))
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    for one, two in zip(*lines, strict=True):
        for name in ("population", "key"):
            assert one.get(name) != two.get(name) or one.get(name) is None
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
