"""Whose ledger it is: marks and sketches under a secret, and what they tell without it: nothing."""

import hashlib
import os
import re
import stat

import numpy as np
import pytest

from jaxpfl.data import Population
from jaxpfl.errors import CorruptFile
from jaxpfl.privacy import sources
from jaxpfl.privacy.sources import LedgerKey, open_key

SECRET = LedgerKey(bytes(range(32)))


def named(numbers, seed: int = 0) -> list[str]:
    """Ids that say who it is."""
    return [hashlib.sha256(f"{seed} {number}".encode()).hexdigest()[:12] for number in numbers]


def people(numbers, *, ids=None, columns=("x",), seed: int = 0) -> Population:
    """A client for each number: 1 to 5 examples, a function of seed and number."""
    sizes = [1 + number % 5 for number in numbers]
    rows = np.repeat(np.asarray(numbers, np.int64), sizes)
    place = np.concatenate([np.arange(size) for size in sizes]) if sizes else rows
    held = {
        name: np.sin(rows + 0.1 * place + 1000.0 * seed + 7.0 * sum(map(ord, name)))
        for name in columns
    }
    held = {
        name: [f"{value:.9f}" for value in values] if name == "text" else values
        for name, values in held.items()
    }
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    return Population(held, offsets, named(numbers, seed) if ids is None else ids)


def share(new: Population, old: Population) -> float:
    return SECRET.overlap(new, [SECRET.sketch(old)])


def running(numbers, **settings) -> Population:
    """The same people under running numbers, which say nothing of who it is."""
    return people(numbers, ids=[str(k) for k in range(len(numbers))], **settings)


def other_contents(numbers) -> Population:
    """The same ids with other data."""
    return people(numbers, ids=named(numbers), seed=5)


ALL = list(range(1000))


@pytest.mark.parametrize("form", [running, other_contents, people])
@pytest.mark.parametrize(
    "numbers",
    [ALL[1:], ALL[::-1], ALL[:600], ALL[400:] + list(range(5000, 5500)), list(range(3000))],
    ids=["one fewer", "reversed", "most", "most and others", "more"],
)
def test_mostly_the_same_clients_are_known_by_ids_or_by_contents(form, numbers):
    """TRUST 29: each of these was a fresh budget."""
    assert share(form(numbers), people(ALL)) > 0.5
    assert share(people(ALL), people(numbers)) > 0.5


@pytest.mark.parametrize("clients", [2, 3, 5, 40, 300])
def test_few_clients_are_known_too(clients):
    old = people(range(clients))
    for new in (running(range(1, clients)), running(range(clients + 1)), old.select([0, 1])):
        anew = Population(new.columns, new.offsets, new.client_ids)
        if len(anew) == 1 or (len(anew) == 2 and clients > 5):
            continue  # one or two say little
        assert share(anew, old) >= 0.5
    assert share(running(range(2000)), old) == 1, "all of them among many others"


def test_other_columns_or_their_names_make_no_difference():
    """One more column, one fewer, renamed: of running numbers, so it is the contents that tell."""
    old = running(ALL, columns=("x", "text"))
    for columns in (("x", "text", "z"), ("text",)):
        new = running(ALL, columns=columns)
        assert share(new, old) > 0.9, columns
        assert share(old, new) > 0.9, columns
    plain = running(ALL)
    renamed = Population({"other": plain.columns["x"]}, plain.offsets, plain.client_ids)
    assert share(renamed, plain) > 0.9


def test_other_people_are_others_also_under_the_same_running_numbers():
    """And contents that most share are nobody's."""
    for new in (people(ALL, seed=1), running(ALL, seed=1), people(range(2000, 9000))):
        assert share(new, people(ALL)) == share(new, running(ALL)) == 0

    def answers(seed):
        yes = np.random.default_rng(seed).integers(0, 2, len(ALL))
        return Population({"yes": yes}, np.arange(len(ALL) + 1), named(ALL, seed))

    assert share(answers(1), answers(2)) == 0
    assert share(answers(1).with_columns({"yes": np.zeros(1000)}), answers(1)) == 1, "by ids"


def test_the_share_is_estimated_within_its_error():
    """Against the truth: five standard deviations of a sample of 256, and of a sample of few."""
    for common in (100, 300, 500, 700, 900):
        new = running(list(range(1000 - common, 2000 - common)))
        expected = common / 1000
        error = 5 * (expected * (1 - expected) / 256) ** 0.5
        # The larger of two estimates of the same share.
        assert expected - error < share(new, people(ALL)) < expected + 2 * error
    small = running(ALL[:300] + list(range(5000, 5100)))
    assert abs(share(small, people(range(4000))) - 0.75) < 5 * (0.75 * 0.25 / 25) ** 0.5


def test_nobody_overlaps_nobody():
    """TRUST 1"""
    nobody, silent = people([]), people(ALL).keeping(np.zeros(people(ALL).num_examples, bool))
    assert share(nobody, nobody) == share(people(ALL), nobody) == share(nobody, people(ALL)) == 0
    quiet = Population(silent.columns, silent.offsets, named(ALL))
    assert share(quiet, people(ALL)) == 1
    assert share(Population(silent.columns, silent.offsets, named(ALL, 1)), quiet) == 0


@pytest.mark.parametrize(
    ("ids", "numbers"),
    [
        (["0", "1", "2"], True),
        (["7"], True),
        (["client 0", "client 1"], True),
        (["0001-a", "0003-a", "0010-a"], True),
        (["4824125", "17", "9912345"], False),
        (["a", "b"], False),
        (["user 1", "client 2"], False),
        (["f0000_14", "f0001_41"], False),
        (["1", "2", "x"], False),
        (["", "1"], False),
        ([], False),
        (["9" * 30, "8" * 30], False),
    ],
)
def test_running_numbers_are_told_from_names(ids, numbers):
    assert sources._are_numbers(ids) is numbers


def test_a_sketch_has_one_size_whoever_it_is_of():
    """TRUST 40: neither how many clients there are nor whether they differ can be seen."""
    alike = Population({"x": np.zeros(50)}, np.arange(51), [str(k) for k in range(50)])
    sizes = set()
    for clients in (people([]), people([1]), people(ALL), alike):
        sketch = SECRET.sketch(clients)
        sizes |= {(name, len(tags)) for name, tags in sketch.items()}
        for tags in sketch.values():
            tags = re.findall("." * 12, tags)
            assert len(set(tags)) == 256 and tags == sorted(tags)
            # Spread evenly over all values, so that their density does not tell a number.
            first = np.array([int(tag[:4], 16) / 2**16 for tag in tags])
            assert np.abs(np.sort(first) - (np.arange(256) + 0.5) / 256).max() < 0.13
    assert sizes == {("ids", 256 * 12), ("contents", 256 * 12)}


def test_without_the_key_no_guess_can_be_tested():
    """TRUST 40: another key gives another mark, other tags, and finds nobody."""
    other = LedgerKey(bytes(32))
    clients = people(ALL)
    assert SECRET.digest_of(clients) != other.digest_of(clients)
    assert SECRET.digest_of(clients) == SECRET.digest_of(clients.select([3, 1]))
    assert SECRET.check != other.check
    assert other.overlap(clients, [SECRET.sketch(clients)]) == 0
    for name, tags in SECRET.sketch(clients).items():
        assert not set(re.findall("." * 12, tags)) & set(
            re.findall("." * 12, other.sketch(clients)[name])
        )


def test_a_text_column_counts_the_bytes_of_its_slice(monkeypatch):
    """Arrow arrays may start anywhere in their buffers."""
    whole = running(ALL, columns=("text",))
    half = whole.columns["text"][int(whole.offsets[500]) :]
    part = Population({"text": half}, whole.offsets[500:] - whole.offsets[500], ALL_AS_TEXT[500:])
    pieces = [bytes(piece) for piece in sources._pieces(part.columns["text"], part.offsets)]
    expected = [
        "".join(part.examples(client)["text"].to_pylist()).encode() for client in range(500)
    ]
    assert pieces == expected
    monkeypatch.setattr(sources, "_MOST_CONTENT", 7)
    pieces = [bytes(piece) for piece in sources._pieces(part.columns["text"], part.offsets)]
    assert pieces == [piece[:7] for piece in expected]
    assert share(part, whole) > 0.9


ALL_AS_TEXT = [str(number) for number in ALL]


def test_a_key_is_made_once_and_is_its_owners(tmp_path):
    path = tmp_path / "a.key"
    with pytest.raises(CorruptFile, match="a.key is missing"):
        open_key(path, create=False)
    first = open_key(path, create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size == 32
    assert [found.name for found in tmp_path.iterdir()] == ["a.key"]
    assert open_key(path, create=True).check == first.check
    assert open_key(tmp_path / "b.key", create=True).check != first.check
    path.write_bytes(b"short")
    with pytest.raises(CorruptFile, match="has 5 bytes, expected a key of 32"):
        open_key(path, create=True)
    assert path.read_bytes() == b"short"


def test_a_key_is_on_the_disk_before_it_is_used(tmp_path, monkeypatch):
    """TRUST 36: its bytes, then its name; and a crash before the name leaves no key."""
    seen = []
    real = os.fsync

    def watched(descriptor):
        seen.append((os.fstat(descriptor).st_ino, (tmp_path / "a.key").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    open_key(tmp_path / "a.key", create=True)
    file, folder = (tmp_path / "a.key").stat().st_ino, tmp_path.stat().st_ino
    assert seen == [(file, False), (folder, True)]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        open_key(tmp_path / "b.key", create=True)
    assert not (tmp_path / "b.key").exists()
    monkeypatch.setattr(os, "fsync", real)
    open_key(tmp_path / "b.key", create=True)
