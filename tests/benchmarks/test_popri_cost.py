"""The benchmark of what a round of POPri costs a client: floats and scores."""

import numpy as np

from benchmarks.macro import popri_cost


def test_floats_at_the_papers_size_are_those_of_its_table():
    steps = popri_cost.at_papers_size(8)
    floats = {what: (step.down, step.up) for what, step in steps.items()}
    # PE's 0.7 million and 1,800, POPri's 7 million and 18,000 are the paper's own.
    assert floats == {
        "PE, paper's size": (691_200, 1_800),
        "POPri as published": (6_912_000, 18_000),
        "POPri, paper's size": (73_920, 384),
    }


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
    examples = popri_cost.examples_of("embedding", rows_NxD)
    published = np.asarray(popri_cost.all_scores(unit_MxD, examples, jax.random.key(0)))
    centred = published.reshape(20, 3) - published.reshape(20, 3).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(space.scores(sent_D), centred / np.linalg.norm(centred), atol=2e-4)
