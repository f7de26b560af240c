"""Numbers that are not finite, and ids that stand for no number: refused before a charge."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from jaxpfl.data.readers.arrays import read_arrays
from jaxpfl.errors import InputError
from tests.refusals import refusal

OPTIONS = "label=y&features=x&columns=z"
PLAN = jp.Plan(1, jp.Clip(1.0), jp.Noise(8.0), jp.Poisson(3, 3), 1e-3)


def _csv(rows):
    lines = [f"{row['client']},{row['y']},{row['x']},{row['z']}" for row in rows]
    return "\n".join(["client,y,x,z", *lines]) + "\n"


def written(folder, form, rows):
    """A table with these rows, whose numbers are given as text."""
    path = folder / f"t.{form}"
    if form == "csv":
        path.write_text(_csv(rows))
    elif form == "jsonl":
        bare = {"NaN": "null", "inf": "1e999", "-inf": "-1e999"}
        lines = [
            f'{{"client": "{row["client"]}", "y": {row["y"]}, '
            f'"x": {bare.get(row["x"], row["x"])}, "z": {bare.get(row["z"], row["z"])}}}'
            for row in rows
        ]
        path.write_text("\n".join(lines) + "\n")
    else:
        numbers = [{**row, "x": float(row["x"]), "z": float(row["z"])} for row in rows]
        # NaN stays one, and is no null.
        parquet.write_table(pa.Table.from_pylist(numbers), path)
    return path


def rows(**wrong):
    """Three rows, with another value in a field of the second."""
    made = [{"client": f"c{i}", "y": i, "x": f"{i}.5", "z": f"{i}.25"} for i in range(3)]
    made[1] |= wrong
    return made


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("field", ["x", "z"])
@pytest.mark.parametrize("number", ["NaN", "inf", "-inf", "1e39", "-1e39"])
def test_a_number_that_is_not_finite_is_refused_by_row_and_field(tmp_path, form, field, number):
    """With missing=drop, rows with NaN are left out, as those with none; infinities never are."""
    path = written(tmp_path, form, rows(**{field: number}))
    assert len(jp.data.open(f"{written(tmp_path, form, rows())}?{OPTIONS}")) == 3
    path = written(tmp_path, form, rows(**{field: number}))
    row = "row 3" if form == "csv" else "row 2"
    refusal(lambda: jp.data.open(f"{path}?{OPTIONS}"), f"{row}: field '{field}'")
    if number == "NaN":
        found = jp.data.open(f"{path}?{OPTIONS}&missing=drop")
        assert found.client_ids.to_pylist() == ["c0", "c2"] and found.dropped == 1
    else:
        refusal(lambda: jp.data.open(f"{path}?{OPTIONS}&missing=drop"), f"{row}: field '{field}'")


@pytest.mark.parametrize("text", ["nan", "NAN", " NaN ", "+nan", "-nan", "Infinity", "-INF"])
def test_every_spelling_of_them_in_a_csv(tmp_path, text):
    path = written(tmp_path, "csv", rows(x=text))
    refusal(lambda: jp.data.open(f"{path}?{OPTIONS}"), "row 3: field 'x'")


def test_it_is_said_in_how_many_rows(tmp_path):
    """Of a column without any number, and of one with some."""
    for wrong, of in (([0, 1, 2], "3 of 3"), ([1, 2], "2 of 3")):
        made = rows()
        for row in wrong:
            made[row]["x"] = "NaN"
        with pytest.raises(InputError, match=f"'x'.*{of} rows"):
            jp.data.open(f"{written(tmp_path, 'parquet', made)}?{OPTIONS}")


def test_numbers_inside_lists(tmp_path):
    for number in (float("nan"), float("inf"), 1e300):
        lists = [[1.0, 2.0], [3.0, number], [5.0, 6.0]]
        table = pa.table({"client": ["a", "b", "c"], "y": [0, 1, 0], "x": lists})
        parquet.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(InputError, match="row 2: field 'x'"):
            jp.data.open(f"{tmp_path}/t.parquet?label=y&features=x")
        if number != number:
            found = jp.data.open(f"{tmp_path}/t.parquet?label=y&features=x&missing=drop")
            assert found.columns["features"].tolist() == [[1, 2], [5, 6]]
        with pytest.raises(InputError, match="row 2: field 'x'"):
            jp.data.from_dataframe(table, label="y", features=["x"])
    lines = [{"client": "a", "x": [1, 2]}, {"client": "b", "x": [1, None]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = jp.data.open(f"{tmp_path}/t.jsonl?features=x&missing=drop")
    assert found.client_ids.to_pylist() == ["a"]


def test_a_text_that_reads_nan_is_a_text(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("client,text,z\na,nan,word\nb,inf,nan\n")
    for more in ("", "&missing=drop"):
        found = jp.data.open(f"{path}?columns=z&text=text{more}")
        assert found.columns["text"].to_pylist() == ["nan", "inf"]
        assert found.columns["z"].to_pylist() == ["word", "nan"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0])
def test_arrays_of_a_file(tmp_path, bad):
    images, numbers = np.zeros((3, 2, 2), np.float32), np.zeros((3, 2))
    images[1, 0, 0] = bad
    numbers[1:, 1] = bad if not np.isfinite(bad) else 1e300
    np.savez(tmp_path / "a.npz", client=["a", "b", "c"], images=images, x=numbers)
    refusal(lambda: read_arrays(tmp_path / "a.npz", columns={"image": "images"}), "'images'")
    refusal(lambda: read_arrays(tmp_path / "a.npz", columns={"x": "x"}), "'x' 2 of 3 rows")


AS_FLOATS = ["1.0", "1.", "12.000", "-3.0", " 1.0 ", "1e+16", "1.5E+07", "nan", "NaN", " ", "\t"]
IDS = ["1", "007", "1.5", "1.10", "12345e78", "5e10", "v1.0", "1.0.0", "Nan", "ann ", "a b", "0"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "frame", "npz", "grouped"])
def test_ids_as_libraries_write_them_beside_missing_ones_are_refused(tmp_path, form):
    """One person would be two clients, "1" and "1.0"; other texts are ids as they are written."""

    def opened(ids):
        frame = pd.DataFrame({"client": ids, "text": ["x"] * len(ids)})
        if form == "frame":
            return jp.data.from_dataframe(frame)
        if form == "npz":
            np.savez(tmp_path / "a.npz", client=np.array(ids), images=np.zeros((len(ids), 2, 2)))
            return read_arrays(tmp_path / "a.npz", columns={"image": "images"})
        path = tmp_path / f"t.{'csv' if form == 'grouped' else form}"
        if form == "parquet":
            parquet.write_table(pa.table({n: frame[n].tolist() for n in frame}), path)
        elif form == "jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            frame.to_csv(path, index=False)
        return jp.data.open(f"{path}?client=client{'|value' if form == 'grouped' else ''}")

    assert {*opened(IDS).client_ids.to_pylist()} == {*IDS}
    for wrong in AS_FLOATS:
        with pytest.raises(InputError, match="client") as refused:
            opened(["1", "2", wrong])
        row = 4 if form in ("csv", "grouped") else 3
        assert form == "npz" or f"row {row}:" in str(refused.value)


def test_shards_of_which_one_lacks_an_id(tmp_path):
    """As pandas writes them: whole numbers become floats where one is missing."""
    pd.DataFrame({"client": [1, 2], "text": ["a", "b"]}).to_csv(tmp_path / "1.csv", index=False)
    pd.DataFrame({"client": [1, None], "text": ["a", "b"]}).to_csv(tmp_path / "2.csv", index=False)
    for more in ("", "&missing=drop"):
        with pytest.raises(InputError, match=r"2\.csv, row 2: field 'client'"):
            jp.data.open(f"{tmp_path}?client=client{more}")


def _clients(number):
    made = {f"c{i}": {"x": np.full((1, 2), i, np.float32)} for i in range(3)}
    made["c1"]["x"][0, 1] = number
    made |= {name: {**held, "unread": np.full(1, np.nan)} for name, held in made.items()}
    return jp.data.from_clients(made)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_of_clients_in_memory_a_warning_comes_before_the_charge(tmp_path, number):
    model = jp.models.from_functions(
        lambda _: {"w": jnp.zeros(2)}, lambda p, b: b["x"] @ p["w"], columns=("x",)
    )
    ask = optax.sgd(1.0)
    algorithm = jp.algorithms.fed_avg(
        model, client=ask, server=ask, plan=PLAN, cohort=jp.CohortSpec(1, 1)
    )
    ledger, secure = tmp_path / "l", jp.SecureSum(clients=3, clip_norm=1.0, noise_multiplier=8.0)
    calls = (
        lambda clients: jp.run(algorithm, clients, ledger=ledger, out=tmp_path / "run"),
        lambda clients: jp.release(_total, clients, PLAN, ledger=ledger),
        lambda clients: jp.secure_release(_total, clients, secure, delta=1e-3, ledger=ledger),
        lambda clients: clients.save(tmp_path / "saved"),
    )
    for call in calls:
        with warnings.catch_warnings(), pytest.raises(UserWarning, match="'x': some examples"):
            warnings.simplefilter("error")
            call(_clients(number))
    assert not ledger.exists() and not (tmp_path / "saved").exists()
    # A column that no query reads may hold what it likes.
    calls[0](_clients(1.0))


def _total(broadcast, examples, key):
    return examples.batches["x"].sum((0, 1))
