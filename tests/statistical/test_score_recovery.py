"""How much of the true order of candidates survives the noise, by kind of score.

The world, in d dimensions, all vectors Gaussian of expected length 1 unless a direction is named:

    candidate  = unit(common u + prompt p_k + response r_kj)
    text       = unit(common u + shared s + client c_i + t)           8 of each client

The true score of a candidate is the sum over clients of its mean cosine, without clip or noise.
What counts is whether preference pairs are right: of each prompt's ten responses, the one whose
released score is best is taken as chosen, the fifth as rejected; recovery is the share of prompts
whose chosen truly scores above the rejected. Chance is 0.5.

SPEC C.1 gives, for noise in every score: prompts alike, zscore 0.94 and cosine 0.68 at sigma 3.35,
0.63 and 0.52 at 19.3; prompts that differ, per_prompt 0.91, zscore 0.81, cosine 0.58 at 3.35. Its
world is not described; this one, at 1,000 clients, 1,800 prompts and d = 384, is within 0.03 of all
seven. The small world keeps what noise does to signal, clients / sqrt(candidates),
and how much of a score is common.
"""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxpfl.algorithms.base import releaser_of, run_rounds
from jaxpfl.algorithms.candidate_scores import Scorer, candidate_scores
from jaxpfl.data import Population
from jaxpfl.federated import RunSecret
from jaxpfl.privacy import Ledger
from tests.plans import flat_plan

pytestmark = pytest.mark.long

RESPONSES, TEXTS = 10, 8
SIGMAS = (3.35, 19.3)
KINDS = ("cosine", "zscore", "per_prompt")


class Size(NamedTuple):
    clients: int
    prompts: int
    dimension: int


SMALL = Size(clients=316, prompts=180, dimension=64)
PAPER = Size(clients=1_000, prompts=1_800, dimension=384)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def world(size: Size, seed: int, *, prompts_differ: bool):
    """Candidates [K, J, d] and clients' texts [clients * 8, d], float32."""
    rng = np.random.default_rng(seed)
    common, prompt = (0.45, 0.8) if prompts_differ else (0.26, 0.0)
    d = size.dimension
    # Common parts of cosines grow with its square, the others' spread falls with sqrt(d).
    common *= (PAPER.dimension / d) ** 0.25

    def vectors(*shape):
        return rng.standard_normal((*shape, d), np.float32) / np.float32(np.sqrt(d))

    direction, shared = unit(vectors()), vectors()
    candidates = common * direction + prompt * vectors(size.prompts, 1)
    candidates = unit(candidates + 0.5 * vectors(size.prompts, RESPONSES))
    texts = common * direction + 0.6 * shared + 0.3 * vectors(size.clients, 1)
    texts = unit(texts + vectors(size.clients, TEXTS))
    return candidates.astype(np.float32), texts.reshape(-1, d).astype(np.float32)


def recovery(released_KxJ, true_KxJ):
    """The share of prompts whose chosen response truly scores above the rejected one."""
    order = np.argsort(-released_KxJ, axis=1)
    ranked = np.take_along_axis(true_KxJ, order, axis=1)
    return float(np.mean(ranked[:, 0] > ranked[:, 4]))


def measured(size: Size, folder, *, prompts_differ: bool, trials: int):
    """(kind, sigma, noise) -> recoveries [trials], through the releaser."""
    found: dict = {}
    for trial in range(trials):
        candidates, texts = world(size, trial, prompts_differ=prompts_differ)
        true_KxJ = np.float64(candidates) @ np.float64(texts).sum(axis=0)
        offsets = TEXTS * np.arange(size.clients + 1)
        names = [str(client) for client in range(size.clients)]
        clients = Population({"embedding": texts}, offsets, names)
        with Ledger(folder / f"{trial}.jsonl", clients) as ledger:
            for kind in KINDS:
                for sigma in SIGMAS:
                    plan = flat_plan(
                        population=size.clients, rounds=1, noise_multiplier=sigma, delta=3e-06
                    )
                    for noise in ("every_score", "projected"):
                        algorithm = candidate_scores(candidates, Scorer(plan, kind, noise))
                        releaser = releaser_of(
                            algorithm, clients, ledger, RunSecret.reproducible(trial), run="once"
                        )
                        state = run_rounds(algorithm, releaser, jax.random.key(0))
                        share = recovery(np.asarray(state.sum_KxJ), true_KxJ)
                        found.setdefault((kind, sigma, noise), []).append(share)
    return found


def margin(better, worse) -> float:
    """Mean difference of two rows of trials, in standard errors of it."""
    error = np.hypot(*(np.std(row, ddof=1) / np.sqrt(len(row)) for row in (better, worse)))
    return (np.mean(better) - np.mean(worse)) / max(error, 1e-3)


def means(found) -> dict:
    return {name: float(np.mean(row)) for name, row in found.items()}


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """The small world whose prompts do not differ."""
    folder = tmp_path_factory.mktemp("alike")
    return measured(SMALL, folder, prompts_differ=False, trials=16)


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("differing")
    return measured(SMALL, folder, prompts_differ=True, trials=16)


def test_centring_recovers_more_of_the_order_than_clipping(alike):
    # Draws change with every version of the programs: 5.8 to 10.7 at the larger sigma in most, and
    # 3.4 in one. Two standard errors still tell a difference from none.
    for sigma, errors in zip(SIGMAS, (8, 2), strict=True):
        clipped, centred = (alike[kind, sigma, "every_score"] for kind in ("cosine", "zscore"))
        assert margin(centred, clipped) > errors
    mean = means(alike)
    assert mean["zscore", 3.35, "every_score"] == pytest.approx(0.94, abs=0.06)
    assert mean["zscore", 19.3, "every_score"] == pytest.approx(0.63, abs=0.06)


def test_centring_each_prompt_recovers_most_where_prompts_differ(differing):
    cosine, zscore, per_prompt = (differing[kind, 3.35, "every_score"] for kind in KINDS)
    assert margin(per_prompt, zscore) > 5
    assert margin(zscore, cosine) > 5
    mean = means(differing)
    assert mean["per_prompt", 3.35, "every_score"] == pytest.approx(0.91, abs=0.06)
    assert mean["zscore", 3.35, "every_score"] == pytest.approx(0.81, abs=0.06)


def test_leaving_out_noise_that_is_no_score_recovers_more_at_the_same_epsilon(differing):
    """At sigma 19.3 (epsilon 1) about what noise in every score leaves at 3.35 (epsilon 7)."""
    for kind in ("zscore", "per_prompt"):
        for sigma in SIGMAS:
            projected, every = (differing[kind, sigma, how] for how in ("projected", "every_score"))
            assert margin(projected, every) > 5
    mean = means(differing)
    assert mean["per_prompt", 19.3, "projected"] > mean["per_prompt", 3.35, "every_score"] - 0.06
    assert mean["per_prompt", 3.35, "projected"] > 0.99


@pytest.mark.slow
def test_recovery_at_the_papers_size(tmp_path):
    """1,000 clients, 18,000 candidates, 384 dimensions: near SPEC C.1."""
    alike = means(measured(PAPER, tmp_path / "alike", prompts_differ=False, trials=2))
    differ = means(measured(PAPER, tmp_path / "differ", prompts_differ=True, trials=2))
    for found, kind, sigma, expected in (
        (alike, "zscore", 3.35, 0.94),
        (alike, "cosine", 3.35, 0.68),
        (alike, "zscore", 19.3, 0.63),
        (alike, "cosine", 19.3, 0.52),
        (differ, "per_prompt", 3.35, 0.91),
        (differ, "zscore", 3.35, 0.81),
        (differ, "cosine", 3.35, 0.58),
    ):
        assert found[kind, sigma, "every_score"] == pytest.approx(expected, abs=0.06)
    # Beside them, the same scores and guarantee with the projected noise.
    assert differ["per_prompt", 3.35, "projected"] > 0.99
    assert differ["per_prompt", 19.3, "projected"] > 0.93
