"""What is stored is verified block by block, when it is read: no altered byte is ever used."""

import hashlib
import json

import numpy as np
import pytest

from jaxpfl.cli import main
from jaxpfl.data import Cohort, CohortSpec, Population, mapped
from jaxpfl.data.columns import read
from jaxpfl.data.content import content_hash, origin_hash
from jaxpfl.data.folders import check_folder
from jaxpfl.data.mapped import BlockHashes, Blocks, root_of
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import CorruptFile
from tests.data.populations import sign, sign_buffers
from tests.refusals import refusal

CLIENTS, EACH = 40, 6
SPEC = CohortSpec(batch_size=2, max_examples=4, clients_per_bucket=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 64 bytes, so that small columns have many."""
    monkeypatch.setattr(mapped, "BLOCK", 64)


def whole() -> Population:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, CLIENTS * EACH)
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = rng.integers(0, 50, edges[-1]).astype(np.uint16)
    columns = {
        "x": rng.normal(size=(CLIENTS * EACH, 3)).astype(np.float32),
        "label": rng.integers(0, 9, CLIENTS * EACH).astype(np.int32),
        "flag": rng.random(CLIENTS * EACH) < 0.5,
        "tokens": Sequences(ids, edges, {"vocabulary_size": 50}),
        "text": [f"text {number} é" for number in range(CLIENTS * EACH)],
    }
    offsets = np.arange(0, CLIENTS * EACH + 1, EACH)
    return Population(columns, offsets, [f"somebody {k}" for k in range(CLIENTS)])


@pytest.fixture
def folder(tmp_path):
    whole().save(tmp_path / "saved")
    return tmp_path / "saved"


def file_of(folder, name, buffer=-1):
    """The file of a column's buffer."""
    place = [*json.loads((folder / "manifest.json").read_text())["columns"]].index(name)
    return sorted(folder.glob(f"{place}.*"))[buffer]


def flip(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def packed(population, chosen):
    kept = {"x": population.numeric()["x"], "label": population.numeric()["label"]}
    kept["tokens"] = Padded(population.columns["tokens"], 5)
    return list(Cohort(population.with_columns(kept), chosen, SPEC, seed=1, round=1))


@pytest.mark.parametrize("name", ["x", "label", "tokens"])
def test_an_altered_block_is_refused_by_who_reads_it_and_by_nobody_else(name, folder):
    """TRUST 6: the message names the file and the block."""
    expected = packed(whole(), [0, 1])
    flip(file_of(folder, name))
    loaded = Population.load(folder)
    for bucket, other in zip(packed(loaded, [0, 1]), expected, strict=True):
        for column, values in bucket.batches.items():
            np.testing.assert_array_equal(values, other.batches[column], strict=True)
    last = range(CLIENTS - 4, CLIENTS)
    with pytest.raises(CorruptFile, match=rf"\.values was altered: block \d+ .*{name}"):
        packed(loaded, last)
    # Again, and through whatever is made of it.
    for made in (loaded.select(range(30, CLIENTS)), loaded.select(range(CLIENTS)[::-1])):
        with pytest.raises(CorruptFile, match="block"):
            packed(made, range(len(made)))
    with pytest.raises(CorruptFile, match="block"):
        loaded.select(range(CLIENTS)).save(folder.parent / "copy")
    assert not (folder.parent / "copy").exists()
    refusal(lambda: check_folder(folder, progress=False), "block", CorruptFile)


def test_texts_are_verified_as_far_as_they_are_read(folder):
    flip(file_of(folder, "text"))
    loaded = Population.load(folder)
    assert loaded.examples(0)["text"].to_pylist() == [f"text {k} é" for k in range(EACH)]
    early = loaded.select(range(5))
    assert early.columns["text"].equals(whole().select(range(5)).columns["text"])
    for look in (lambda: loaded.columns["text"], lambda: loaded.examples(CLIENTS - 1)):
        with pytest.raises(CorruptFile, match="values of column 'text'"):
            look()


def test_swapped_blocks_are_refused(folder):
    """TRUST 6: each of them is whole, and in a wrong place."""
    path = file_of(folder, "x")
    content = path.read_bytes()
    path.write_bytes(content[64:128] + content[:64] + content[128:])
    loaded = Population.load(folder)
    for client in (0, 1):
        with pytest.raises(CorruptFile, match="of column 'x'"):
            loaded.examples(client)
    assert len(loaded.examples(CLIENTS - 1)["x"]) == EACH


def test_opening_reads_no_block_but_the_ends_of_sequences(folder, monkeypatch):
    """The time to open does not depend on how much clients hold; nor does the identity's."""
    read = []
    verify = Blocks._verify
    monkeypatch.setattr(
        Blocks, "_verify", lambda self, which: (read.extend(which), verify(self, which))[1]
    )
    loaded = Population.load(folder)
    kept = loaded.with_columns({"x": loaded.numeric()["x"]})
    part = kept.select([7, 3, 5]).keeping(np.arange(3 * EACH) % 2 == 0)
    assert loaded.fingerprint == kept.fingerprint == part.fingerprint
    assert repr(loaded) and kept.split({"a": 0.5}, 0) and loaded.numeric()["x"].shape[1:] == (3,)
    found = [origin_hash(each.numeric(), each.offsets) for each in (loaded, kept, part)]
    assert len(set(found)) == 3
    clients = sum(-(-path.stat().st_size // 64) for path in [*folder.glob("[co]*.[ev]*")])
    assert len(read) == clients + 2, "the first and the last edge of the sequences"


def test_an_identity_changes_with_any_byte_and_with_the_clients_chosen(tmp_path):
    """The guarantee of a hash of the data: what differs is another question."""

    def origins(population, name):
        population.save(tmp_path / name)
        loaded = Population.load(tmp_path / name)
        chosen = [range(5), range(1, 6), [9, 2], [2, 9]]
        made = [loaded, *(loaded.select(each) for each in chosen)]
        return [origin_hash(each.numeric(), each.offsets) for each in made]

    first, again = origins(whole(), "first"), origins(whole(), "again")
    assert first == again and len(set(first)) == 5
    nudged = whole()
    x = np.array(nudged.columns["x"])
    # Of a client whom the parts do not hold: a stored column is identified as one.
    x[-1, -1] = np.nextafter(x[-1, -1], np.float32(np.inf))
    other = origins(nudged.with_columns({**nudged.columns, "x": x}), "other")
    assert not set(first) & set(other)


def test_a_hash_is_that_of_the_content_however_it_is_held(folder):
    loaded, memory = Population.load(folder), whole()
    assert loaded.content == memory.content == content_hash(memory.columns, memory.offsets)
    chosen = [11, 4, 30]
    assert loaded.select(chosen).content == memory.select(chosen).content
    assert loaded.select(range(4, 9)).content == memory.select(range(4, 9)).content
    # All of a stored column is identified as the same column in memory.
    assert origin_hash(loaded.numeric(), loaded.offsets) == origin_hash(
        memory.numeric(), memory.offsets
    )


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 200])
def test_a_root_is_of_all_blocks_whichever_pieces_they_come_in(size):
    content = bytes(range(200))[:size]
    expected = [hashlib.sha256(content[at : at + 64]).digest() for at in range(0, size, 64)]
    for step in (1, 7, 64, 200):
        found = BlockHashes()
        for at in range(0, size, step):
            found.update(content[at : at + step])
        assert (found.sums, found.size, found.root) == (expected, size, root_of(expected, size))
    assert len({root_of(expected, size), root_of(expected, size + 1), root_of([], size)}) > 1


def test_a_row_that_ends_in_another_block_is_verified_to_its_end(folder):
    # Row 5 has the bytes 60 .. 71.
    flip(file_of(folder, "x"), 71)
    held = Population.load(folder).numeric()["x"]
    assert held[np.array([3, 4])].shape == (2, 3)
    refusal(lambda: held[np.array([4, 5])], "block 1 of values", CorruptFile)


def test_rows_of_other_clients_are_out_of_reach(folder):
    part = Population.load(folder).select([3, 4]).numeric()["label"]
    assert len(part) == 2 * EACH
    for rows in ([2 * EACH], [-1], [0, 99]):
        with pytest.raises(IndexError):
            part[np.array(rows)]


def test_an_older_format_is_refused_with_what_to_do(folder):
    sign(folder, format="jaxpfl population 4")
    refusal(lambda: Population.load(folder), "convert its source anew")


def test_check_reads_all_and_says_so(folder, capsys):
    assert main(["data", "check", str(folder)]) == 0
    assert "is whole: 40 clients" in capsys.readouterr().out
    flip(file_of(folder, "flag"), 0)
    assert main(["data", "check", str(folder)]) == 2
    assert "block 0 of values of column 'flag'" in capsys.readouterr().err
    assert main(["data", "check", str(folder.parent)]) == 2
    assert main(["data", "check"]) == 2


def test_check_finds_token_ids_beyond_their_vocabulary(tmp_path):
    ids, edges = np.array([1, 2, 50, 4], np.uint16), np.array([0, 1, 2, 4])
    held = Sequences(ids, edges, {"vocabulary_size": 50})
    Population({"tokens": held}, [0, 1, 3], ["a", "b"]).save(tmp_path / "saved")
    refusal(lambda: check_folder(tmp_path / "saved", progress=False), "not below 50", CorruptFile)


def test_labels_of_a_file_are_compared_with_the_model(folder):
    from jaxpfl.models.base import require_below

    held = Population.load(folder).numeric()
    require_below(held, "label", "classes", 9)
    refusal(lambda: require_below(held, "label", "classes", 8), "classes = 8")
    assert mapped.Mapped is type(held["label"])


def altered_and_resigned(folder, name, buffer, values):
    """A stored buffer with other values, and a manifest that fits them."""
    path = file_of(folder, name, buffer)
    content = bytearray(path.read_bytes())
    for index, value in values.items():
        content[index : index + len(value)] = value
    path.write_bytes(content)
    sign_buffers(folder)


@pytest.mark.parametrize("edge", [-(10**12), 10**12, 0])
@pytest.mark.parametrize("name", ["text", "tokens"])
def test_a_file_made_with_edges_out_of_order_is_refused_when_it_is_read(name, edge, folder):
    """Such a file fits its own manifest. Nothing beside its content may be read."""
    altered_and_resigned(folder, name, 0, {8 * 100: edge.to_bytes(8, "little", signed=True)})
    population = Population.load(folder)
    with pytest.raises(CorruptFile, match=f"column '{name}'.*one after the other"):
        if name == "text":
            read(population.columns[name])
        else:
            Padded(population.columns[name], 5)[np.array([98, 99, 100])]
    refusal(lambda: check_folder(folder, progress=False), f"column '{name}'", CorruptFile)


def test_a_file_made_with_texts_that_are_not_utf_8_is_refused_when_it_is_read(folder):
    altered_and_resigned(folder, "text", 1, {0: b"\xff"})
    with pytest.raises(CorruptFile, match="column 'text'.*UTF-8"):
        read(Population.load(folder).columns["text"])
