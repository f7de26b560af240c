"""Prefinetuning: the steps are SGD with momentum, the choice is by public validation loss."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxpfl.data.draws import generator_of
from jaxpfl.experiments.central.prefinetune import Corpus, learning_rates, prefinetune
from jaxpfl.experiments.config.sections import PrefinetuneConfig
from jaxpfl.progress import Progress
from tests.experiments.central.test_training import Linear, flat
from tests.refusals import refusal

SETTINGS = PrefinetuneConfig(
    examples=50, epochs=3, batch_size=8, trials=3, learning_rates=(0.01, 0.3)
)


START = {"kernel": np.zeros(3, np.float32), "bias": np.zeros((), np.float32)}


def _corpus(train: int = 45, valid: int = 5) -> Corpus:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(train + valid, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + 0.1 * generator.normal(size=len(x))).astype(np.float32)
    return Corpus("toy", {"x": x[:train], "y": y[:train]}, {"x": x[train:], "y": y[train:]})


def _loss(w: np.ndarray, columns: Any) -> float:
    return float(np.mean((columns["x"] @ w[:3] + w[3] - columns["y"]) ** 2))


def _reference(corpus: Corpus, settings: PrefinetuneConfig, seed: int) -> tuple[np.ndarray, dict]:
    """The same in float64 numpy, one step at a time."""
    x, y = (np.asarray(corpus.train[name], np.float64) for name in ("x", "y"))
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    valid = {name: np.asarray(column, np.float64) for name, column in corpus.valid.items()}

    def epoch(w, v, rate, number):
        order = generator_of(f"prefinetune {seed} epoch {number}").permutation(len(x))
        for start in range(0, len(x), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            gradient = 2 * x[rows].T @ (x[rows] @ w - y[rows]) / len(rows)
            v = settings.momentum * v + gradient
            w = w - rate * v
        return w, v

    trials = []
    for rate in learning_rates(settings, seed):
        w, v = epoch(np.zeros(4), np.zeros(4), rate, 1)
        trials.append((_loss(w, valid), rate, w, v))
    _, rate, w, v = min(trials, key=lambda trial: trial[0])
    kept = [(_loss(w, valid), 1, w)]
    for number in range(2, settings.epochs + 1):
        w, v = epoch(w, v, rate, number)
        kept.append((_loss(w, valid), number, w))
    loss, best, w = min(kept, key=lambda each: each[0])
    return w, {"rate": rate, "best": best, "loss": loss, "trials": [t[0] for t in trials]}


@pytest.mark.parametrize("seed", range(3))
def test_it_is_sgd_with_momentum_and_keeps_what_validates_best(seed):
    corpus = _corpus()
    found = prefinetune(Linear(), START, corpus, SETTINGS, seed=seed)
    expected, how = _reference(corpus, SETTINGS, seed)
    np.testing.assert_allclose(flat(found.params), expected, rtol=2e-4, atol=2e-5)
    assert found.record["learning_rate"] == how["rate"]
    assert found.record["best_epoch"] == how["best"]
    assert found.record["valid_loss"] == pytest.approx(how["loss"], rel=1e-3)
    losses = [trial["valid_loss"] for trial in found.record["trials"]]
    assert losses == pytest.approx(how["trials"], rel=1e-3)
    assert len(found.record["epochs"]) == 3


def test_the_best_epoch_is_not_always_the_last():
    """Validation data from elsewhere: training moves away from it."""
    corpus = _corpus()
    away = Corpus("away", corpus.train, {**corpus.valid, "y": np.zeros(5, np.float32)})
    settings = dataclasses.replace(SETTINGS, trials=1, learning_rates=(0.01, 0.01))
    found = prefinetune(Linear(), START, away, settings, seed=0)
    losses = [epoch["valid_loss"] for epoch in found.record["epochs"]]
    assert found.record["best_epoch"] == 1 + int(np.argmin(losses)) < 3
    assert _loss(flat(found.params), away.valid) == pytest.approx(min(losses), rel=1e-4)
    np.testing.assert_array_equal(flat(START), np.zeros(4))


def test_equal_seeds_give_equal_bits_and_progress_counts_every_epoch(monkeypatch):
    calls = []
    monkeypatch.setattr(Progress, "update", lambda _, *call: calls.append(call))

    def tuned(seed):
        return flat(prefinetune(Linear(), START, _corpus(), SETTINGS, seed=seed).params)

    runs = [tuned(seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.any(runs[0] != runs[2])
    epochs = SETTINGS.trials + SETTINGS.epochs - 1
    assert [done for done, _ in calls[:epochs]] == list(range(1, epochs + 1))
    losses = [float(values["public loss"]) for _, values in calls[:epochs]]
    assert losses == sorted(losses, reverse=True)


def test_rates_are_log_uniform_between_the_ends():
    settings = dataclasses.replace(SETTINGS, trials=4_000, learning_rates=(1e-3, 10.0))
    logarithms = np.log10(learning_rates(settings, 0))
    assert -3 <= logarithms.min() < -2.9
    assert 0.9 < logarithms.max() <= 1
    # Mean -1, standard error 4 / sqrt(12 * 4000) = 0.018.
    assert abs(logarithms.mean() + 1) < 0.08
    assert learning_rates(SETTINGS, 0) == learning_rates(SETTINGS, 0)


def test_a_diverged_trial_loses_and_if_all_diverge_it_is_said():
    some = dataclasses.replace(SETTINGS, trials=6, learning_rates=(1e-2, 1e12))
    found = prefinetune(Linear(), START, _corpus(400, 5), some, seed=0)
    assert not all(np.isfinite(trial["valid_loss"]) for trial in found.record["trials"])
    assert np.all(np.isfinite(flat(found.params)))
    every = dataclasses.replace(SETTINGS, learning_rates=(1e12, 1e13))
    refusal(lambda: prefinetune(Linear(), START, _corpus(400, 5), every, seed=0), "'toy'")
