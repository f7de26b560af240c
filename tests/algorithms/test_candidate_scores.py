"""Releases of scores: what they are, what they cost, and that no two share their noise."""

import math
from functools import partial

import numpy as np
import pytest

from jaxpfl.algorithms import Scorer, candidate_scores
from jaxpfl.data import Population, from_clients
from jaxpfl.privacy import Ledger
from tests.algorithms.asking import asked, asking
from tests.data.populations import SECRET
from tests.federated.test_scores import looped
from tests.plans import flat_plan, flat_without_privacy
from tests.refusals import refusal

DIM = 5
LINEAR = ["cosine", "zscore", "per_prompt"]
KINDS = [*LINEAR, "nn_histogram"]


def clients(count: int = 40, seed: int = 0) -> Population:
    """Clients of 0 to 6 texts."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(k % 7, DIM)).astype(np.float32) for k in range(count)]
    return from_clients({f"{SECRET} {k}": {"embedding": each} for k, each in enumerate(rows)})


def candidates(seed: int = 1, prompts: int = 4, responses: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(prompts, responses, DIM)).astype(np.float32)


plan = partial(flat_plan, population=40, rounds=20, noise_multiplier=3.35, delta=3e-6)
silent = partial(flat_without_privacy, population=40, rounds=20, clip_norm=1.0)


def released(chosen, embeddings, folder, clients_=None, *, round=1, **settings) -> np.ndarray:
    """One round's scores, float32 [prompts, responses]; on a ledger of their own by default."""
    population = clients() if clients_ is None else clients_
    settings.setdefault("ledger", f"{len(list(folder.glob('*.jsonl')))}.jsonl")
    algorithm = candidate_scores(embeddings, chosen)
    with asking(algorithm, population, folder, **settings) as releaser:
        state, _ = releaser.step(algorithm.step, algorithm.init(None), round)
        return np.asarray(state.sum_KxJ)


@pytest.mark.parametrize("clip_norm", [1.0, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_release_is_the_definitions(tmp_path, kind, clip_norm):
    embeddings = candidates()
    found = released(Scorer(silent(clip_norm=clip_norm), kind), embeddings, tmp_path)
    assert found.shape == (4, 3) and found.dtype == np.float32
    population = clients()
    parts = [population.examples(client)["embedding"] for client in range(len(population))]
    expected = looped(parts, embeddings, kind, clip_norm)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * clip_norm)


def test_scores_of_rounds_are_added_up(tmp_path):
    """Every round asks another cohort: a round without noise, and then all three."""
    population = clients(200)
    chosen = Scorer(silent(population=200, clients_per_round=100, rounds=3))
    embeddings = candidates()
    parts = [released(chosen, embeddings, tmp_path, population, round=r) for r in (1, 2, 3)]
    found = asked(candidate_scores(embeddings, chosen), population, tmp_path)
    np.testing.assert_allclose(found.state.sum_KxJ, sum(parts), rtol=1e-5, atol=1e-5)
    assert np.abs(parts[0] - parts[1]).max() > 1e-3


@pytest.mark.parametrize("kind", ["per_prompt", "nn_histogram"])
def test_the_noise_is_the_plans(tmp_path, kind):
    """Noise of z S on what is released, and under "every_score" on every score."""
    embeddings = candidates(prompts=200, responses=5)
    deviations = {}
    for noise in ("projected", "every_score"):
        chosen = plan(noise_multiplier=50.0, clip_norm=2.0)
        noisy = released(Scorer(chosen, kind, noise), embeddings, tmp_path)
        exact = released(Scorer(silent(clip_norm=2.0), kind), embeddings, tmp_path)
        deviations[noise] = (noisy - exact).std()
    # Over 1,000 scores; projected noise has but 5 independent entries.
    assert deviations["every_score"] == pytest.approx(100.0, rel=0.13)
    if kind == "nn_histogram":
        assert deviations["projected"] == pytest.approx(100.0, rel=0.13)
    else:
        expected = 100.0 * math.sqrt(DIM / 1_000)
        # It is not every score's, which is 14 times as large.
        assert expected / 30 < deviations["projected"] < expected * 4


def test_a_client_of_many_texts_votes_with_a_capped_subset(tmp_path):
    texts = np.random.default_rng(0).normal(size=(50, DIM)).astype(np.float32)
    population = from_clients({"a": {"embedding": texts}})
    chosen = Scorer(silent(population=1, clip_norm=8.0), kind="nn_histogram", max_texts=8)
    rounds = [released(chosen, candidates(), tmp_path, population, round=round) for round in (1, 2)]
    assert [votes.sum() for votes in rounds] == [8, 8]
    assert np.any(rounds[0] != rounds[1])


HUGE = np.where(np.arange(4 * 3 * DIM).reshape(4, 3, DIM) == 37, 1e39, 1.0)


@pytest.mark.parametrize("kind", ["per_prompt", "nn_histogram"])
@pytest.mark.parametrize(
    ("embeddings", "words"),
    [
        (np.ones((4, 3, DIM + 1), np.float32), "6 dimensions, the clients' have 5"),
        (np.ones((4, DIM), np.float32), "[prompts, responses, d]"),
        (np.ones((4, 3, DIM), np.int32), "int32"),
        (np.ones((1, 1, DIM), np.float32), "at least 2"),
        (np.ones((0, 3, DIM), np.float32), "at least 2"),
        (np.full((4, 3, DIM), np.nan), "prompt 0, response 0"),
        (HUGE, "prompt 2, response 1"),
    ],
)
def test_candidates_that_cannot_be_scored_are_refused_before_the_charge(
    tmp_path, kind, embeddings, words
):
    refusal(lambda: released(Scorer(plan(), kind), embeddings, tmp_path), words)
    assert len(Ledger.read(tmp_path / "0.jsonl")) == 0


def test_what_does_not_fit_together_is_refused(tmp_path):
    """TRUST 7, 13: and no message says anything of a client."""
    population = clients()
    texts = from_clients({f"{SECRET} {k}": {"text": ["x"]} for k in range(40)})
    whole = population.with_columns({"embedding": np.ones((population.num_examples, 2), np.int32)})
    flat = population.with_columns({"embedding": np.ones(population.num_examples, np.float32)})
    for held, chosen, words in (
        (texts, plan(), "column 'embedding'"),
        (whole, plan(), "floats"),
        (flat, plan(), "column 'embedding'"),
        (population, plan(population=50), "population of 50"),
    ):
        call = partial(released, Scorer(chosen), candidates(), tmp_path, held)
        assert SECRET not in refusal(call, words)
    for settings, words in (
        (dict(plan=plan(unit="example")), "each client"),
        (dict(plan=plan(sampling="cyclic")), "cyclic"),
        (dict(kind="rank"), "kind must be one of"),
        (dict(noise="none"), "noise must be one of"),
        (dict(max_texts=0), "max_texts"),
    ):
        refusal(lambda settings=settings: Scorer(**{"plan": plan(), **settings}), words)


def test_what_a_client_sends_does_not_grow_with_the_candidates():
    """Against the 7 million and 18,000 numbers of SPEC C.2."""
    linear, votes = Scorer(plan()), Scorer(plan(), kind="nn_histogram")
    assert linear.floats_per_client(4, 3, DIM) == (15, DIM)
    assert linear.floats_per_client(1_800, 10, DIM) == (15, DIM)
    assert votes.floats_per_client(1_800, 10, DIM) == (18_000 * DIM, 18_000)
