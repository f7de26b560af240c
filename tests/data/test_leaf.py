"""LEAF's JSON: what was written is read, and what does not agree is named."""

import json

import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.data.open import why_missing
from jaxpfl.errors import CorruptFile, InputError
from tests.refusals import refusal

X = np.random.default_rng(0).random((5, 4)).astype(np.float32)
Y = [3, 0, 1, 2, 2]


def record(**changes):
    data = {"u7": {"x": X[:3].tolist(), "y": Y[:3]}, "u2": {"x": X[3:].tolist(), "y": Y[3:]}}
    return {"users": ["u7", "u2"], "num_samples": [3, 2], "user_data": data} | changes


def test_users_are_clients(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(record()))
    for source in ("a.json", "."):
        found = jp.data.open(str(tmp_path / source))
        assert found.client_ids.to_pylist() == ["u7", "u2"]
        np.testing.assert_array_equal(found.offsets, [0, 3, 5])
        np.testing.assert_array_equal(found.columns["features"], X, strict=True)
        np.testing.assert_array_equal(found.columns["label"], np.array(Y, np.int32), strict=True)
        assert why_missing(str(tmp_path / source)) == ""
    more = {"u2": {"x": X[:1].tolist(), "y": [9]}}
    second = record(users=["u2"], num_samples=[1], user_data=more, hierarchies=[])
    (tmp_path / "b.json").write_text(json.dumps(second))
    found = jp.data.open(f"{tmp_path}?min_examples=1")
    assert found.sizes().tolist() == [3, 3]
    np.testing.assert_array_equal(found.examples(1)["label"], [2, 2, 9])


def test_texts_are_texts(tmp_path):
    data = {"romeo": {"x": ["but so", "ut sof"], "y": ["f", "t"]}}
    written = record(users=["romeo"], num_samples=[2], user_data=data)
    (tmp_path / "a.json").write_text(json.dumps(written))
    found = jp.data.open(str(tmp_path / "a.json"))
    assert found.columns["text"].to_pylist() == ["but so", "ut sof"]
    assert found.columns["target"].to_pylist() == ["f", "t"]


def of(x, y):
    data = {"u": {"x": x, "y": y}}
    return record(users=["u"], num_samples=[len(x) if isinstance(x, list) else 1], user_data=data)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (record(users=["u7"]), "one entry for each user found 1, 2 and 2"),
        (record(users=["u7", "u7"]), "a user twice"),
        (record(num_samples=[3]), "found 2, 1 and 2"),
        (record(num_samples=[3, 1]), "user 2: as long as num_samples"),
        (record(num_samples=[3, "2"]), "user 2: as long as num_samples"),
        (record(users=["u7", "u9"]), "user 2: who is in user_data"),
        (record(users=["u7", 2]), "user 2: who is in user_data"),
        (record(user_data={"u7": {}, "u2": []}), "user 1: expected lists x and y"),
        (record(user_data=[]), "'user_data' must be an object"),
        (of([[1.0], [2.0]], [1]), "user 1: as long as"),
        (of([[1.0], [2.0, 3.0]], [1, 2]), "x lists of numbers of one length"),
        (of([[1.0], ["2"]], [1, 2]), "x lists of numbers of one length"),
        (of([1.0, 2.0], [1, 2]), "x lists of numbers"),
        (of([[1.0], [1e300]], [1, 2]), "x lists of numbers"),
        (of([[1.0], [None]], [1, 2]), "x lists of numbers"),
        (of([[1.0]], [0.5]), "y whole numbers"),
        (of([[1.0]], [2**40]), "y whole numbers"),
        (of([[1.0]], [None]), "y whole numbers"),
        (record(users=[], num_samples=[], user_data={}), "no examples"),
    ],
)
def test_what_does_not_agree_is_named(tmp_path, written, said):
    (tmp_path / "a.json").write_text(json.dumps(written))
    refusal(lambda: jp.data.open(str(tmp_path / "a.json")), f"a.json {said}", InputError)


@pytest.mark.parametrize("cut", [40, 120, -1])
def test_a_cut_file_is_named(tmp_path, cut):
    (tmp_path / "a.json").write_text(json.dumps(record())[:cut])
    refusal(lambda: jp.data.open(str(tmp_path / "a.json")), "a.json JSON", CorruptFile)


@pytest.mark.parametrize(
    ("user", "x", "said"),
    [
        ("a", [[16777217, 2]], "x float32"),
        ("a", [[16777217.0, 0.5]], "x float32"),
        ("1.0", [[1, 2]], "user 1 1.0"),
        ("nan", [[1, 2]], "user 1 nan"),
    ],
)
def test_what_would_become_another_number_or_person_is_refused(tmp_path, user, x, said):
    path, own = tmp_path / "data.json", {user: {"x": x, "y": [0]}}
    path.write_text(json.dumps({"users": [user], "num_samples": [1], "user_data": own}))
    refusal(lambda: jp.data.open(path), f"{path} {said}")
