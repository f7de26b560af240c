"""What the points of a sweep took, from the records of their runs."""

import json

import pytest

from jaxpfl.experiments.sweep.results import planned_cost, time_taken


def run_in(folder, queries, rounds):
    """A run's record: {query: (clients a round, rounds, noise multiplier)}, and its releases."""
    (folder / "private").mkdir(parents=True)
    plans = [
        {
            "label": label,
            "plan": {
                "clients_per_round": clients, "rounds": number, "noise_multiplier": noise,
                "unit": "client",
            },
        }
        for label, (clients, number, noise) in queries.items()
    ]  # fmt: skip
    (folder / "run.json").write_text(json.dumps({"queries": plans}))
    names = ("query", "clients", "coordinates", "seconds")
    lines = [json.dumps(dict(zip(names, line, strict=True))) for line in rounds]
    (folder / "private" / "rounds.jsonl").write_text("".join(line + "\n" for line in lines))


def test_uploads_and_noise_are_of_the_plans_and_times_of_all_attempts_of_all_runs(tmp_path):
    queries = {"count": (100, 1, 30.0), "sum": (100, 1, 3.0)}
    run_in(tmp_path / "runs" / "FreD", queries, [("count", 90, 1, 2.0), ("sum", 90, 8, 5.0)])
    update = [("update", 9, 50, 3.0), ("update", 11, 50, 4.0), ("update", 12, 50, 1.0)]
    run_in(tmp_path, {"update": (10, 3, 0.5)}, update)
    # 100 x 1 + 100 x 8 + 30 x 50 numbers of four bytes, most of them updates.
    assert planned_cost(tmp_path) == {"noise_multiplier": 0.5, "uploads": 4 * 2400}
    # The last run was resumed after its second release. The first one of each run compiles.
    taken = time_taken(tmp_path)
    assert taken["seconds"] == pytest.approx(5 + 4 + 1)
    assert taken["clients_a_second"] == pytest.approx((90 + 11) / (3 + 1))


def test_a_point_without_releases_has_no_costs(tmp_path):
    assert set({**planned_cost(tmp_path), **time_taken(tmp_path)}.values()) == {None}
