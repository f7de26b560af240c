"""A saved population comes back whole, or not at all."""

import json
import stat

import numpy as np
import pytest

from jaxpfl.data import Population, from_clients
from jaxpfl.data import open as open_population
from jaxpfl.errors import CorruptFile, InputError

FILES = ("manifest.json", "examples.arrow", "clients.arrow")


def population() -> Population:
    rng = np.random.default_rng(0)
    return from_clients(
        {
            f"client {i}": {
                "image": rng.random((i, 4, 3, 1), np.float32),
                "label": rng.integers(0, 9, i).astype(np.int32),
                "half": rng.random(i).astype(np.float16),
                "flags": rng.random((i, 5)) < 0.5,
                "text": [f"text {i} {j} 🙂" for j in range(i)],
            }
            for i in range(6)
        },
        name="saved",
        unit="test client",
    )


@pytest.fixture
def folder(tmp_path):
    population().save(tmp_path / "saved")
    return tmp_path / "saved"


def test_saved_population_comes_back_the_same(folder):
    before, after = population(), Population.load(folder)
    assert after.fingerprint == before.fingerprint
    assert (after.name, after.unit) == ("saved", "test client")
    assert after.client_ids.equals(before.client_ids)
    np.testing.assert_array_equal(after.offsets, before.offsets)
    for name, column in before.columns.items():
        assert type(after.columns[name]) is type(column)
        if isinstance(column, np.ndarray):
            assert after.columns[name].dtype == column.dtype
            np.testing.assert_array_equal(after.columns[name], column)
    assert after.columns["text"].equals(before.columns["text"])


def test_stored_fingerprint_is_that_of_what_was_loaded(folder):
    after = Population.load(folder)
    recomputed = Population(after.columns, after.offsets, after.client_ids)
    assert after.fingerprint == recomputed.fingerprint


def test_numbers_are_mapped_and_not_copied(folder):
    """TRUST 4: memory stays flat, however large the file is."""
    for name in ("image", "label", "flags"):
        column = Population.load(folder).columns[name]
        base = column
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        assert not isinstance(base, np.ndarray), f"{name} owns its memory"


def test_an_empty_population_can_be_saved(tmp_path):
    population().select([]).save(tmp_path / "none")
    assert len(Population.load(tmp_path / "none")) == 0


def test_folder_is_private_and_nothing_temporary_is_left(folder):
    """TRUST 40: mode 0700."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_saving_never_replaces(folder):
    with pytest.raises(InputError, match="exists already"):
        population().save(folder)


def test_failed_save_leaves_nothing(tmp_path, monkeypatch):
    """TRUST 36: a disk that is full half-way."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        population().save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(folder, name):
    """TRUST 6, 35: also in the manifest itself."""
    path = folder / name
    content = path.read_bytes()
    rng = np.random.default_rng(1)
    for position in rng.choice(len(content), 20, replace=False):
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with pytest.raises(CorruptFile, match=name):
            Population.load(folder)
    path.write_bytes(content)
    assert len(Population.load(folder)) == 6


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_refused(folder, name):
    """TRUST 6."""
    path = folder / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptFile, match=name):
        Population.load(folder)


@pytest.mark.parametrize("name", FILES[1:])
def test_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(CorruptFile, match=f"{name} is missing"):
        Population.load(folder)


def test_missing_manifest_and_other_formats_are_refused(folder):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.unlink()
    with pytest.raises(InputError, match=r"holds no manifest\.json"):
        Population.load(folder)
    path.write_text(json.dumps([manifest]))
    with pytest.raises(CorruptFile):
        Population.load(folder)


def test_open_takes_the_folder(folder):
    assert open_population(folder).fingerprint == population().fingerprint
    assert open_population(str(folder)).fingerprint == population().fingerprint
