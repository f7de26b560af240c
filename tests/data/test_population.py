"""Populations: what they refuse, how they are split, and that what is saved is what is loaded."""

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.data import Population, from_clients, from_rows
from jaxpfl.data import open as open_population
from jaxpfl.errors import CorruptFile, InputError

SECRET = "rosebud"
DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "float32", "float64"]


def small(clients: int = 4) -> Population:
    """Client k holds k examples, of every kind of column."""
    return from_clients(
        {
            f"{SECRET} {k}": {
                "image": np.full((k, 2, 3, 1), k, np.float32),
                "label": np.arange(k, dtype=np.int32),
                "flag": np.arange(k) % 2 == 0,
                "text": [f"{SECRET} {k}.{j}" for j in range(k)],
            }
            for k in range(1, clients + 1)
        },
        name="small",
        unit="person",
    )


def same(a: Population, b: Population) -> None:
    assert list(a.columns) == list(b.columns)
    for name, column in a.columns.items():
        if isinstance(column, np.ndarray):
            np.testing.assert_array_equal(column, b.columns[name], strict=True)
        else:
            assert column.equals(b.columns[name])
    np.testing.assert_array_equal(a.offsets, b.offsets, strict=True)
    assert a.client_ids.equals(b.client_ids)
    assert (a.name, a.unit, a.fingerprint) == (b.name, b.unit, b.fingerprint)


def test_a_population_counts_clients_and_examples():
    population = small()
    assert (len(population), population.num_examples) == (4, 10)
    np.testing.assert_array_equal(population.sizes(), np.array([1, 2, 3, 4]), strict=True)
    held = population.examples(2)
    assert held["image"].shape == (3, 2, 3, 1) and held["label"].tolist() == [0, 1, 2]
    assert held["text"].to_pylist() == [f"{SECRET} 3.{j}" for j in range(3)]
    with pytest.raises(InputError, match="0 .. 3"):
        population.examples(4)


def test_columns_cannot_be_written_to():
    population = small()
    for array in (population.columns["label"], population.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(TypeError):
        population.columns["label"] = None


def test_repr_shows_schema_and_unit_and_no_ids_or_values():
    """TRUST 5, 40: the unit of privacy is printed; sizes and ids are not."""
    shown = repr(small())
    assert "person" in shown and "float32[2, 3, 1]" in shown and "text: text" in shown
    assert SECRET not in shown and "10" not in shown


def test_select_takes_whole_clients_in_the_order_asked_for():
    chosen = small().select([3, 0])
    assert chosen.client_ids.to_pylist() == [f"{SECRET} 4", f"{SECRET} 1"]
    assert chosen.sizes().tolist() == [4, 1]
    assert chosen.columns["image"][:, 0, 0, 0].tolist() == [4, 4, 4, 4, 1]
    assert chosen.columns["text"].to_pylist()[-1] == f"{SECRET} 1.0"
    assert len(small().select([])) == 0 and small().select([]).num_examples == 0
    same(small().select(range(4)), small())


@pytest.mark.parametrize("wrong", [[4], [-1], [0, 0], [0.0], [True], [[0]], ["0"]])
def test_select_refuses_wrong_indices(wrong):
    with pytest.raises(InputError, match="client indices"):
        small().select(wrong)


def test_with_min_examples_drops_small_clients_and_says_so():
    dropped = small().with_min_examples(3)
    assert dropped.sizes().tolist() == [3, 4] and "at least 3" in dropped.name
    for wrong in (0, 1.5, float("nan"), "3"):
        with pytest.raises(InputError, match="n must"):
            small().with_min_examples(wrong)


def many(clients: int) -> Population:
    ids = [f"client {k}" for k in range(clients)]
    return Population({"x": np.arange(clients)}, np.arange(clients + 1), ids, "many", "client")


def test_split_is_by_client_disjoint_and_in_proportion():
    population = many(20_000)
    parts = population.split({"train": 0.7, "valid": 0.1, "test": 0.2}, seed=1)
    ids = {name: set(part.client_ids.to_pylist()) for name, part in parts.items()}
    assert sum(map(len, ids.values())) == len(set().union(*ids.values())) == 20_000
    for name, share in [("train", 0.7), ("valid", 0.1), ("test", 0.2)]:
        # Binomial: five standard deviations.
        assert abs(len(ids[name]) - 20_000 * share) < 5 * (20_000 * share * (1 - share)) ** 0.5
        assert name in parts[name].name
    for part in parts.values():
        assert [f"client {x}" for x in part.columns["x"]] == part.client_ids.to_pylist()


def test_split_moves_nobody_when_clients_are_added():
    def sides(population: Population) -> dict[str, str]:
        parts = population.split({"a": 0.5, "b": 0.3}, seed=1)
        return {i: name for name, part in parts.items() for i in part.client_ids.to_pylist()}

    few, more = sides(many(500)), sides(many(1_000))
    assert len(few) < 500, "a fifth of the clients belongs to no part"
    assert {i: side for i, side in more.items() if int(i.split()[1]) < 500} == few
    assert sides(many(500).select(np.arange(500)[::-1])) == few


def test_split_depends_on_its_seed():
    one, other = (many(100).split({"a": 0.5}, seed=seed)["a"].fingerprint for seed in (1, 2))
    assert one != other
    assert one == many(100).split({"a": 0.5}, seed=1)["a"].fingerprint


def test_thirds_leave_nobody_out():
    parts = many(1_000).split(dict.fromkeys("abc", 1 / 3), seed=0)
    assert sum(len(part) for part in parts.values()) == 1_000


@pytest.mark.parametrize(
    "fractions",
    [{}, {"a": 0.0}, {"a": -0.1}, {"a": 1.1}, {"a": 0.6, "b": 0.6}, {"a": float("nan")}]
    + [{"a": float("inf")}, {"a": "0.5"}, {"a": True}],
)
def test_split_refuses_wrong_fractions(fractions):
    """TRUST 9"""
    with pytest.raises(InputError, match="fractions"):
        many(3).split(fractions, seed=0)


def test_with_columns_keeps_clients_and_checks_the_number_of_examples():
    tokens = small().with_columns({"tokens": np.zeros((10, 5), np.int32)})
    assert list(tokens.columns) == ["tokens"] and tokens.sizes().tolist() == [1, 2, 3, 4]
    assert (tokens.name, tokens.unit) == ("small", "person")
    with pytest.raises(InputError, match="'tokens' has 9 examples, the offsets say 10"):
        small().with_columns({"tokens": np.zeros(9)})


def test_rows_of_one_client_are_brought_together_in_their_order():
    """TRUST 5: interleaved clients become one client each."""
    population = from_rows(
        np.array([1, 0, 1, 2, 0]),
        ["a", "b", "c", "nobody"],
        {"x": np.arange(5), "text": list("vwxyz")},
        name="rows",
        unit="letter",
    )
    assert population.sizes().tolist() == [2, 2, 1, 0]
    assert population.columns["x"].tolist() == [1, 4, 0, 2, 3]
    assert population.columns["text"].to_pylist() == list("wzvxy")


# --- refusals


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (dict(offsets=[0, 2, 1, 3]), "never decrease"),
        (dict(offsets=[1, 2, 3]), "start at 0"),
        (dict(offsets=[]), "whole numbers"),
        (dict(offsets=[0.0, 3.0]), "whole numbers"),
        (dict(offsets=[[0, 3]]), "whole numbers"),
        (dict(offsets=[0, 1, 2]), "'x' has 3 examples, the offsets say 2"),
        (dict(offsets=[0, 3]), "2 client ids for 1 clients"),
        (dict(columns={}), "at least one column"),
        (dict(columns={"x": 3.0}), "examples axis"),
        (dict(columns={"x": [[1], [2, 3], [4]]}), "different shapes"),
        (dict(columns={"x": np.zeros((3, 0))}), "no zero"),
        (dict(columns={"x": np.zeros(3, complex)}), "found complex128"),
        (dict(columns={"x": np.array(["2020-01-01"] * 3, "M8[D]")}), "found datetime64"),
        (dict(columns={"x": [SECRET, 1, SECRET]}), "row 1: expected a string, found int"),
        (dict(columns={"x": [SECRET, None, SECRET]}), "row 1: expected a string, found NoneType"),
        (dict(columns={"x": pa.array([SECRET, None, SECRET])}), "1 missing values"),
        (dict(columns={"x": pa.array([1, 2, 3])}), "Arrow strings"),
        (dict(client_ids=[SECRET, SECRET]), "different, found one twice"),
    ],
)
def test_parts_that_do_not_fit_are_refused_and_no_value_is_told(parts, message):
    """TRUST 5, 7"""
    good = dict(columns={"x": np.zeros(3)}, offsets=[0, 1, 3], client_ids=["a", "b"])
    Population(**good, name="", unit="")
    with pytest.raises(InputError, match=message) as raised:
        Population(**{**good, **parts}, name="", unit="")
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": np.zeros((1, 3))}, r"columns \['x'\], expected \['text', 'x'\]"),
        ({"x": np.zeros((1, 3)), "text": ["a"], "z": [1]}, r"columns \['text', 'x', 'z'\]"),
        ({"x": np.zeros((1, 4)), "text": ["a"]}, r"float64\[4\], expected float64\[3\]"),
        ({"x": np.zeros((1, 3), "f4"), "text": ["a"]}, r"float32\[3\], expected float64\[3\]"),
        ({"x": np.zeros((1, 3)), "text": [1]}, "expected text"),
        ({"x": np.zeros((2, 3)), "text": ["a"]}, r"different lengths: \[1, 2\]"),
    ],
)
def test_a_client_of_another_schema_is_named_by_its_index(second, message):
    """TRUST 7"""
    first = {"x": np.zeros((1, 3)), "text": [SECRET]}
    with pytest.raises(InputError, match=f"client 1.*{message}") as raised:
        from_clients({"a": first, SECRET: second})
    assert SECRET not in str(raised.value)


def test_from_clients_refuses_nobody_and_ids_that_are_no_strings():
    with pytest.raises(InputError, match="at least one client"):
        from_clients({})
    with pytest.raises(InputError, match="client 0: its id must be a string, found int"):
        from_clients({7: {"x": [1]}})


def test_a_client_without_examples_takes_any_schema():
    """TRUST 1"""
    population = from_clients({"a": {"x": []}, "b": {"x": np.ones((2, 3), "f4")}, "c": {"x": ()}})
    assert population.sizes().tolist() == [0, 2, 0]
    assert population.columns["x"].shape == (2, 3) and population.columns["x"].dtype == np.float32


# --- fingerprint


def test_a_fingerprint_is_of_the_content_however_it_is_held():
    population = small()
    text, label = population.columns["text"], population.columns["label"]
    chunked = pa.chunked_array([text[:3], text[3:]])
    sliced = pa.concat_arrays([pa.array(["before"], pa.large_string()), text])[1:]
    strided = np.repeat(label, 2)[::2]
    for other in (chunked, sliced, text.cast(pa.string()), text.to_pylist()):
        again = population.with_columns({**population.columns, "text": other})
        assert again.fingerprint == population.fingerprint
    for other in (strided, label.astype(">i4")):
        again = population.with_columns({**population.columns, "label": other})
        assert again.fingerprint == population.fingerprint
    renamed = Population(population.columns, population.offsets, population.client_ids, "x", "y")
    assert renamed.fingerprint == population.fingerprint
    turned = population.with_columns(dict(reversed(population.columns.items())))
    assert turned.fingerprint == population.fingerprint


def test_a_fingerprint_changes_with_any_value_type_shape_name_or_offset():
    base = dict(columns={"x": np.zeros((4, 2)), "t": ["a", "b", "", "c"]}, offsets=[0, 1, 2, 4])
    x = np.zeros((4, 2))
    nudged = x.copy()
    nudged[3, 1] = np.nextafter(0.0, 1.0)
    changes = [
        {},
        dict(columns={**base["columns"], "x": nudged}),
        dict(columns={**base["columns"], "x": -x}),
        dict(columns={**base["columns"], "x": x.astype(np.float32)}),
        dict(columns={**base["columns"], "x": x.astype(np.int64)}),
        dict(columns={**base["columns"], "x": x[:, :, None]}),
        dict(columns={**base["columns"], "t": ["a", "", "b", "c"]}),
        dict(columns={**base["columns"], "t": ["a", "b", "\0", "c"]}),
        dict(columns={"x": x}),
        dict(columns={"y": x, "t": base["columns"]["t"]}),
        dict(offsets=[0, 1, 3, 4]),
        dict(offsets=[0, 1, 2, 4, 4]),
    ]
    found = set()
    for change in changes:
        parts = {**base, **change}
        ids = [str(k) for k in range(len(parts["offsets"]) - 1)]
        found.add(Population(**parts, client_ids=ids, name="", unit="").fingerprint)
    assert len(found) == len(changes)


# --- saved and loaded


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


def test_a_large_column_is_not_read_into_memory(tmp_path):
    """TRUST 4: memory stays flat however large the population is."""
    size = 4_000_000
    numbers = Population({"x": np.arange(size)}, [0, size], ["a"], "n", "u")
    numbers.save(tmp_path / "numbers")
    words = Population({"t": ["x" * 1000] * 4000}, [0, 4000], ["a"], "n", "u")
    words.save(tmp_path / "words")
    allocated = pa.total_allocated_bytes()
    loaded = [Population.load(tmp_path / name) for name in ("numbers", "words")]
    assert pa.total_allocated_bytes() - allocated < 100_000
    # The mapping itself: the array's addresses lie in one of the process's mappings of the file.
    address = loaded[0].columns["x"].__array_interface__["data"][0]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists a process's mappings")
    spans = [
        [int(part, 16) for part in line.split()[0].split("-")]
        for line in maps.read_text().splitlines()
        if line.endswith(str(tmp_path / "numbers" / "examples.arrow"))
    ]
    assert any(low <= address and address + 8 * size <= high for low, high in spans)


@pytest.mark.parametrize(
    "texts",
    [["", "", ""], ["a\0b", "👩‍👩‍👧 é", "\ud800lone"], ["x" * 1_000_000, "\n", "\u2028"]],
)
def test_text_comes_back_as_it_was(texts, tmp_path):
    """TRUST 8: NUL, emoji, empty and long texts stay; a lone surrogate is U+FFFD."""
    before = from_clients({"a": {"t": texts[:1]}, "b": {"t": texts[1:]}, "c": {"t": []}})
    before.save(tmp_path / "saved")
    after = Population.load(tmp_path / "saved")
    same(before, after)
    expected = [text.replace("\ud800", "\ufffd") for text in texts]
    assert after.columns["t"].to_pylist() == expected


def test_populations_without_examples_or_clients_can_be_saved(tmp_path):
    """TRUST 1"""
    none = small().select([])
    for index, population in enumerate([none, from_clients({"a": {"x": []}, "b": {"x": []}})]):
        population.save(tmp_path / str(index))
        same(population, Population.load(tmp_path / str(index)))


def test_a_selection_saves_its_own_clients_alone(tmp_path):
    small().select([1]).save(tmp_path / "saved")
    same(small().select([1]), Population.load(tmp_path / "saved"))
    stored = b"".join(path.read_bytes() for path in (tmp_path / "saved").iterdir())
    assert f"{SECRET} 2".encode() in stored and f"{SECRET} 3".encode() not in stored


def test_a_fingerprint_is_that_of_the_content_wherever_it_lies(tmp_path):
    population = small()
    population.save(tmp_path / "one")
    shutil.move(tmp_path / "one", tmp_path / "two")
    loaded = Population.load(tmp_path / "two")
    assert loaded.fingerprint == population.fingerprint
    # And not merely what the manifest says.
    again = Population(loaded.columns, loaded.offsets, loaded.client_ids, "", "")
    assert again.fingerprint == population.fingerprint
    assert open_population(str(tmp_path / "two")).fingerprint == population.fingerprint


def test_a_saved_folder_is_private_and_never_overwritten(tmp_path):
    """TRUST 40"""
    small().save(tmp_path / "deep" / "saved")
    assert stat.S_IMODE((tmp_path / "deep" / "saved").stat().st_mode) == 0o700
    with pytest.raises(InputError, match="exists already"):
        small(2).save(tmp_path / "deep" / "saved")
    same(small(), Population.load(tmp_path / "deep" / "saved"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["saved"]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """TRUST 6, 36: whole or absent."""

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxpfl.data.storage._sha256", full)
    with pytest.raises(OSError, match="No space"):
        small().save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(tmp_path) -> Path:
    small().save(tmp_path / "saved")
    return tmp_path / "saved"


FILES = ["manifest.json", "examples.arrow", "clients.arrow"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_the_file_named(name, saved):
    """TRUST 6"""
    path = saved / name
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for position in generator.choice(len(whole), 40, replace=False):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=name) as raised:
            Population.load(saved)
        assert SECRET not in str(raised.value)
    path.write_bytes(whole)
    same(small(), Population.load(saved))


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found_and_the_file_named(name, saved):
    """TRUST 6"""
    path = saved / name
    whole = path.read_bytes()
    # The manifest's last byte is its newline: without it, it still says all.
    for length in {0, 1, len(whole) // 2, len(whole) - 2}:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match=name):
            Population.load(saved)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_named(name, saved):
    """TRUST 6"""
    (saved / name).unlink()
    with pytest.raises(CorruptFile, match=f"{name} is missing"):
        Population.load(saved)


def test_a_folder_without_a_manifest_is_no_population(saved):
    (saved / "manifest.json").unlink()
    with pytest.raises(InputError, match="manifest.json"):
        Population.load(saved)


@pytest.mark.parametrize("key", ["examples", "clients", "fingerprint", "columns", "files", "name"])
def test_an_edited_manifest_is_found(key, saved):
    """TRUST 6"""
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[key] = {"edited": 1}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptFile, match="manifest.json was altered"):
        Population.load(saved)
    del manifest[key]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptFile, match="manifest.json was altered"):
        Population.load(saved)


@pytest.mark.parametrize("content", ["[]", "null", "7", '"text"', "{}", '{"sha256": 1}', "\x80"])
def test_a_manifest_that_is_something_else_is_refused(content, saved):
    """TRUST 6"""
    (saved / "manifest.json").write_text(content)
    with pytest.raises(CorruptFile, match="manifest.json"):
        Population.load(saved)


def test_saving_the_same_content_writes_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        small().save(tmp_path / name)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
