import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import __main__ as driver
from benchmarks.peers import table, work
from benchmarks.peers.process import Program

ROW = {
    "date": "2026-01-02 03:04",
    "machine": "2 cores, some processor",
    "unit": "client",
    "a second": 20.0,
    "median": 18.0,
    "ratio": 1.0,
    "cpu s each": 0.1,
    "peak MB": 1_234.0,
    "start s": 1.0,
    "first round s": 2.5,
    "foreign": 0.04,
}


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


def test_readme_shows_the_last_run_of_each_cohort_alone(tmp_path):
    about = {name: ROW[name] for name in ("date", "machine", "unit")}
    elsewhere = {"machine": "another", "what": "older", "cohort": 200, "ragged": False}
    rows = [
        ROW | elsewhere,
        ROW | {"date": "2025-01-01 00:00", "what": "older", "cohort": 10, "ragged": False},
        ROW | {"what": "ours", "cohort": 50, "ragged": True},
        ROW | {"what": "ours", "cohort": 10, "ragged": False, "a second": 21.0},
        ROW | {"what": "other", "cohort": 10, "ragged": False, "ratio": 0.9},
        about | {"what": "other", "cohort": 50, "ragged": True, "left out": "it takes 99 s"},
    ]
    results, readme = tmp_path / "peers.jsonl", tmp_path / "README.md"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    readme.write_text(f"before\n{table.BEGIN}\nstale\n{table.END}\nafter\n")
    for _ in range(2):  # written again, it stays as it is
        table.write(readme, results)
        text = readme.read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert "stale" not in text and "older" not in text and "200" not in text
        assert "| ours | 21.0 (18.0), 1.00 | 20.0 (18.0), 1.00 | 100.0 | 1,234 | 3.5 |" in text
        assert "| other | 20.0 (18.0), 0.90 | it takes 99 s | 100.0 | 1,234 | 3.5 |" in text


def test_readme_shows_no_run_that_was_disturbed(tmp_path):
    quiet = ROW | {"what": "ours", "cohort": 10, "ragged": False}
    disturbed = quiet | {"date": "2026-05-05 00:00", "a second": 99.0}
    # Of the same run, another cohort was not disturbed.
    larger = quiet | {"date": "2026-05-05 00:00", "cohort": 50, "a second": 30.0}
    results = tmp_path / "peers.jsonl"
    rows = [quiet, disturbed, disturbed | {"what": "other", "foreign": 1.5}, larger]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "| ours | 20.0 (18.0), 1.00 | 30.0 (18.0), 1.00 |" in table.rendered(results)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[1:3]))
    assert "|" not in table.rendered(results)


STARTS_ANOTHER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"child": "%d"}' % child.pid, flush=True)
sys.stdin.readline()
"""


def _reaches(process: str, state: str) -> bool:
    """Whether a process is in a state of Linux, or gone, within half a minute."""
    status = Path("/proc") / process / "stat"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == state:
            return True
        time.sleep(0.02)
    return False


def test_what_a_program_started_stops_and_ends_with_it(tmp_path):
    program = Program([sys.executable, "-c", STARTS_ANOTHER], tmp_path, tmp_path / "log")
    child = program.hello["child"]
    try:
        # Stopped, as every program is between its turns.
        assert _reaches(child, "T") and (Path("/proc") / child).exists()
    finally:
        program.close()
    assert _reaches(child, "Z")


FAKE = """
import json, sys
norm = {norm}
print(json.dumps({{"fake": "1.0"}}), flush=True)
for _ in sys.stdin:
    print(json.dumps({{"norm": norm if sys.argv[1:] == ["quiet"] else {noisy}}}), flush=True)
"""


def _fakes(monkeypatch, folder, **codes):
    def program(config, name, file, _, *extra):
        return Program([sys.executable, "-c", codes[name], *extra], folder, folder / "log")

    monkeypatch.setattr(driver, "PROGRAMS", {"client": {name: (None, []) for name in codes}})
    monkeypatch.setattr(driver, "_program", program)
    return driver.Config(turns=2, attempts=1)


def test_the_driver_measures_programs_that_did_the_same_work(monkeypatch, tmp_path):
    hidden, shown = FAKE.format(norm=0.5, noisy=None), FAKE.format(norm=0.5, noisy=0.5)
    config = _fakes(monkeypatch, tmp_path, ours=hidden, hidden=hidden, shown=shown)
    rows = driver.measured(config, 2, False, tmp_path, {})
    assert [row["what"] for row in rows] == ["ours", "hidden", "shown"]
    assert [row["norm"] for row in rows] == [0.5, 0.5, 0.5]
    assert rows[0]["ratio"] == 1 and all(row["a second"] >= row["median"] > 0 for row in rows)

    other = FAKE.format(norm=0.6, noisy=0.6)
    config = _fakes(monkeypatch, tmp_path, ours=hidden, other=other)
    with pytest.raises(SystemExit, match="other has a mean update of norm 0.6"):
        driver.measured(config, 2, False, tmp_path, {})


def test_a_program_that_takes_too_long_or_is_killed_is_left_out_with_the_reason(
    monkeypatch, tmp_path
):
    good = FAKE.format(norm=0.5, noisy=0.5)
    # It answers its start, and dies before it answers a round.
    loop = "for _ in sys.stdin:\n"
    killed = good.replace(loop, f"{loop}    import os; os.kill(os.getpid(), 9)\n")
    config = _fakes(monkeypatch, tmp_path, ours=good, slow=good, large=good, killed=killed)
    before = {
        "ours": {"median": 0.001, "peak MB": 1.0, "cohort": 1},
        "slow": {"median": 0.01, "peak MB": 1.0, "cohort": 1},
        "large": {"median": 10.0, "peak MB": 1e9, "cohort": 1},
    }
    rows = {row["what"]: row for row in driver.measured(config, 2, False, tmp_path, before)}
    assert "a second" in rows["ours"]
    assert rows["slow"]["left out"] == "a round would take 200 s"
    assert "GB" in rows["large"]["left out"]
    assert "memory" in rows["killed"]["left out"]
