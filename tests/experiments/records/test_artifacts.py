"""Artifacts: stored whole, found again, and refused where they are not this run's."""

import os
import shutil
import unittest.mock
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from jaxpfl.data import from_clients
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts, tree_arrays, tree_of
from jaxpfl.privacy.ledger import Ledger
from tests.experiments.crashes import damages

MADE = Artifact(
    {"loss": 1.5, "name": "ä", "pair": (1, 2), "diverged": float("nan")},
    {
        "texts": np.array(["ä\nb", "", "c" * 50]),
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    },
)
CLIENTS = from_clients({f"client {i}": {"x": np.full(2, i, np.float32)} for i in range(3)})


def test_an_artifact_is_computed_once_and_read_to_the_same_bits(tmp_path):
    computed = []

    def compute():
        computed.append(1)
        return MADE

    folder = tmp_path / "artifacts"
    first = Artifacts(folder, run="a").load_or_compute("round 1 texts", compute, {"seed": 0})
    again = Artifacts(folder, run="a").load_or_compute("round 1 texts", pytest.fail, {"seed": 0})
    for found in (first, again, Artifacts(folder, run="a").find("round 1 texts", {"seed": 0})):
        assert found is not None
        assert found.record == {"loss": 1.5, "name": "ä", "pair": [1, 2], "diverged": None}
        assert set(found.arrays) == {"texts", "x"}
        assert found.arrays["texts"].tolist() == MADE.arrays["texts"].tolist()
        np.testing.assert_array_equal(found.arrays["x"], MADE.arrays["x"])
        assert found.arrays["x"].dtype == np.float32
    assert len(computed) == 1
    assert os.listdir(folder) == ["round_1_texts"]


def test_nothing_stored_is_none_and_makes_no_folder(tmp_path):
    assert Artifacts(tmp_path / "artifacts", run="a").find("one") is None
    with pytest.raises(pytest.fail.Exception):
        Artifacts(tmp_path / "artifacts", run="a").load_or_compute("one", pytest.fail)
    assert os.listdir(tmp_path) == []


def test_killed_at_any_instant_it_is_absent_or_whole(tmp_path):
    """TRUST 33: a copy of the folder before each system call that changes what stands there."""
    copies: list[Path] = []

    def watched(function):
        def call(*arguments, **options):
            copies.append(tmp_path / f"copy {len(copies)}")
            shutil.copytree(tmp_path / "live", copies[-1])
            return function(*arguments, **options)

        return call

    (tmp_path / "live").mkdir()
    with (
        unittest.mock.patch.object(os, "fsync", watched(os.fsync)),
        unittest.mock.patch.object(os, "rename", watched(os.rename)),
    ):
        Artifacts(tmp_path / "live", run="a").save("one", Artifact({"version": 1}))
        first = len(copies)
        Artifacts(tmp_path / "live", run="a").save("one", Artifact({"version": 2}))
    assert first >= 5
    seen = set()
    for number, copy in enumerate(copies):
        found = Artifacts(copy, run="a").find("one")
        seen.add((number < first, None if found is None else found.record["version"]))
        after = Artifacts(copy, run="a").load_or_compute("one", lambda: Artifact({"version": 3}))
        assert after.record["version"] == (3 if found is None else found.record["version"])
    assert seen == {(True, None), (True, 1), (False, 1), (False, None), (False, 2)}


def test_every_damage_is_found_and_the_file_is_named(tmp_path):
    """TRUST 35: a flipped bit, a shortened file, a missing one, and one that is not listed."""
    Artifacts(tmp_path, run="a").save("one", MADE, {"seed": 0})
    for name, path, damage in damages(tmp_path / "one", every=7):
        content = path.read_bytes()
        damage(path)
        with pytest.raises(CorruptFile, match=path.name):
            assert not Artifacts(tmp_path, run="a").load_or_compute(
                "one", pytest.fail, {"seed": 0}
            ), name
        path.write_bytes(content)
    (tmp_path / "one" / "more.txt").write_text("x")
    with pytest.raises(CorruptFile, match=r"more\.txt"):
        Artifacts(tmp_path, run="a").find("one", {"seed": 0})


def test_an_artifact_of_another_run_or_of_other_inputs_is_refused(tmp_path):
    """A resumed run must not repeat its noise on what follows from other artifacts."""
    Artifacts(tmp_path, run="a").save("one", MADE, {"seed": 0})
    with pytest.raises(InputError, match="belongs to run a, expected run b"):
        Artifacts(tmp_path, run="b").load_or_compute("one", pytest.fail, {"seed": 0})
    with pytest.raises(InputError, match=r"one: was made from .*0.*, expected .*1"):
        Artifacts(tmp_path, run="a").load_or_compute("one", pytest.fail, {"seed": 1})
    with pytest.raises(InputError, match="was made from"):
        Artifacts(tmp_path, run="a").load_or_compute("one", pytest.fail)


def test_objects_are_not_read(tmp_path):
    """TRUST 39: no pickle, not even with the right hash."""
    Artifacts(tmp_path, run="a").save("one", Artifact({}, {"x": np.array([{}], dtype=object)}))
    with pytest.raises(CorruptFile, match=r"arrays\.npz"):
        Artifacts(tmp_path, run="a").load_or_compute("one", pytest.fail)


def test_a_ledger_that_lost_an_artifacts_charge_is_refused(tmp_path):
    """TRUST 34: a release that is found again must still be on the ledger."""
    path, event = tmp_path / "ledger.jsonl", GaussianDpEvent(2.0)
    folder = tmp_path / "artifacts"
    with Ledger(path, CLIENTS) as ledger:

        def compute():
            ledger.charge(event, "scores", run="a", round=1, identity="a")
            return MADE

        Artifacts(folder, run="a", ledger=ledger).load_or_compute("scores", compute)
        # Charges that come later do no harm.
        ledger.charge(event, "scores", run="b", round=1, identity="b")
    with Ledger(path, CLIENTS) as ledger:
        Artifacts(folder, run="a", ledger=ledger).load_or_compute("scores", pytest.fail)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    with (
        Ledger(path, CLIENTS) as ledger,
        pytest.raises(CorruptFile, match="cut off or replaced"),
    ):
        Artifacts(folder, run="a", ledger=ledger).load_or_compute("scores", pytest.fail)


def test_the_content_has_one_digest(tmp_path):
    """It follows from record and arrays alone, not from the run or the folder."""
    for folder, run in (("x", "a"), ("y", "b")):
        Artifacts(tmp_path / folder, run=run).save("one", MADE, run)
    x, y = (Artifacts(tmp_path / name, run="-").sha256("one") for name in ("x", "y"))
    assert x == y
    Artifacts(tmp_path / "y", run="b").save("one", MADE._replace(record={}))
    assert Artifacts(tmp_path / "y", run="b").sha256("one") != x


def test_trees_are_taken_apart_and_put_together(tmp_path):
    tree = {"layer": {"w": jnp.ones((2, 3)), "b": jnp.zeros(0)}, "steps": [jnp.int32(3)]}
    Artifacts(tmp_path, run="a").save("one", Artifact({}, tree_arrays(tree)))
    found = Artifacts(tmp_path, run="a").find("one")
    assert found is not None
    assert sorted(found.arrays) == ["layer.b", "layer.w", "steps.0"]
    again = tree_of(found.arrays, tree)
    np.testing.assert_array_equal(again["layer"]["w"], tree["layer"]["w"])
    assert again["steps"][0].dtype == np.int32
    with pytest.raises(InputError, match=r"layer\.w.*\[2, 3\].*\[2, 4\]"):
        tree_of(found.arrays, {**tree, "layer": {**tree["layer"], "w": jnp.ones((2, 4))}})
    with pytest.raises(InputError, match=r"layer\.b"):
        tree_of(found.arrays, {"layer": {"w": jnp.ones((2, 3))}, "steps": [jnp.int32(3)]})
    with pytest.raises(InputError, match="two leaves"):
        tree_arrays({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})


def test_an_artifact_under_another_name_is_refused(tmp_path):
    """TRUST 35: two rounds' artifacts of one run, exchanged, are not taken for each other."""
    store_of_run = Artifacts(tmp_path, run="a")
    store_of_run.save("round 1 texts", MADE)
    (tmp_path / "round_1_texts").rename(tmp_path / "round_2_texts")
    with pytest.raises(CorruptFile, match=r"round_2_texts.*'round_1_texts'"):
        store_of_run.find("round 2 texts")
