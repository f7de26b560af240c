"""Canaries for algorithms' own client functions: what they move, and that it is found."""

import dataclasses
import sys
from functools import partial

import numpy as np
import pytest

from jaxpfl.algorithms.canaries import MomentCanaries, ScoreCanaries, TrainingCanaries
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.experiments.config import sections
from jaxpfl.experiments.engine.build import build_algorithm
from jaxpfl.federated.audits.canaries import Game, Questions
from jaxpfl.federated.clients.local_training import TwoParts
from jaxpfl.privacy.auditing import lower_bound
from tests.plans import flat_plan
from tools.audit import WORSE

CANARIES = 6


plan = partial(flat_plan, population=8, rounds=2, noise_multiplier=1e-3, delta=1e-3)


def assert_shows(game: Game) -> None:
    """One run shows of each canary, by a whole clip norm, whether it was in, in each of two rounds.

    That is the most that a client may move.
    """
    observed: list[np.ndarray] = []

    class Noting:
        def __init__(self, inner: Questions) -> None:
            self.inner = inner

        def clients(self, present_M):
            self.present_M = present_M
            return self.inner.clients(present_M)

        def ask(self, *given):
            found = self.inner.ask(*given)
            if found.seen_M is not None:
                observed.append(found.seen_M)
            return found

    assert game.questions is not None
    noting = Noting(game.questions(game.plans, game.canaries))
    dataclasses.replace(game, questions=lambda plans, canaries: noting).play(1)
    expected_TxM = np.broadcast_to(1.0 * noting.present_M, (2, CANARIES))
    assert np.stack(observed) == pytest.approx(expected_TxM, abs=0.02)


@pytest.mark.parametrize(
    ("kind", "clip_norm"),
    [
        ("per_prompt", 1.0),
        pytest.param("zscore", 0.5, marks=pytest.mark.long),
        ("cosine", 2.0),
        ("nn_histogram", 3.0),
    ],
)
def test_the_coordinate_of_a_score_or_vote_shows_who_is_in(kind, clip_norm):
    questions = partial(ScoreCanaries, kind, 3)
    assert_shows(Game((plan(clip_norm=clip_norm),), CANARIES, questions=questions))


@pytest.mark.parametrize(
    ("labels", "shares"),
    [(1, (1.0,)), pytest.param(3, (1.0,), marks=pytest.mark.long), (3, (0.7, 0.3))],
)
def test_the_moments_show_who_is_in(labels, shares):
    """The sum and the second moment, and not the count; of labels those of each canary's own."""
    settings = {"clip_norm": 0.5, "labels": labels, "shares": shares}
    fred_plan = FredPlan((1e-3, 1e-3, 1e-3), 1e-3, **settings)
    questions = partial(MomentCanaries, fred_plan)
    assert_shows(Game(fred_plan.plans(8), CANARIES, questions=questions))


@pytest.mark.long
def test_fred_is_bounded_by_what_it_states_and_above_it_with_less_noise():
    fred_plan = FredPlan((1.0, 1.0, 1.0), 1e-3, clip_norm=0.5)

    def found(asking_of=None):
        game = Game(fred_plan.plans(64), 64, questions=partial(MomentCanaries, fred_plan))
        played = game.play(8, asking_of=asking_of)
        return lower_bound(played.trials, played.stated).epsilon, played.stated.epsilon()

    bound, stated = found()
    assert 0.2 * stated < bound <= stated == pytest.approx(fred_plan.epsilon(), rel=1e-6)
    bound, stated = found(WORSE["a tenth of the noise"])
    assert bound > stated


SCAFFOLD = sections.ScaffoldConfig("scaffold", 3.0)


def trained(algorithm: sections.AlgorithmConfig, **changes) -> Game:
    training = sections.TrainingConfig(
        2, 8, epochs=2, client=sections.OptimizerConfig("sgd", 0.1), algorithm=algorithm
    )
    made = partial(build_algorithm, training=training)
    asked = plan(clip_norm=0.5, **changes)
    return Game((asked,), min(asked.population, 64), questions=partial(TrainingCanaries, made))


@pytest.mark.parametrize(
    "algorithm",
    [SCAFFOLD, sections.ProximalConfig("ditto", 0.1), sections.FedDynConfig("fed_dyn", 0.1)],
    ids=lambda each: each.name,
)
def test_a_part_of_a_contribution_shows_who_is_in(algorithm):
    """All parts together."""
    assert_shows(dataclasses.replace(trained(algorithm), canaries=CANARIES))


@dataclasses.dataclass(frozen=True)
class SecondUnclipped(TwoParts):
    """A planted defect."""

    def sent(self, first, second):
        return super().sent(first, second)[0], self.scales[1] * second


@pytest.mark.parametrize(
    ("algorithm", "parts", "asking_of", "flagged"),
    [
        pytest.param(SCAFFOLD, TwoParts, None, False, marks=pytest.mark.long),
        # Clients clip both parts, before the door does.
        (SCAFFOLD, TwoParts, "no clip", False),
        (SCAFFOLD, SecondUnclipped, "no clip", True),
        (sections.ProximalConfig("ditto", 0.1), TwoParts, None, False),
        (sections.ProximalConfig("ditto", 0.1), TwoParts, "no clip", True),
    ],
)
def test_an_audit_asks_the_client_function_that_trains(
    monkeypatch, algorithm, parts, asking_of, flagged
):
    monkeypatch.setattr(sys.modules["jaxpfl.algorithms.scaffold"], "TwoParts", parts)
    game = trained(algorithm, population=64, noise_multiplier=4.0)
    played = game.play(4, asking_of=asking_of and WORSE[asking_of])
    bound = lower_bound(played.trials, played.stated).epsilon
    assert (bound > played.stated.epsilon()) == flagged
