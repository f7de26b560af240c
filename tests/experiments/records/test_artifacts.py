"""Artifacts: stored whole, found again, and refused where they are not this run's."""

import errno
import os
import shutil
import unittest.mock
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from jaxpfl.data import from_clients
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts, tree_arrays, tree_of
from jaxpfl.privacy.ledger import Ledger
from tests.experiments.crashes import damages
from tests.refusals import refusal

MADE = Artifact(
    {"loss": 1.5, "name": "ä", "pair": (1, 2), "diverged": float("nan")},
    {"texts": np.array(["ä\nb", "", "c" * 50]), "x": np.arange(6, dtype=np.float32).reshape(2, 3)},
)
CLIENTS = from_clients({f"client {i}": {"x": np.full(2, i, np.float32)} for i in range(3)})


def test_an_artifact_is_computed_once_and_read_to_the_same_bits(tmp_path):
    folder = tmp_path / "artifacts"
    assert Artifacts(folder, run="a").find("one") is None and not folder.exists()
    made = iter([MADE])
    first = Artifacts(folder, run="a").load_or_compute(
        "round 1 texts", lambda: next(made), {"seed": 0}
    )
    again = Artifacts(folder, run="a").load_or_compute("round 1 texts", pytest.fail, {"seed": 0})
    for found in (first, again, Artifacts(folder, run="a").find("round 1 texts", {"seed": 0})):
        assert found is not None
        assert found.record == {"loss": 1.5, "name": "ä", "pair": [1, 2], "diverged": None}
        assert set(found.arrays) == {"texts", "x"}
        assert found.arrays["texts"].tolist() == MADE.arrays["texts"].tolist()
        np.testing.assert_array_equal(found.arrays["x"], MADE.arrays["x"])
        assert found.arrays["x"].dtype == np.float32
    assert os.listdir(folder) == ["round_1_texts"]


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


def test_a_full_disk_is_told_with_the_artifact_and_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        Artifacts(tmp_path, run="r").save("round 1 scores", Artifact({}, {"x": np.ones(3)}))
    assert caught.value.filename == str(tmp_path / "round_1_scores")
    assert not list(tmp_path.iterdir())


def test_every_damage_is_found_and_the_file_is_named(tmp_path):
    """TRUST 35: a flipped bit, a shortened file, a missing one, and one that is not listed."""
    Artifacts(tmp_path, run="a").save("one", MADE, {"seed": 0})
    for _, path, damage in damages(tmp_path / "one", every=7):
        content = path.read_bytes()
        damage(path)
        refusal(partial(loaded, tmp_path, of={"seed": 0}), path.name, CorruptFile)
        path.write_bytes(content)
    (tmp_path / "one" / "more.txt").write_text("x")
    refusal(partial(loaded, tmp_path, of={"seed": 0}), "more.txt", CorruptFile)


def loaded(folder: Path, run="a", of=None) -> Artifact:
    return Artifacts(folder, run=run).load_or_compute("one", pytest.fail, of)


def test_an_artifact_of_another_run_or_of_other_inputs_is_refused(tmp_path):
    """A resumed run must not repeat its noise on what follows from other artifacts."""
    Artifacts(tmp_path, run="a").save("one", MADE, {"seed": 0})
    for run, of, words in (
        ("b", {"seed": 0}, "belongs to run a, expected run b"),
        ("a", {"seed": 1}, "one: was made from 0 expected 1"),
        ("a", None, "was made from"),
    ):
        refusal(partial(loaded, tmp_path, run, of), words)


def test_objects_are_not_read(tmp_path):
    """TRUST 39: no pickle, not even with the right hash."""
    Artifacts(tmp_path, run="a").save("one", Artifact({}, {"x": np.array([{}], dtype=object)}))
    refusal(partial(loaded, tmp_path), "arrays.npz", CorruptFile)


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
    with Ledger(path, CLIENTS) as ledger:
        store = Artifacts(folder, run="a", ledger=ledger)
        again = partial(store.load_or_compute, "scores", pytest.fail)
        refusal(again, "cut off or replaced", CorruptFile)


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
    wide = {**tree, "layer": {**tree["layer"], "w": jnp.ones((2, 4))}}
    without = {**tree, "layer": {"w": jnp.ones((2, 3))}}
    for call, words in (
        (lambda: tree_of(found.arrays, wide), "layer.w [2, 3] [2, 4]"),
        (lambda: tree_of(found.arrays, without), "layer.b"),
        (lambda: tree_arrays({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}), "two leaves"),
    ):
        refusal(call, words)


def test_an_artifact_under_another_name_is_refused(tmp_path):
    """TRUST 35: two rounds' artifacts of one run, exchanged, are not taken for each other."""
    store = Artifacts(tmp_path, run="a")
    store.save("round 1 texts", MADE)
    (tmp_path / "round_1_texts").rename(tmp_path / "round_2_texts")
    words = "round_2_texts 'round_1_texts'"
    refusal(lambda: store.find("round 2 texts"), words, CorruptFile)
