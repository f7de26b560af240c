"""Populations: what they refuse, how they are split, and what their fingerprint sees."""

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.data import Population, from_clients, from_rows
from jaxpfl.data.content import content_hash
from jaxpfl.errors import InputError
from tests.data.populations import SECRET, same, small


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
    for wrong in ([4], [-1], [0, 0], [0.0], [True], [[0]], ["0"]):
        with pytest.raises(InputError, match="client indices"):
            small().select(wrong)


def test_with_min_examples_empties_small_clients_and_keeps_them():
    """TRUST 17: the number of clients does not follow from what they hold."""
    population = small()
    emptied = population.with_min_examples(3)
    sizes = population.sizes()
    assert sorted(size for size in sizes if size >= 3) == [3, 4]
    assert emptied.sizes().tolist() == [size if size >= 3 else 0 for size in sizes]
    assert emptied.client_ids.equals(population.client_ids)
    assert "at least 3" in emptied.name and emptied.unit == population.unit
    assert emptied.fingerprint == population.fingerprint
    for k, size in enumerate(sizes):
        if size >= 3:
            for column, values in population.examples(k).items():
                np.testing.assert_array_equal(emptied.examples(k)[column], values)
    assert len(population.with_min_examples(100)) == len(population)
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
    thirds = population.split(dict.fromkeys("abc", 1 / 3), seed=0)
    assert sum(map(len, thirds.values())) == 20_000
    wrong = ({}, {"a": 0.0}, {"a": -0.1}, {"a": 1.1}, {"a": 0.6, "b": 0.6})
    # TRUST 9.
    for fractions in (*wrong, *({"a": each} for each in (float("nan"), float("inf"), "0.5", True))):
        with pytest.raises(InputError, match="fractions"):
            population.split(fractions, seed=0)


def test_split_moves_nobody_when_clients_are_added():
    def sides(population: Population) -> dict[str, str]:
        parts = population.split({"a": 0.5, "b": 0.3}, seed=1)
        return {i: name for name, part in parts.items() for i in part.client_ids.to_pylist()}

    few, more = sides(many(500)), sides(many(1_000))
    assert len(few) < 500, "a fifth of the clients belongs to no part"
    assert {i: side for i, side in more.items() if int(i.split()[1]) < 500} == few
    assert sides(many(500).select(np.arange(500)[::-1])) == few
    one, other = (many(100).split({"a": 0.5}, seed=seed)["a"].content for seed in (1, 2))
    assert one != other


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
        (dict(columns={"x": np.zeros((3, 0))}), "a zero"),
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


def test_a_client_without_examples_takes_any_schema():
    """TRUST 1"""
    population = from_clients({"a": {"x": []}, "b": {"x": np.ones((2, 3), "f4")}, "c": {"x": ()}})
    assert population.sizes().tolist() == [0, 2, 0]
    assert population.columns["x"].shape == (2, 3) and population.columns["x"].dtype == np.float32


def test_a_fingerprint_is_of_the_content_however_it_is_held():
    population = small()

    def holding(columns):
        return Population(columns, population.offsets, population.client_ids)

    text, label = population.columns["text"], population.columns["label"]
    chunked = pa.chunked_array([text[:3], text[3:]])
    sliced = pa.concat_arrays([pa.array(["before"], pa.large_string()), text])[1:]
    strided = np.repeat(label, 2)[::2]
    for other in (chunked, sliced, text.cast(pa.string()), text.to_pylist()):
        again = holding({**population.columns, "text": other})
        assert again.fingerprint == population.fingerprint
    for other in (strided, label.astype(">i4")):
        again = holding({**population.columns, "label": other})
        assert again.fingerprint == population.fingerprint
    renamed = Population(population.columns, population.offsets, population.client_ids, "x", "y")
    assert renamed.fingerprint == population.fingerprint
    turned = holding(dict(reversed(list(population.columns.items()))))
    assert turned.fingerprint == population.fingerprint


DERIVED = {
    "part": lambda clients: clients.select([0, 1]),
    "part of a part": lambda clients: clients.select([0, 1, 3]).select([2]),
    "nobody": lambda clients: clients.select([]),
    "shuffle": lambda clients: clients.select([2, 0, 3, 1]),
    "split": lambda clients: clients.split({"a": 0.6, "b": 0.4}, seed=0)["a"],
    "large clients": lambda clients: clients.with_min_examples(2),
    "columns": lambda clients: clients.with_columns({"y": np.arange(10)}),
    "examples": lambda clients: clients.with_examples({"y": np.arange(4)}, np.arange(5)),
    "filter": lambda clients: clients.keeping(np.arange(10) % 3 == 0),
    "all of it": lambda clients: clients.with_columns({"y": np.arange(10)}).select([3, 0]),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_what_is_made_of_a_population_has_its_source_and_a_content_of_its_own(derive):
    """TRUST 29: so that all of it is charged to one ledger. Asked in any order."""
    source = small()
    derived = derive(source)
    alone = Population(derived.columns, derived.offsets, derived.client_ids)
    # Asked of the derived one first: the source hashes nothing yet.
    assert derived.fingerprint == small().fingerprint == small().content
    assert derived.content == alone.content == alone.fingerprint != source.content
    assert source.fingerprint == source.content == derived.fingerprint


def test_nothing_is_hashed_before_it_is_asked_for_and_then_once(monkeypatch):
    hashed = []
    real = content_hash

    def counting(columns, offsets):
        hashed.append(len(offsets) - 1)
        return real(columns, offsets)

    monkeypatch.setattr("jaxpfl.data.population.content_hash", counting)
    source = many(7)
    parts = source.split({"a": 0.5, "b": 0.5}, seed=1)
    other = parts["a"].with_columns({"y": np.zeros(len(parts["a"]))})
    assert hashed == []
    assert len({parts["a"].fingerprint, parts["b"].fingerprint, other.fingerprint}) == 1
    assert source.fingerprint == source.content == other.fingerprint
    assert hashed == [7]
    assert other.content == other.content
    assert hashed == [7, len(other)]


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


def test_other_examples_may_be_of_the_same_clients():
    population = from_clients({"a": {"x": [1, 2, 3]}, "b": {"x": [4]}, "c": {"x": [5, 6]}})
    kept = population.keeping(np.array([True, False, True, False, False, True]))
    assert kept.columns["x"].tolist() == [1, 3, 6]
    # A client that keeps nothing is still one.
    assert kept.offsets.tolist() == [0, 2, 2, 3]
    assert kept.client_ids.equals(population.client_ids)
    other = population.with_examples({"y": np.arange(4.0)}, np.array([0, 0, 4, 4]))
    assert other.examples(1)["y"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(InputError, match="2 clients in offsets, expected 3"):
        population.with_examples({"x": np.ones(2)}, np.array([0, 1, 2]))
