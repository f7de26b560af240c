"""The .npz reader: what it brings together, converts and refuses."""

import numpy as np
import pytest

from jaxpfl import checks
from jaxpfl.data import open as open_population
from jaxpfl.data.readers.arrays import read_arrays
from jaxpfl.errors import CorruptFile, InputError
from tests.data.populations import SECRET

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 4, 5)).astype(np.uint8)
GOOD = {
    "images": IMAGES,
    "labels": np.array([3, 1, 4, 1, 5, 9], np.uint8),
    "writer": np.array([7, 2, 7, 300, 2, 7], np.int16),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "drawings.npz"


def write(path, **changes):
    np.savez_compressed(path, **{k: v for k, v in {**GOOD, **changes}.items() if v is not None})
    return path


def test_rows_of_one_writer_become_one_client(path):
    population = read_arrays(write(path), client="writer")
    assert population.client_ids.to_pylist() == ["7", "2", "300"]
    assert population.sizes().tolist() == [3, 2, 1]
    rows = [0, 2, 5, 1, 4, 3]
    np.testing.assert_array_equal(population.columns["image"], IMAGES[rows][..., None], strict=True)
    labels = np.array([3, 4, 9, 1, 5, 1], np.int32)
    np.testing.assert_array_equal(population.columns["label"], labels, strict=True)
    assert "writer" in population.unit and population.name == str(path)


def test_a_source_names_the_arrays(path):
    write(path, pictures=IMAGES / np.float64(255), images=None)
    source = f"{path}?client=writer&image=pictures&label=labels&min_examples=2"
    population = open_population(source)
    assert population.sizes().tolist() == [3, 2, 0]
    image = population.columns["image"]
    assert image.dtype == np.float32 and image.shape == (5, 4, 5, 1)
    np.testing.assert_allclose(image[0, :, :, 0], IMAGES[0] / 255, rtol=1e-6)
    write(path)
    assert len(open_population(f"{path}?client=writer")) == 3


def test_ids_may_be_text_images_boolean_and_further_columns_anything(path):
    ids = np.array(["b", "ä", "b", "c", "c", "b"])
    write(path, images=IMAGES > 99, writer=ids, place=np.arange(12.0).reshape(6, 2))
    columns = {"image": "images", "where": "place"}
    population = read_arrays(path, client="writer", columns=columns, name="p")
    assert population.client_ids.to_pylist() == ["b", "ä", "c"] and population.name == "p"
    expected = np.where(IMAGES > 99, 255, 0).astype(np.uint8)[[0, 2, 5, 1, 3, 4], :, :, None]
    np.testing.assert_array_equal(population.columns["image"], expected, strict=True)
    assert population.columns["where"][:, 0].tolist() == [0, 4, 10, 2, 6, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(labels=None), "has no array 'labels': expected one of"),
        (dict(labels=GOOD["labels"][:5]), "'labels': expected 6 rows.*found 5 rows"),
        (dict(labels=np.float32(1)), "'labels': expected 6 rows.*found a single value"),
        (dict(labels=GOOD["labels"] / 2), "labels must be whole numbers, found float64"),
        (dict(labels=GOOD["labels"][:, None]), r"whole numbers, found uint8\[1\]"),
        (dict(labels=GOOD["labels"] + np.int64(2**40)), "must fit 32 bits"),
        (dict(images=IMAGES.astype(np.int64)), r"found int64\[4, 5\]"),
        (dict(images=IMAGES[:, 0]), r"images must be \[H, W\]"),
        (dict(images=IMAGES.astype(np.float32)), "must lie in 0 .. 1"),
        (dict(images=np.array([SECRET] * 6, object)), "is not an .npz file of numbers and texts"),
        (dict(writer=np.arange(6.0)), "whole numbers or text, found float64"),
        (dict(writer=np.zeros((6, 1), int)), r"one client id per example, found int64\[1\]"),
        (
            dict(writer=np.array([SECRET, "", "", "b", "c", "d"])),
            "client ids, found an empty string",
        ),
        ({key: value[:0] for key, value in GOOD.items()}, "has no examples"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name_and_no_value_is_told(path, changes, message):
    """TRUST 7, 39"""
    write(path, **changes)
    with pytest.raises(InputError, match=message) as raised:
        read_arrays(path, client="writer")
    assert "drawings.npz" in str(raised.value) and SECRET not in str(raised.value)


def test_a_damaged_file_is_refused_by_name(path):
    """TRUST 6: as any .npz file is, see `tests/test_files.py`."""
    whole = write(path).read_bytes()
    for cut in (100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptFile, match="drawings.npz"):
            read_arrays(path, client="writer")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3_000_000, 0, 0), "must not contain a zero"),
        ((10**15, 0), "1000000000000000 rows would take"),
    ],
)
def test_rows_of_no_bytes_allocate_nothing(path, shape, message):
    """TRUST 39"""
    write(path, images=np.zeros(shape, np.uint8))
    with pytest.raises(InputError, match=message):
        read_arrays(path, client="*", columns={"pixels": "images"})


def test_arrays_that_exceed_the_memory_together_are_not_read(path, monkeypatch):
    """TRUST 39"""
    monkeypatch.setattr(checks, "machine_memory", lambda: 2**24)
    one = np.zeros((2**12, 2**10), np.uint8)
    write(path, images=one, labels=one)
    assert len(read_arrays(path, client="*", columns={"a": "images"}))
    with pytest.raises(InputError, match="its arrays, read and copied once, would take"):
        read_arrays(path, client="*", columns={"a": "images", "b": "labels"})


def test_mnist_by_writer(data_folder):
    file = data_folder / "handwriting_mnist_writers" / "mnist_by_writer.npz"
    population = open_population(f"{file}?client=writer")
    assert len(population) == 539 and population.num_examples == 60_000
    assert population.columns["image"].shape == (60_000, 28, 28, 1)
    assert population.columns["image"].dtype == np.uint8
    # 0 = paper: most of a digit's picture is not ink.
    assert population.columns["image"].mean() < 64
