"""Scores of candidates as contributions: against a dense loop, and what one client can do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import cores
from jaxpfl.data import Population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.federated.clients.scores import (
    LinearScores,
    NearestVotes,
    ScoreSpace,
    mean_embeddings,
    score_space,
    unit_rows,
)
from jaxpfl.privacy.keys import training_root
from tests.federated.cohorts import door, embedded, no_noise, of_everybody

PROMPTS, RESPONSES, DIM = 5, 4, 6
CLIP = 0.7
CENTRINGS = {"cosine": "none", "zscore": "all", "per_prompt": "prompt"}
KINDS = list(CENTRINGS)


def random_candidates(seed=0):
    """Prompts that differ, lengths that differ, and a zero row."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(PROMPTS, 1, DIM)) + rng.normal(size=(PROMPTS, RESPONSES, DIM))
    found *= 10.0 ** rng.integers(-3, 4, size=(PROMPTS, RESPONSES, 1))
    found[2, 1] = 0.0
    return np.float32(found)


def few_candidates():
    """Fewer than dimensions: their Gram matrix is singular."""
    return np.float32(np.random.default_rng(2).normal(size=(1, 4, DIM)))


def collinear_candidates(seed=0):
    """Nearly one line: differences near the resolution of float32."""
    rng = np.random.default_rng(seed)
    return np.float32(np.ones(DIM) + 1e-6 * rng.normal(size=(PROMPTS, RESPONSES, DIM)))


@pytest.fixture
def parts():
    """Texts of clients; one holds none."""
    rng = np.random.default_rng(1)
    made = [rng.normal(size=(n, DIM)) for n in (3, 1, 7, 0, 5)]
    made[2][4] = 0.0
    made[4] *= 0.01
    return made


def means_of(parts) -> np.ndarray:
    population = embedded(parts)
    return mean_embeddings(population.columns["embedding"], population.offsets)


@functools.cache
def opened(kind, chosen, **execution):
    """What clients with a mean each are asked through; its program is made once."""
    fn = LinearScores(None if kind == "cosine" else CLIP)
    like = jax.ShapeDtypeStruct((DIM,), jnp.float32)
    spec = CohortSpec(batch_size=1, max_examples=1, clients_per_bucket=8)
    return door(fn, chosen, like, cohort=spec, **execution)


def coordinates(means, factor, kind, *, chosen=None, **execution):
    """What the server sees of linear scores: the sum of coordinates, float32 [d]."""
    held = Population(
        {"mean_embedding": means}, np.arange(len(means) + 1), [str(i) for i in range(len(means))]
    )
    asked = opened(kind, chosen or no_noise(clip_norm=CLIP), **execution)
    return of_everybody(asked, jnp.asarray(factor), held)


def scores(parts, candidates, kind, **settings):
    """Released scores without noise, float64 [K, J]."""
    space = score_space(jnp.asarray(candidates), CENTRINGS[kind])
    total = coordinates(means_of(parts), space.factor_DxD, kind, **settings)
    return np.float64(space.scores(jnp.asarray(total)))


def unit(row):
    norm = np.linalg.norm(row)
    return row / norm if norm else row


def looped(parts, candidates, kind, clip_norm=CLIP):
    """The same by the definition: every client's whole score vector, clipped; float64."""
    prompts, responses = candidates.shape[:2]
    units = [[unit(np.float64(row)) for row in rows] for rows in candidates]
    total = np.zeros((prompts, responses))
    for part in parts:
        rows = np.float64(np.float32(part))
        if not len(rows) or not np.isfinite(rows).all():
            continue
        cosines = np.array([[[unit(row) @ e for e in of] for of in units] for row in rows])
        score = cosines.mean(axis=0)
        if kind == "nn_histogram":
            nearest = cosines[rows.any(axis=1)].reshape(-1, score.size).argmax(axis=1)
            score = np.bincount(nearest, minlength=score.size).reshape(score.shape)
        elif kind == "zscore":
            score = score - score.mean()
        elif kind == "per_prompt":
            score = score - score.mean(axis=1, keepdims=True)
        norm = np.linalg.norm(score)
        if norm:
            grown = kind in ("zscore", "per_prompt")
            total += score * (clip_norm / norm if grown else min(1.0, clip_norm / norm))
    return total


@pytest.mark.parametrize("make", [random_candidates, few_candidates])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_loop_over_whole_score_vectors(parts, kind, make):
    """TRUST 1, 3: also with a client without texts, a zero text and a zero candidate.

    Only directions count: the squares of 3e38 overflow, the client does not."""
    candidates = make()
    if make is random_candidates:
        candidates[3] = candidates[3, 0]
        parts[0][1] *= 1e38 / np.abs(parts[0][1]).max()
    expected, found = looped(parts, candidates, kind), scores(parts, candidates, kind)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
    assert np.abs(expected).max() > 0.1
    if make is random_candidates and kind == "per_prompt":
        # A prompt whose responses are alike, beside others that differ.
        np.testing.assert_array_equal(found[3], 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_that_are_nearly_collinear(parts, kind):
    """Scores that float32 cannot tell apart come out small, never long and never NaN."""
    candidates = collinear_candidates()
    found = scores(parts, candidates, kind)
    assert np.all(np.isfinite(found))
    for part in parts:
        assert np.linalg.norm(scores([part], candidates, kind)) <= CLIP * (1 + 1e-4)
    if kind == "cosine":
        np.testing.assert_allclose(found, looped(parts, candidates, kind), rtol=1e-3)


@pytest.mark.parametrize("dimension", [1, 7, 16])
@pytest.mark.parametrize("centring", CENTRINGS.values())
def test_the_space_of_more_candidates_than_a_block_is_the_definitions(
    centring, dimension, monkeypatch
):
    """In float64; the last block is not full, and lengths are up to the ends of float32."""
    monkeypatch.setattr(cores, "number", lambda: 2)
    rng = np.random.default_rng(6)
    shape = (701, 7, dimension)  # of each half, 2,450 rows in blocks of 2,048 or 2,044
    candidates = rng.normal(size=shape) * 10.0 ** rng.integers(-30, 37, size=(*shape[:2], 1))
    candidates = np.float32(candidates)
    before = candidates.copy()
    space = score_space(candidates, centring)
    rows, factor = (np.float64(array) for array in space)
    expected = np.float64(candidates)
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    if centring != "none":
        axes = {"all": (0, 1), "prompt": 1}[centring]
        expected -= expected.mean(axis=axes, keepdims=True)
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    flat = expected.reshape(-1, dimension)
    gram = flat.T @ flat
    ridge = 2.0**-21 * np.trace(gram) * np.eye(dimension)
    np.testing.assert_allclose(factor @ factor.T, gram + ridge, atol=1e-5 * np.trace(gram))
    np.testing.assert_array_equal(candidates, before)


@pytest.mark.parametrize("dimension", [DIM, 33, 384])
@pytest.mark.parametrize("centring", ["all", "prompt"])
def test_many_candidates_that_are_all_alike_are_exactly_zero(centring, dimension):
    """In full blocks and in the last one."""
    alike = np.float32(np.random.default_rng(7).normal(size=dimension))
    rows, _ = score_space(np.broadcast_to(alike, (701, 7, dimension)), centring)
    np.testing.assert_array_equal(rows, 0.0)


def adversarial_means():
    """What a client might claim its mean is: any finite vector, not only a mean's."""
    rng = np.random.default_rng(3)
    rows = [np.zeros(DIM), np.ones(DIM), -np.ones(DIM), np.full(DIM, 1e-30), np.full(DIM, 1e-38)]
    rows += [np.full(DIM, 3e38), np.eye(DIM)[0] * 1e20, np.eye(DIM)[1] * 1e-7]
    rows += list(rng.normal(size=(20, DIM)) * 10.0 ** rng.integers(-12, 13, size=(20, 1)))
    return [np.float32(row) for row in rows]


def factors():
    """Of candidates that are usual, hard, or not what the factor was made of at all."""
    rng = np.random.default_rng(4)
    made = {
        f"{name}, {kind}": score_space(jnp.asarray(candidates()), CENTRINGS[kind]).factor_DxD
        for name, candidates in [("random", random_candidates), ("collinear", collinear_candidates)]
        for kind in KINDS
    }
    made["of nothing"] = score_space(
        jnp.zeros((PROMPTS, RESPONSES, DIM), jnp.float32), "none"
    ).factor_DxD
    made["wrong"] = jnp.asarray(np.float32(1e6 * rng.normal(size=(DIM, DIM))))
    return made


@pytest.mark.parametrize("kind", ["cosine", "per_prompt"])
def test_one_client_moves_the_coordinates_by_at_most_the_clip_norm(kind):
    """TRUST 16: whatever its mean, whatever the candidates, and even with a wrong factor."""
    others = np.float32(0.1 * np.random.default_rng(5).normal(size=(2, DIM)))
    reached = []
    for factor in factors().values():
        without = np.float64(coordinates(others, factor, kind))
        for mean in adversarial_means():
            more = np.concatenate([others, mean[None]])
            moved = np.float64(coordinates(more, factor, kind)) - without
            # Two float32 sums of at most three clients: their rounding is not the client's.
            assert np.linalg.norm(moved) <= CLIP * (1 + 1e-6) + 3e-7
            reached.append(np.linalg.norm(moved))
    assert max(reached) >= CLIP * (1 - 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_client_with_an_embedding_that_is_not_finite_counts_as_zero(parts, kind, bad):
    """TRUST 2: the whole client, however many of its texts are good."""
    candidates = random_candidates()
    others = scores([part for i, part in enumerate(parts) if i != 2], candidates, kind)
    parts[2][1, 3] = bad
    np.testing.assert_allclose(scores(parts, candidates, kind), others, rtol=1e-5, atol=1e-6)


def columns_of(space: ScoreSpace) -> np.ndarray:
    """A L^-T as a matrix, float64 [candidates, d]: the scores of each single coordinate."""
    columns = [np.ravel(space.scores(row)) for row in jnp.eye(DIM, dtype=jnp.float32)]
    return np.float64(np.stack(columns, axis=1))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_on_coordinates_is_the_noise_on_scores_less_what_no_score_can_be(kind):
    """Orthonormal columns: N(0, I) on coordinates becomes N(0, projection) on scores."""
    candidates = random_candidates()
    columns = columns_of(score_space(jnp.asarray(candidates), CENTRINGS[kind]))
    np.testing.assert_allclose(columns.T @ columns, np.eye(DIM), atol=2e-4)
    # And they span what scores can be.
    for text in np.eye(DIM):
        score = looped([text[None]], candidates, kind).ravel()
        np.testing.assert_allclose(columns @ (columns.T @ score), score, atol=1e-4)


def test_noise_never_grows_where_candidates_are_alike():
    for candidates in (collinear_candidates(), random_candidates()[:1, :2]):
        for centring in CENTRINGS.values():
            columns = columns_of(score_space(jnp.asarray(candidates), centring))
            assert np.linalg.norm(columns, 2) <= 1 + 1e-3


def test_orthogonal_noise_is_the_rest_of_the_noise_on_every_score():
    """Together N(0, I) in each entry: orthogonal to the columns, and of full size elsewhere."""
    space = score_space(jnp.asarray(random_candidates()), "none")
    columns = columns_of(space)
    keys_N = jax.random.split(training_root(0), 500)
    draws_NxKxJ = jax.vmap(lambda key: space.orthogonal_noise(key, jnp.float32(2.0)))(keys_N)
    draws = np.reshape(draws_NxKxJ, (500, -1))
    np.testing.assert_allclose(draws @ columns, 0.0, atol=1e-3)
    expected = 4.0 * (np.eye(PROMPTS * RESPONSES) - columns @ columns.T)
    # The standard error of a variance of 4 is 4 sqrt(2 / 500) = 0.25.
    np.testing.assert_allclose(draws.T @ draws / len(draws), expected, atol=1.2)


def test_candidates_that_are_not_finite_make_no_factor_and_do_not_hang(parts):
    """They are refused where they come in; here no client's coordinates are finite."""
    candidates = random_candidates()
    candidates[1, 2, 3] = np.nan
    factor = score_space(jnp.asarray(candidates), "none").factor_DxD
    np.testing.assert_array_equal(coordinates(means_of(parts), factor, "cosine"), 0.0)


def votes(parts, candidates, *, max_texts=12, chosen=None, **execution):
    unit_MxD = unit_rows(jnp.asarray(candidates)).reshape(-1, DIM)
    like = jax.ShapeDtypeStruct((len(unit_MxD),), jnp.float32)
    chosen = chosen or no_noise(clip_norm=float(max_texts))
    spec = CohortSpec(batch_size=4, max_examples=max_texts, clients_per_bucket=8)
    opened = door(NearestVotes(), chosen, like, cohort=spec, **execution)
    return of_everybody(opened, unit_MxD, embedded(parts))


@pytest.mark.parametrize("chunk", [1, 4])
def test_votes_are_those_of_a_loop(parts, chunk):
    """TRUST 1, 2: one vote a text for its nearest; a client with a NaN has none at all."""
    candidates = random_candidates()
    parts[4][0, 2] = np.nan
    parts[0][1] *= 1e38 / np.abs(parts[0][1]).max()
    expected = looped(parts, candidates, "nn_histogram", clip_norm=12.0)
    np.testing.assert_array_equal(votes(parts, candidates, chunk=chunk), expected.ravel())
    assert expected.sum() == 3 + 1 + 6  # a zero text does not vote


def test_a_tie_goes_to_the_lowest_index():
    candidates = np.float32(np.stack([np.eye(DIM)[[1, 0]], np.eye(DIM)[[0, 0]]]))
    np.testing.assert_array_equal(votes([np.eye(DIM)[:1]], candidates), [0, 1, 0, 0])


def test_a_voter_moves_the_histogram_by_at_most_the_cap_of_texts():
    """TRUST 4, 16: a giant client that votes for one candidate alone reaches the cap."""
    candidates = random_candidates()
    giant = np.repeat(candidates[1, 1][None], 50, axis=0)
    few = [np.float64(candidates[0, :2].reshape(-1, DIM))]
    moved = votes([*few, giant], candidates) - votes(few, candidates)
    assert np.linalg.norm(moved) == 12
    # And a smaller clip norm holds as everywhere.
    chosen = no_noise(clip_norm=CLIP)
    moved = votes([*few, giant], candidates, chosen=chosen) - votes(few, candidates, chosen=chosen)
    assert np.linalg.norm(moved) == pytest.approx(CLIP, rel=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_means_are_those_of_a_loop(parts, dtype):
    """TRUST 19; in pieces too."""
    population = embedded(parts * 2_000)
    embedding, offsets = population.columns["embedding"].astype(dtype), population.offsets
    found = mean_embeddings(embedding, offsets)
    assert found.dtype == np.float32
    assert embedding.shape[0] > 20_000
    for client in (0, 1, 2, 3, 4, 5_003, 9_999):
        rows = np.float64(embedding[offsets[client] : offsets[client + 1]])
        expected = np.mean([unit(row) for row in rows], axis=0) if len(rows) else np.zeros(DIM)
        np.testing.assert_allclose(found[client], expected, rtol=1e-6, atol=1e-7)


def test_units_of_giant_tiny_and_zero_rows():
    rows = np.float32([[3e38, 3e38, 0], [3e-30, 0, 4e-30], [0, 0, 0], [0, -2, 0]])
    expected = [[0.5**0.5, 0.5**0.5, 0], [0.6, 0, 0.8], [0, 0, 0], [0, -1, 0]]
    np.testing.assert_allclose(unit_rows(jnp.asarray(rows)), expected, rtol=1e-6)
