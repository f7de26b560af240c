import json
import sys

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.peers import __main__ as driver
from benchmarks.peers import table, work
from benchmarks.peers.process import Program

ROW = {
    "date": "2026-01-02 03:04", "machine": "2 cores, some processor", "unit": "client",
    "a second": 20.0, "median": 18.0, "ratio": 1.0, "cpu s each": 0.1, "peak MB": 1_234.0,
    "start s": 1.0, "first round s": 2.5, "foreign": 0.04, "cohort": 50, "ragged": False,
}  # fmt: skip


@pytest.mark.parametrize("ragged", [False, True])
def test_every_client_is_stacked_in_its_order(ragged):
    held = work.clients(7, ragged)
    image, label, mask = work.stacked(held)
    assert mask.sum() == len(held["label"])
    for client, (images, labels) in enumerate(work.each(held)):
        here = mask[client].reshape(-1)
        assert here[: len(labels)].all()
        np.testing.assert_array_equal(label[client].reshape(-1)[here], labels)
        np.testing.assert_array_equal(image[client].reshape(-1, *work.SHAPE)[here], images)


def test_the_page_shows_the_last_run_of_each_cohort_alone_and_none_that_was_disturbed(tmp_path):
    about = {name: ROW[name] for name in ("date", "machine", "unit")}
    disturbed = ROW | {"date": "2026-05-05 00:00", "median": 99.0}
    rows = [
        ROW | {"machine": "another", "what": "older", "cohort": 200},
        ROW | {"date": "2025-01-01 00:00", "what": "older"},
        ROW | {"what": "ours", "cohort": 1000, "ragged": True},
        ROW | {"what": "ours", "median": 21.0},
        ROW | {"what": "other", "median": 20.0},
        about | {"what": "other", "cohort": 1000, "ragged": True, "left out": "it takes 99 s"},
        disturbed | {"what": "ours"},
        disturbed | {"what": "other", "foreign": 1.5},
    ]
    results, page = tmp_path / "peers.jsonl", tmp_path / "performance.md"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.write_text(f"before\n{table.BEGIN}\nstale\n{table.END}\nafter\n")
    for _ in range(2):  # written again, it stays as it is
        table.write(page, results)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert not [word for word in ("stale", "older", "200", "99.0") if word in text]
        assert "| ours | 21.0, 1.00 | 18.0, 1.00 | 100.0 | 1,234 |" in text
        assert "| other | 20.0, 1.05 | it takes 99 s | 100.0 | 1,234 |" in text
    results.write_text(json.dumps(rows[-1]) + "\n")
    assert "|" not in table.rendered(results)


def test_the_page_has_the_tables_of_the_stored_rows(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(table.PAGE.read_text("utf-8"))
    table.write(page, harness.RESULTS / "peers.jsonl")
    assert page.read_text() == table.PAGE.read_text("utf-8"), (
        "python -m benchmarks.peers --table-only"
    )


FAKE = """
import json, os, sys
norm = {norm}
print(json.dumps({{"fake": "1.0"}}), flush=True)
for _ in sys.stdin:
    {die}
    print(json.dumps({{"norm": norm if sys.argv[1:] == ["quiet"] else None}}), flush=True)
"""


def test_programs_that_did_the_same_work_are_measured_and_others_left_out_with_a_reason(
    monkeypatch, tmp_path
):
    good = FAKE.format(norm=0.5, die="")
    # It answers its start, and dies before it answers a round.
    codes = {"ours": good, "slow": good, "large": good, "other": FAKE.format(norm=0.6, die="")}
    codes["killed"] = FAKE.format(norm=0.5, die="os.kill(os.getpid(), 9)")

    def program(config, name, file, _, *extra):
        return Program([sys.executable, "-c", codes[name], *extra], tmp_path, tmp_path / "log")

    def measured(*names):
        monkeypatch.setattr(driver, "PROGRAMS", {"client": {name: (None, []) for name in names}})
        config = driver.Config(turns=2, attempts=1)
        return {row["what"]: row for row in driver.measured(config, 2, False, tmp_path, before)}

    monkeypatch.setattr(driver, "_program", program)
    quick = {"median": 0.001, "peak MB": 1.0, "cohort": 1}
    large = quick | {"median": 10.0, "peak MB": 1e9}
    before = {"ours": quick, "slow": quick | {"median": 0.01}, "large": large}
    rows = measured("ours", "slow", "large", "killed")
    assert rows["ours"]["norm"] == 0.5 and rows["ours"]["ratio"] == 1
    assert rows["ours"]["a second"] >= rows["ours"]["median"] > 0
    reasons = {name: row["left out"] for name, row in rows.items() if "left out" in row}
    assert reasons.keys() == {"slow", "large", "killed"}
    assert reasons["slow"] == "a round would take 200 s"
    assert "GB" in reasons["large"] and "memory" in reasons["killed"]
    with pytest.raises(SystemExit, match="other has a mean update of norm 0.6"):
        measured("ours", "other")
