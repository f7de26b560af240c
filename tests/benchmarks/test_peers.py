import json

import numpy as np
import pytest

from benchmarks.peers import table, work

ROW = {
    "date": "2026-01-02 03:04",
    "machine": "2 cores, some processor",
    "clients/s": 20.0,
    "median": 18.0,
    "ratio": 1.0,
    "cpu s/client": 0.1,
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


def test_readme_shows_the_last_run_alone(tmp_path):
    rows = [
        ROW | {"date": "2025-01-01 00:00", "what": "older", "cohort": 10, "ragged": False},
        ROW | {"what": "ours", "cohort": 50, "ragged": True},
        ROW | {"what": "ours", "cohort": 10, "ragged": False, "clients/s": 21.0},
        ROW | {"what": "other", "cohort": 10, "ragged": False, "ratio": 0.9},
        {
            **{name: ROW[name] for name in ("date", "machine")},
            "what": "other",
            "cohort": 50,
            "ragged": True,
            "left out": "a round would take 99 s",
        },
    ]
    results, readme = tmp_path / "peers.jsonl", tmp_path / "README.md"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    readme.write_text(f"before\n{table.BEGIN}\nstale\n{table.END}\nafter\n")
    for _ in range(2):  # written again, it stays as it is
        table.write(readme, results)
        text = readme.read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert "stale" not in text and "older" not in text
        assert "| ours | 21.0 (18.0), 1.00 | 20.0 (18.0), 1.00 | 0.100 | 1,234 | 3.5 |" in text
        assert (
            "| other | 20.0 (18.0), 0.90 | a round would take 99 s | 0.100 | 1,234 | 3.5 |" in text
        )


def test_readme_shows_no_run_that_was_disturbed(tmp_path):
    quiet = ROW | {"what": "ours", "cohort": 10, "ragged": False}
    disturbed = quiet | {"date": "2026-05-05 00:00", "clients/s": 99.0}
    results = tmp_path / "peers.jsonl"
    rows = [quiet, disturbed, disturbed | {"what": "other", "foreign": 1.5}]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "| ours | 20.0" in table.rendered(results)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert "|" not in table.rendered(results)


def test_a_readme_without_the_markers_is_refused(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    results = tmp_path / "peers.jsonl"
    results.write_text(json.dumps(ROW | {"what": "ours", "cohort": 1, "ragged": False}) + "\n")
    with pytest.raises(SystemExit, match="no lines"):
        table.write(readme, results)
    assert readme.read_text() == "nothing"
