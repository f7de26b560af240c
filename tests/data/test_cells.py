"""Images and arrays in a table's cells: what was written is read, or its row is named."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from tests.refusals import refusal

image = pytest.importorskip("PIL.Image")

USERS = ["b", "a", "b", "c"]
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 3)).astype(np.uint8)
ARRAYS = np.random.default_rng(1).normal(size=(4, 2, 3, 2)).astype(np.float32)
# Clients come in the order of first appearance.
ORDER = [0, 2, 1, 3]


def encoded(pixels: np.ndarray, format: str = "png") -> bytes:
    file = io.BytesIO()
    image.fromarray(pixels).save(file, format)
    return file.getvalue()


CELLS = [encoded(pixels) for pixels in PIXELS]
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def opened(path, cells: pa.Array, options: str = ""):
    table = pa.table({"user": USERS, "label": [0, 1, 0, 1], "x": cells})
    parquet.write_table(table, path, row_group_size=3)
    return jp.data.open(f"{path}?client=user&label=label&columns=x{options}")


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([{"bytes": cell, "path": None} for cell in CELLS], IMAGE),
        pa.array([{"bytes": cell, "path": "x.png"} for cell in CELLS], IMAGE),
        pa.array(CELLS, pa.binary()),
        pa.array(CELLS, pa.large_binary()),
    ],
    ids=lambda cells: str(cells.type),
)
def test_images_are_those_that_were_written(tmp_path, cells):
    found = opened(tmp_path / "x.parquet", cells)
    np.testing.assert_array_equal(found.columns["x"], PIXELS[ORDER], strict=True)
    np.testing.assert_array_equal(found.columns["label"], [0, 0, 1, 1])


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.list_(pa.list_(pa.float32()))),
        pa.large_list(pa.list_(pa.list_(pa.float64()))),
        pa.list_(pa.list_(pa.list_(pa.float32(), 2), 3), 2),
    ],
    ids=str,
)
def test_arrays_are_those_that_were_written(tmp_path, kind):
    found = opened(tmp_path / "x.parquet", pa.array(ARRAYS.tolist(), kind)).columns["x"]
    np.testing.assert_array_equal(found, ARRAYS[ORDER].astype(found.dtype), strict=True)


def test_so_are_those_of_the_library_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    features = {
        "user": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "picture": datasets.Image(),
        "plane": datasets.Array2D((2, 3), "float32"),
        "room": datasets.Array3D((2, 3, 2), "float32"),
    }
    rows = {
        "user": USERS,
        "label": [0, 1, 0, 1],
        "picture": [image.fromarray(pixels) for pixels in PIXELS],
        "plane": ARRAYS[..., 0].tolist(),
        "room": ARRAYS.tolist(),
    }
    written = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    written.to_parquet(tmp_path / "x.parquet")
    written.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": written, "test": written}).save_to_disk(tmp_path / "parts")
    options = "client=user&label=label&columns=picture,plane,room"
    for source in ("x.parquet?", "saved?", "parts?part=train&"):
        found = jp.data.open(f"{tmp_path / source}{options}").columns
        np.testing.assert_array_equal(found["picture"], PIXELS[ORDER], strict=True)
        np.testing.assert_array_equal(found["plane"], ARRAYS[ORDER][..., 0], strict=True)
        np.testing.assert_array_equal(found["room"], ARRAYS[ORDER], strict=True)
    frame = {"client": "user", "label": "label", "columns": ["picture"]}
    found = jp.data.from_dataframe(written, **frame).columns["picture"]
    np.testing.assert_array_equal(found, PIXELS[ORDER], strict=True)
    for part, said in (("part=valid&", "'train', 'test', found 'valid'"), ("", "?part=PART")):
        refusal(lambda part=part: jp.data.open(f"{tmp_path / 'parts'}?{part}{options}"), said)
    refusal(lambda: jp.data.open(f"{tmp_path / 'saved'}?part=train&{options}"), "no parts")


def test_images_of_several_files_are_grouped_on_the_disk(tmp_path):
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        table = {"user": USERS, "label": [0, 1, 0, 1 - shard], "x": pa.array(CELLS)}
        parquet.write_table(pa.table(table), tmp_path / "shards" / f"{shard}.parquet")
    found = jp.data.open(f"{tmp_path / 'shards'}?client=user&label=label&columns=x")
    assert dict(zip(found.client_ids.to_pylist(), found.sizes().tolist(), strict=True)) == {
        "a": 2, "b": 4, "c": 2
    }  # fmt: skip
    places = dict(zip(found.client_ids.to_pylist(), range(3), strict=True))
    np.testing.assert_array_equal(found.examples(places["a"])["x"], PIXELS[[1, 1]], strict=True)


OTHER = encoded(PIXELS[0, :2])
GREY = encoded(PIXELS[0, :, :, 0])
DEEP = encoded((np.arange(15).reshape(3, 5) * 1000).astype(np.uint16))


@pytest.mark.parametrize("row", [1, 3])
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (CELLS[0][:60], "an image of 8 or 16 bits, found damaged"),
        (b"no image", "an image of 8 or 16 bits, found damaged"),
        (b"", "an image of 8 or 16 bits, found damaged"),
        (encoded(PIXELS[0, :, :, 0].astype(np.float32), "tiff"), "an image of 8 or 16 bits"),
        (OTHER, "first"),
        (GREY, "first"),
        (DEEP, "first"),
        (None, "no value"),
    ],
)
def test_the_row_of_an_image_that_does_not_fit_is_named(tmp_path, row, cell, said):
    cells = [*CELLS[:row], cell, *CELLS[row + 1 :]]
    for kind in (pa.binary(), IMAGE):
        values = cells if kind == pa.binary() else [{"bytes": each, "path": "p"} for each in cells]
        where = f"row {row + 1}: field 'x' must be {said}"
        if cell is None and kind == IMAGE:
            where = f"row {row + 1}: field 'x' must be an image in the table itself"
        array = pa.array(values, kind)
        refusal(lambda array=array: opened(tmp_path / "x.parquet", array), where)
    if cell is None:
        kept = opened(tmp_path / "x.parquet", pa.array(cells, pa.binary()), "&missing=drop")
        assert kept.num_examples == 3


@pytest.mark.parametrize("cell", [[[1.0, 2.0]], [[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0, None]], []])
def test_the_row_of_an_array_that_does_not_fit_is_named(tmp_path, cell):
    cells = [[[1.0, 2.0], [3.0, 4.0]]] * 3 + [cell]
    refusal(lambda: opened(tmp_path / "x.parquet", pa.array(cells)), "row 4: field 'x' array")


@pytest.mark.parametrize("cells", [[{"a": 1}] * 4, [[["x"]]] * 4, [[{"bytes": b"x"}]] * 4])
def test_other_types_are_refused_before_a_row_is_read(tmp_path, cells):
    refusal(lambda: opened(tmp_path / "x.parquet", pa.array(cells)), "row 1: field 'x' must be")
