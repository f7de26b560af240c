"""Results of phases: made once, read whole, and refused where they are not this run's."""

import json
import os
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from jaxpfl.data import from_clients
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError
from jaxpfl.experiments.engine.phases import Phases
from jaxpfl.experiments.engine.releases import Releases
from jaxpfl.privacy.ledger import Ledger

MADE = {
    "texts": np.array(["ä\nb", "", "c" * 50]),
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
}

CLIENTS = from_clients({f"client {i}": {"x": np.full(2, i, np.float32)} for i in range(3)})


def never():
    raise AssertionError("made again")


def test_a_phase_is_made_once_and_read_to_the_same_bits(tmp_path):
    made = []
    keep = Phases(tmp_path / "phases", "run a")

    def make():
        made.append(1)
        return MADE

    first = keep("round 1 texts", make)
    again = Phases(tmp_path / "phases", "run a")("round 1 texts", never)
    for found in (first, again):
        assert set(found) == set(MADE)
        assert found["texts"].tolist() == MADE["texts"].tolist()
        np.testing.assert_array_equal(found["x"], MADE["x"])
        assert found["x"].dtype == np.float32
    assert len(made) == 1
    assert sorted(os.listdir(tmp_path / "phases")) == ["round_1_texts.json", "round_1_texts.npz"]


def test_a_phase_that_was_killed_is_made_again(tmp_path):
    """Between its arrays and its note it is not there yet; a temporary file is no phase."""
    keep = Phases(tmp_path, "run a")
    keep("one", lambda: {"x": np.zeros(3)})
    (tmp_path / "one.json").unlink()
    (tmp_path / ".one.npz.tmp").write_bytes(b"half")
    assert keep("one", lambda: {"x": np.ones(2)})["x"].tolist() == [1, 1]
    assert keep("one", never)["x"].tolist() == [1, 1]


def test_an_exception_leaves_nothing_behind(tmp_path):
    keep = Phases(tmp_path, "run a")
    with pytest.raises(AssertionError):
        keep("one", never)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["bit flip", "truncated", "missing", "note"])
def test_damage_is_found_and_the_file_is_named(tmp_path, damage):
    """TRUST 35."""
    Phases(tmp_path, "run a")("one", lambda: MADE)
    path = tmp_path / "one.npz"
    content = bytearray(path.read_bytes())
    if damage == "bit flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-7])
    elif damage == "missing":
        path.unlink()
    else:
        path = tmp_path / "one.json"
        path.write_text(path.read_text()[:-9])
    with pytest.raises(CorruptFile, match=path.name):
        Phases(tmp_path, "run a")("one", never)


def test_the_phases_of_another_run_are_refused(tmp_path):
    """A resumed run must not repeat its noise on what follows from other phases."""
    Phases(tmp_path, "run a")("one", lambda: MADE)
    with pytest.raises(InputError, match="is of run run a, expected run b"):
        Phases(tmp_path, "run b")("one", never)


def test_arrays_of_objects_are_refused_when_read(tmp_path):
    """TRUST 39: no pickle, not even with the right hash."""
    import hashlib
    import io

    buffer = io.BytesIO()
    np.savez(buffer, x=np.array([{}], dtype=object))
    (tmp_path / "one.npz").write_bytes(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    (tmp_path / "one.json").write_text(json.dumps({"run": "run a", "sha256": digest}))
    with pytest.raises(CorruptFile, match=r"one\.npz"):
        Phases(tmp_path, "run a")("one", never)


def test_a_ledger_that_lost_a_phases_charge_is_refused(tmp_path):
    """TRUST 34: a release that is found again must still be on the ledger."""
    path, event = tmp_path / "ledger.jsonl", GaussianDpEvent(2.0)
    with Ledger(path, CLIENTS) as ledger:
        keep = Phases(tmp_path / "phases", "run a", ledger)

        def make():
            ledger.charge(event, "scores", run="a", round=1, identity="a")
            return MADE

        keep("scores", make)
        # Charges that come later do no harm.
        ledger.charge(event, "scores", run="b", round=1, identity="b")
    with Ledger(path, CLIENTS) as ledger:
        Phases(tmp_path / "phases", "run a", ledger)("scores", never)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    with (
        Ledger(path, CLIENTS) as ledger,
        pytest.raises(CorruptFile, match="cut off or replaced"),
    ):
        Phases(tmp_path / "phases", "run a", ledger)("scores", never)


def test_nothing_of_a_release_that_is_not_paid_for_is_written(tmp_path):
    """TRUST 30, 34: what a phase released is confirmed first."""

    class Releaser:
        paid = False

        def confirm(self):
            if not self.paid:
                raise BudgetExhausted("no")

    releaser: Any = Releaser()
    releases = Releases(Phases(tmp_path, "run a"), "run a", releaser=releaser)
    with pytest.raises(BudgetExhausted):
        releases.keep("scores", lambda: MADE)
    assert os.listdir(tmp_path) == []
    releaser.paid = True
    assert releases.keep("scores", lambda: MADE)["texts"].tolist() == MADE["texts"].tolist()
