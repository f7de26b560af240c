"""A saved population comes back whole, or not at all."""

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.data import Population, from_clients
from jaxpfl.data import open as open_population
from jaxpfl.data.folders import check_folder
from jaxpfl.errors import CorruptFile, InputError
from tests.data.populations import SECRET, same, small
from tests.refusals import refusal

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 2)])
def test_numbers_of_every_type_come_back_mapped_not_copied(dtype, shape, tmp_path):
    values = np.random.default_rng(0).integers(0, 2, (5, *shape)).astype(dtype)
    before = Population({"x": values}, [0, 2, 2, 5], ["a", "b", "c"], "n", "u")
    before.save(tmp_path / "saved")
    allocated = pa.total_allocated_bytes()
    after = Population.load(tmp_path / "saved")
    # Arrow allocates nothing for numbers that stay in the file; ids take a few bytes.
    assert pa.total_allocated_bytes() - allocated <= 1024
    same(before, after)
    assert not after.columns["x"].flags.owndata and not after.columns["x"].flags.writeable
    assert np.array_equal(after.numeric()["x"][np.array([4, 1])], values[[4, 1]])
    # TRUST 4: the array's addresses lie in one of the process's mappings of the file.
    address = after.columns["x"].__array_interface__["data"][0]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists a process's mappings")
    spans = [
        [int(part, 16) for part in line.split()[0].split("-")]
        for line in maps.read_text().splitlines()
        if line.endswith(str(tmp_path / "saved" / "0.values"))
    ]
    assert any(low <= address and address + values.nbytes <= high for low, high in spans)


@pytest.mark.parametrize(
    "texts", [["", "", ""], ["a\0b", "👩‍👩‍👧 é", "\ud800lone"], ["x" * 1_000_000, "\n", "\u2028"]]
)
def test_text_comes_back_as_it_was(texts, tmp_path):
    """TRUST 8: NUL, emoji, empty and long texts stay; a lone surrogate is U+FFFD."""
    before = from_clients({"a": {"t": texts[:1]}, "b": {"t": texts[1:]}, "c": {"t": []}})
    before.save(tmp_path / "saved")
    after = Population.load(tmp_path / "saved")
    same(before, after)
    expected = [text.replace("\ud800", "\ufffd") for text in texts]
    assert after.columns["t"].to_pylist() == expected


def test_a_selection_saves_its_own_clients_alone(tmp_path):
    small().select([1]).save(tmp_path / "saved")
    same(small().select([1]), Population.load(tmp_path / "saved"))
    stored = b"".join(path.read_bytes() for path in (tmp_path / "saved").iterdir())
    assert f"{SECRET} 2".encode() in stored and f"{SECRET} 3".encode() not in stored


def test_what_is_derived_keeps_its_source_on_the_disk(tmp_path):
    """TRUST 29: saved and loaded, a part is still charged to its source's ledger."""
    part = small().select([2, 1]).with_columns({"y": np.arange(5)})
    part.save(tmp_path / "one")
    shutil.move(tmp_path / "one", tmp_path / "part")
    loaded = open_population(str(tmp_path / "part"))
    assert loaded.fingerprint == small().fingerprint
    assert loaded.select([0]).fingerprint == small().fingerprint
    assert loaded.content == part.content != loaded.fingerprint
    # And not merely what the manifest says.
    assert Population(loaded.columns, loaded.offsets, loaded.client_ids).content == loaded.content


def test_a_loaded_population_is_not_hashed_again(saved, monkeypatch):
    monkeypatch.delattr("jaxpfl.data.population.content_hash")
    loaded = Population.load(saved)
    assert loaded.fingerprint == loaded.content == loaded.select([1]).fingerprint


def test_a_saved_folder_is_private_and_never_overwritten(tmp_path):
    """TRUST 40"""
    small().save(tmp_path / "deep" / "saved")
    assert stat.S_IMODE((tmp_path / "deep" / "saved").stat().st_mode) == 0o700
    refusal(lambda: small(2).save(tmp_path / "deep" / "saved"), "exists already")
    same(small(), Population.load(tmp_path / "deep" / "saved"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["saved"]


@pytest.fixture
def saved(tmp_path) -> Path:
    small().save(tmp_path / "saved")
    return tmp_path / "saved"


FILES = ["manifest.json", "0.values", "3.edges", "3.values", "offsets.values", "client_ids.edges"]
FILES += ["client_ids.values"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_and_every_truncation_is_found_and_the_file_named(name, saved):
    """TRUST 6"""
    path = saved / name
    whole = path.read_bytes()
    # The manifest's last byte is its newline: without it, it still says all.
    for length in {0, 1, len(whole) // 2, len(whole) - 2}:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match=name):
            Population.load(saved)
    path.unlink()
    with pytest.raises(InputError, match=name):
        Population.load(saved)
    generator = np.random.default_rng(0)
    for position in generator.choice(len(whole), min(40, len(whole)), replace=False):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=name) as raised:
            dict(Population.load(saved).columns)
        assert SECRET not in str(raised.value)
        with pytest.raises(CorruptFile, match=name):
            check_folder(saved, progress=False)
    path.write_bytes(whole)
    assert len(check_folder(saved, progress=False)) == 4
    same(small(), Population.load(saved))


def test_an_edited_manifest_is_found(saved):
    """TRUST 6"""
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    edits = [manifest | {key: {"edited": 1}} for key in manifest]
    lacking = [{name: manifest[name] for name in manifest if name != key} for key in manifest]
    texts = ["[]", "null", "7", '"text"', "{}", '{"sha256": 1}', "\x80"]
    for content in (*map(json.dumps, [*edits, *lacking]), *texts):
        path.write_text(content)
        refusal(lambda: Population.load(saved), "manifest.json", CorruptFile)
