"""The benchmark of POPri's costs runs from end to end on a tiny study; it measures nothing here."""

import numpy as np
import pytest

from benchmarks.macro import popri_cost
from tests.experiments.conftest import NEAR, SYNTHETIC

STUDY = SYNTHETIC.format(folder="nowhere", method="popri").replace("size: 300", "size: 280")


def test_floats_at_the_papers_size_are_those_of_its_table():
    clients = {}
    rows = popri_cost.at_papers_size(8, clients)
    floats = {row["what"]: (clients[row["what"]].down, clients[row["what"]].up) for row in rows}
    # PE's 0.7 million and 1,800, POPri's 7 million and 18,000 are the paper's own.
    assert floats == {
        "PE, paper's size": (691_200, 1_800),
        "POPri as published": (6_912_000, 18_000),
        "POPri, paper's size": (73_920, 384),
    }


@pytest.mark.slow
def test_a_tiny_study_is_measured_to_its_end(tmp_path, monkeypatch):
    """Floats follow from the study's sizes; every method has a client's and a server's time."""
    study, source = tmp_path / "study.yaml", tmp_path / "public.txt"
    study.write_text(STUDY)
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(NEAR, 6)) for _ in range(150)]
    source.write_text("\n".join(lines))
    # Devices are there already, and nothing is to be recorded.
    monkeypatch.setattr(popri_cost.harness, "use_cpu_devices", lambda count: None)
    monkeypatch.setattr(popri_cost.harness, "record", lambda name, rows: "nothing")
    config = popri_cost.Config(
        study, str(source), texts=3, paper_clients=True, rounds=1, calls=1, repeats=1
    )
    found = popri_cost.main(config)
    rows = {row["what"]: row for row in found}
    assert len(rows) == 6
    size = rows["DP-FedAvg, DP-FTRL"]["parameters"]
    for what, floats in (
        ("POPri", (32 * 33 // 2, 32)),
        ("PE, PE+SFT", (8 * 32, 8)),
        ("DP-FedAvg, DP-FTRL", (size, size)),
    ):
        row = rows[what]
        assert (row["floats down"], row["floats up"]) == floats
        assert row["client s"] > 0 and row["server s"] > 0
        assert ("own texts s" in row) == (what != "DP-FedAvg, DP-FTRL")
    popri = rows["POPri"]
    phases = ("responses s", "embeddings s", "scores s", "tuning s")
    assert sum(popri[name] for name in phases) == pytest.approx(popri["server s"])
    assert 0 < popri["response tokens"] <= 8


def test_the_published_step_and_ours_give_the_same_scores():
    """What both benchmarked steps compute is one thing: scores by Algorithm 1, or coordinates."""
    import jax
    import jax.numpy as jnp

    from jaxpfl.federated import contribution
    from jaxpfl.federated.clients.scores import score_space, unit_rows

    rng = np.random.default_rng(1)
    candidates_KxJxD = rng.standard_normal((20, 3, 8), np.float32)
    rows_NxD = rng.standard_normal((5, 8), np.float32)
    ours = popri_cost.coordinates(rows_NxD, candidates_KxJxD)
    sent_D = contribution(ours.function, ours.broadcast, ours.examples, jax.random.key(0))
    space = score_space(jnp.asarray(candidates_KxJxD), "prompt")
    unit_MxD = unit_rows(jnp.asarray(candidates_KxJxD)).reshape(-1, 8)
    examples = popri_cost.examples_of("embedding", rows_NxD, 5)
    published = np.asarray(popri_cost.all_scores(unit_MxD, examples, jax.random.key(0)))
    centred = published.reshape(20, 3) - published.reshape(20, 3).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(space.scores(sent_D), centred / np.linalg.norm(centred), atol=2e-4)


def test_examples_are_padded_and_repeated_as_cohorts_are():
    examples = popri_cost.examples_of("tokens", np.arange(10).reshape(5, 2), 4, epochs=3)
    assert examples.batches["tokens"].shape == (6, 4, 2)
    assert examples.mask.sum() == 15
    assert int(examples.steps) == 6
