"""Releases of scores: what they are, what they cost, and that no two share their noise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.algorithms import candidate_scores
from jaxpfl.algorithms.candidate_scores import LABEL, CandidateScores
from jaxpfl.data import Population, from_clients
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.federated import client_mesh
from jaxpfl.federated.environment import environment
from jaxpfl.privacy import Budget, Ledger, Plan
from jaxpfl.privacy.keys import noise_root
from tests.data.populations import SECRET
from tests.plans import flat_plan

DIM = 5
LINEAR = ["cosine", "zscore", "per_prompt"]
KINDS = [*LINEAR, "nn_histogram"]


def clients(count: int = 40, seed: int = 0) -> Population:
    """Clients of 0 to 6 texts."""
    rng = np.random.default_rng(seed)
    return from_clients(
        {
            f"{SECRET} {k}": {"embedding": rng.normal(size=(k % 7, DIM)).astype(np.float32)}
            for k in range(count)
        }
    )


def candidates(seed: int = 1, prompts: int = 4, responses: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(prompts, responses, DIM)).astype(np.float32)


def plan(population: int = 40, **changes) -> Plan:
    settings = dict(
        population=population,
        clients_per_round=population,
        rounds=20,
        clip_norm=1.0,
        noise_multiplier=3.35,
        delta=3e-6,
    )
    return flat_plan(**{**settings, **changes})


def silent(population: int = 40, **changes) -> Plan:
    settings = dict(population=population, clients_per_round=population, rounds=20, clip_norm=1.0)
    return Plan.without_privacy(**{**settings, **changes})


@pytest.fixture
def opened(tmp_path):
    """Makes releasers, each with a ledger of its own unless given one."""
    ledgers = []

    def make(population=None, chosen=None, *, ledger=None, key=None, **settings):
        population = clients() if population is None else population
        if ledger is None:
            path = tmp_path / f"{len(ledgers)}.jsonl"
            ledger = Ledger(path, population.fingerprint, budget=settings.pop("budget", None))
            ledgers.append(ledger)
        key = noise_root(0) if key is None else key
        chosen = plan(len(population)) if chosen is None else chosen
        return CandidateScores(population, chosen, ledger=ledger, noise_key=key, **settings)

    yield make
    for ledger in ledgers:
        ledger.close()


def looped(population, embeddings, kind, clip=1.0):
    """Everyone's clipped scores by the definition, float64."""
    units = embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)
    total = np.zeros(units.shape[:2])
    for client in range(len(population)):
        rows = np.float64(population.examples(client)["embedding"])
        if not len(rows):
            continue
        score = np.stack([units @ (row / np.linalg.norm(row)) for row in rows])
        if kind == "nn_histogram":
            score = np.stack([one == one.max() for one in score]).sum(axis=0)
        else:
            score = score.mean(axis=0)
        if kind in ("zscore", "per_prompt"):
            score = score - score.mean(axis=None if kind == "zscore" else 1, keepdims=True)
            score = score * (clip / np.linalg.norm(score))
        total += score * min(1.0, clip / np.linalg.norm(score))
    return total


@pytest.mark.parametrize("clip_norm", [1.0, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_release_is_the_definitions(opened, kind, clip_norm):
    population, embeddings = clients(), candidates()
    released = opened(population, silent(clip_norm=clip_norm), kind=kind).release(
        embeddings, round=1
    )
    assert released.shape == (4, 3) and released.dtype == np.float32
    expected = looped(population, np.float64(embeddings), kind, clip_norm)
    np.testing.assert_allclose(released, expected, rtol=1e-4, atol=1e-4 * clip_norm)


@pytest.mark.parametrize("kind", ["per_prompt", "nn_histogram"])
def test_the_noise_is_the_plans(opened, kind):
    """Noise of z S on what is released, and under "every_score" on every score."""
    embeddings = candidates(prompts=200, responses=5)
    deviations = {}
    for noise in ("projected", "every_score"):
        chosen = plan(noise_multiplier=50.0, clip_norm=2.0)
        noisy = opened(chosen=chosen, kind=kind, noise=noise).release(embeddings, round=1)
        exact = opened(chosen=silent(clip_norm=2.0), kind=kind).release(embeddings, round=1)
        deviations[noise] = (noisy - exact).std()
    # Over 1,000 scores; projected noise has but 5 independent entries.
    assert deviations["every_score"] == pytest.approx(100.0, rel=0.1)
    if kind == "nn_histogram":
        assert deviations["projected"] == pytest.approx(100.0, rel=0.1)
    else:
        expected = 100.0 * math.sqrt(DIM / 1_000)
        assert expected / 3 < deviations["projected"] < expected * 3


@pytest.mark.parametrize("kind", ["per_prompt", "nn_histogram"])
def test_the_same_release_again_is_the_same_and_costs_nothing(opened, tmp_path, kind):
    """A run that was killed and resumed, in a new process with the ledger on the disk."""
    population, embeddings = clients(), candidates()
    path = tmp_path / "resumed.jsonl"
    chosen = plan(clients_per_round=20)
    found = []
    for _ in range(2):
        with Ledger(path, population.fingerprint) as ledger:
            scores = opened(population, chosen, ledger=ledger, kind=kind)
            found.append(scores.release(embeddings, round=3))
            assert len(ledger) == 1
    np.testing.assert_array_equal(*found)


def test_whatever_differs_the_release_is_charged_and_its_noise_is_independent(opened, tmp_path):
    """Else the difference of two releases would be free of noise."""
    population, embeddings = clients(), candidates()
    empty = population.with_columns({"embedding": np.zeros((population.num_examples, DIM), "f4")})
    quiet = plan(clients_per_round=20)
    loud = plan(clients_per_round=20, noise_multiplier=4.0)
    other = embeddings.copy()
    other[3, 2, 4] += 1e-6
    noises = []
    with Ledger(tmp_path / "all.jsonl", population.fingerprint) as ledger:
        for settings, shown, round in (
            (dict(), embeddings, 1),
            (dict(), embeddings, 2),
            (dict(), other, 1),
            (dict(kind="zscore"), embeddings, 1),
            (dict(noise="every_score"), embeddings, 1),
            (dict(run="another"), embeddings, 1),
            (dict(key=noise_root(1)), embeddings, 1),
            (dict(chosen=loud), embeddings, 1),
            (dict(population=empty), embeddings, 1),
        ):
            made = {"population": population, "chosen": quiet, **settings}
            scores = opened(made.pop("population"), made.pop("chosen"), ledger=ledger, **made)
            noises.append(scores.release(shown, round=round).ravel())
        assert len(ledger) == len(noises)
    for i, first in enumerate(noises):
        for second in noises[:i]:
            assert np.abs(first - second).max() > 0.5


def test_cohorts_of_rounds_and_of_other_candidates_are_drawn_anew(opened):
    """The accountant composes independent samples: no two releases may share one."""
    population = clients(200)
    chosen = silent(200, clients_per_round=100)
    scores = opened(population, chosen, kind="nn_histogram", max_texts=1)
    embeddings = candidates()
    turned = embeddings[:, :, ::-1].copy()
    counts = [
        scores.release(shown, round=round).sum()
        for shown in (embeddings, turned)
        for round in (1, 2, 3)
    ]
    assert len(set(counts)) > 3


@pytest.mark.parametrize(
    ("per_round", "z", "epsilon"),
    [(10_000, 3.35, 6.50), (10_000, 19.3, 0.919), (1_000, 0.82, 5.92), (500, 1.6, 0.826)],
)
def test_twenty_rounds_cost_what_the_papers_table_says_by_pld(opened, per_round, z, epsilon):
    """SPEC D.1, N = 10,000: one event a round, no round free and none charged twice."""
    population = Population(
        {"embedding": np.ones((1, 2), np.float32)},
        np.r_[np.zeros(10_000, np.int64), 1],
        [str(k) for k in range(10_000)],
    )
    chosen = plan(10_000, clients_per_round=per_round, noise_multiplier=z)
    scores = opened(population, chosen)
    shown = np.ones((1, 2, 2), np.float32)
    rounds = 20 if per_round < 1_000 else 3
    for round in range(1, rounds + 1):
        scores.release(shown + round, round=round)
    for round in range(rounds + 1, 21):
        # What a release charges, without its work.
        scores.ledger.charge(chosen.round_event(), LABEL, run="the others", round=round)
    assert len(scores.ledger) == 20
    assert scores.ledger.spent(3e-6) == pytest.approx(epsilon, rel=2e-3)
    assert chosen.epsilon() == pytest.approx(scores.ledger.spent(3e-6), rel=1e-6)
    with pytest.raises(InputError, match=r"1 \.\. 20"):
        scores.release(shown, round=21)
    assert len(scores.ledger) == 20


def test_what_exceeds_the_budget_is_not_released(opened, monkeypatch):
    """TRUST 30: stopped before the cohort is drawn."""
    population = clients()
    chosen = plan(noise_multiplier=2.0)
    budget = Budget(epsilon=chosen.epsilon(1) * 1.01, delta=3e-6)
    scores = opened(population, chosen, budget=budget)
    scores.release(candidates(), round=1)
    monkeypatch.setattr(Plan, "sample", lambda *_: pytest.fail("a cohort was drawn"))
    with pytest.raises(BudgetExhausted):
        scores.release(candidates(), round=2)
    assert len(scores.ledger) == 1


def test_an_empty_round_is_noise_and_is_charged(opened, monkeypatch):
    """TRUST 1, 24."""
    monkeypatch.setattr(Plan, "sample", lambda *_: np.zeros(0, np.int64))
    empty = opened(chosen=plan(clients_per_round=1))
    found = [empty.release(candidates(), round=round) for round in range(1, 4)]
    assert np.isfinite(found).all() and np.all(np.std(found, axis=0) > 0)
    assert len(empty.ledger) == 3


def test_devices_change_only_rounding_and_are_charged_for_it(opened, tmp_path):
    """TRUST 22, 34: what another layout releases is not the same to the bit."""
    population = clients()
    with Ledger(tmp_path / "devices.jsonl", population.fingerprint) as ledger:
        one, two = (
            opened(population, silent(), ledger=ledger, mesh=client_mesh(devices))
            for devices in (1, 2)
        )
        np.testing.assert_allclose(
            one.release(candidates(), round=1),
            two.release(candidates(), round=1),
            rtol=1e-5,
            atol=1e-5,
        )
        assert len(ledger) == 2


def test_where_it_could_round_otherwise_noise_is_independent_and_charged(
    opened, tmp_path, monkeypatch
):
    """Else the difference of two releases, resumed after an upgrade, would be free of noise."""
    population, chosen = clients(), plan(clients_per_round=20)
    here, found = environment(), []
    others = ({}, {"jax": "0.0.0"}, {"jaxlib": "0.0.0"}, {"processor": "?"}, {"devices": ["?"]}, {})
    with Ledger(tmp_path / "where.jsonl", population.fingerprint) as ledger:
        for changed in others:
            monkeypatch.setattr(candidate_scores, "environment", lambda c=changed: here | c)
            scores = opened(population, chosen, ledger=ledger)
            found.append(scores.release(candidates(), round=1).ravel())
        assert len(ledger) == len(others) - 1
    np.testing.assert_array_equal(found[0], found[-1])
    for i, first in enumerate(found[:-1]):
        for second in found[:i]:
            assert np.abs(first - second).max() > 0.5


@pytest.mark.parametrize("kind", ["per_prompt", "nn_histogram"])
def test_what_clients_get_rounded_otherwise_is_another_release(opened, tmp_path, monkeypatch, kind):
    """By another version of this library, say: nothing else of the release changes."""
    population, chosen = clients(), plan(clients_per_round=20)
    name = "unit_rows" if kind == "nn_histogram" else "score_space"
    before, found = getattr(candidate_scores, name), []

    def otherwise(*given):
        made = before(*given)
        if kind == "nn_histogram":
            return jnp.nextafter(made, jnp.float32(2))
        return made._replace(factor_DxD=jnp.nextafter(made.factor_DxD, jnp.float32(2)))

    with Ledger(tmp_path / "rounding.jsonl", population.fingerprint) as ledger:
        for function in (before, otherwise, before):
            monkeypatch.setattr(candidate_scores, name, function)
            scores = opened(population, chosen, ledger=ledger, kind=kind)
            found.append(scores.release(candidates(), round=1).ravel())
        assert len(ledger) == 2
    np.testing.assert_array_equal(found[0], found[2])
    assert np.abs(found[0] - found[1]).max() > 0.5


def test_several_sets_of_candidates_in_a_round_cost_a_round_each(opened):
    """The plan counts a round once; what all have cost is the ledger's to say."""
    chosen = plan(clients_per_round=20)
    scores = opened(chosen=chosen)
    for seed in range(3):
        scores.release(candidates(seed=seed), round=1)
    assert scores.ledger.spent(chosen.delta) == pytest.approx(chosen.epsilon(3))
    assert chosen.epsilon(1) < 0.9 * chosen.epsilon(3)


def test_duplicate_candidates_get_equal_scores(opened):
    """SPEC C.3: each text has its own place, and equal ones equal scores but for noise."""
    embeddings = candidates()
    embeddings[2] = embeddings[0]
    for kind in LINEAR:
        released = opened(chosen=silent(), kind=kind).release(embeddings, round=1)
        np.testing.assert_allclose(released[2], released[0], rtol=1e-5, atol=1e-6)
        assert np.abs(released[0, 0] - released[0, 1]) > 1e-2


def test_a_client_of_many_texts_votes_with_a_capped_subset(opened):
    population = from_clients(
        {"a": {"embedding": np.random.default_rng(0).normal(size=(50, DIM)).astype(np.float32)}}
    )
    chosen = silent(1, clip_norm=8.0)
    scores = opened(population, chosen, kind="nn_histogram", max_texts=8)
    rounds = [scores.release(candidates(), round=round) for round in (1, 2)]
    assert [votes.sum() for votes in rounds] == [8, 8]
    assert np.any(rounds[0] != rounds[1])


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (np.ones((4, 3, DIM + 1), np.float32), r"\[prompts, responses, 5\]"),
        (np.ones((4, DIM), np.float32), r"\[prompts, responses, 5\]"),
        (np.ones((4, 3, DIM), np.int32), "int32"),
        (np.ones((4, 1, DIM), np.float32), "at least 2"),
        (np.ones((0, 3, DIM), np.float32), "at least 2"),
        (np.full((4, 3, DIM), np.nan), "prompt 0, response 0"),
        (
            np.where(np.arange(4 * 3 * DIM).reshape(4, 3, DIM) == 37, 1e39, 1.0),
            "prompt 2, response 1",
        ),
    ],
)
def test_candidates_that_cannot_be_scored_are_refused_before_the_charge(
    opened, embeddings, message
):
    scores = opened()
    with pytest.raises(InputError, match=message):
        scores.release(embeddings, round=1)
    assert len(scores.ledger) == 0


def test_what_does_not_fit_together_is_refused(opened, tmp_path):
    """TRUST 7, 13: and no message tells of a client."""
    population = clients()
    texts = from_clients({"a": {"text": ["x"]}})
    whole = population.with_columns({"embedding": np.ones((population.num_examples, 2), np.int32)})
    flat = population.with_columns({"embedding": np.ones(population.num_examples, np.float32)})
    with (
        Ledger(tmp_path / "other", clients(3).fingerprint) as other,
        Ledger(tmp_path / "unit", population.fingerprint, unit="example") as by_example,
    ):
        for message, settings in (
            ("column 'embedding'", dict(population=texts)),
            ("floats", dict(population=whole)),
            ("column 'embedding'", dict(population=flat)),
            ("population of 50", dict(chosen=plan(50))),
            ("each client", dict(chosen=plan(unit="example"))),
            ("each example", dict(ledger=by_example)),
            ("another population", dict(ledger=other)),
            ("kind must be one of", dict(kind="rank")),
            ("noise must be one of", dict(noise="none")),
            ("max_texts", dict(max_texts=0)),
        ):
            with pytest.raises(InputError, match=message) as raised:
                opened(settings.pop("population", population), **settings)
            assert SECRET not in str(raised.value)
    scores = opened()
    for round in (0, -1, 1.0, True):
        with pytest.raises(InputError, match="round"):
            scores.release(candidates(), round=round)


def test_what_a_client_sends_does_not_grow_with_the_candidates(opened):
    """Against the 7 million and 18,000 numbers of SPEC C.2."""
    linear, votes = opened(), opened(kind="nn_histogram")
    assert linear.floats_per_client(4, 3) == linear.floats_per_client(1_800, 10) == (15, DIM)
    assert votes.floats_per_client(1_800, 10) == (18_000 * DIM, 18_000)


def test_the_released_key_is_no_plain_seed(opened):
    """TRUST 20: noise from typed keys of the pinned implementation alone."""
    with pytest.raises(InputError, match="noise needs"):
        opened(key=jax.random.key(0)).release(candidates(), round=1)
