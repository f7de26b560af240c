"""What is shown was charged and recorded before, whatever fails afterwards and is asked again."""

import shutil
from itertools import pairwise
from pathlib import Path

import dp_accounting
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.algorithms import Algorithm
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.federated import Releaser, RunSecret
from jaxpfl.federated.release import identity
from jaxpfl.privacy import AdaptiveClip, Budget, Clip, Cyclic, Ledger, Noise
from jaxpfl.privacy.chain import Chain
from tests.experiments.crashes import stopped
from tests.federated.releases import (
    CLIENTS,
    SIGMA,
    ask,
    half_of_it,
    held_vector,
    plan,
    population,
    query,
    require_independent_noise,
)

HALF = plan(taken=CLIENTS // 2)


def test_k_broadcasts_are_k_charges_and_each_is_one_value(ledger_path):
    """Each has a cohort of its own, so that each is amplified; asked again, it is free."""
    broadcasts = [1e-6 * number for number in range(4)]
    values = [ask(ledger_path, query(of=HALF), broadcast=each)[0] for each in broadcasts]
    for first, second in pairwise(values):
        require_independent_noise(first, second)
    again = [ask(ledger_path, query(of=HALF), broadcast=each) for each in broadcasts]
    for value, (replayed, charges) in zip(values, again, strict=True):
        np.testing.assert_array_equal(replayed, value)
        assert [charge.event for charge in charges] == [HALF.charge_event()] * 4


def test_another_clip_norm_is_another_release(ledger_path):
    """At one clip norm and another, the same cohort would be seen twice."""
    asked = query(of=plan(noise=Noise(1.0), clip=Clip(1.0, adaptive=AdaptiveClip())))
    with Ledger(ledger_path, population()) as ledger:
        releaser = Releaser(population(), ledger, RunSecret.reproducible(7), run="run")
        values = [
            np.asarray(releaser.release(asked, jnp.float32(0), round=1, clip_norm=bound).value)
            for bound in map(jnp.float32, (1.0, 1.5, 1.0))
        ]
        charges = ledger.charges
    assert [charge.event for charge in charges] == [asked.plan.charge_event()] * 2
    assert not any("again" in charge.label for charge in charges)
    np.testing.assert_array_equal(values[0], values[2])
    assert not np.array_equal(values[0], values[1])


def failing_algorithm(asked, seen, fails):
    """Shows each release as it goes, and fails behind it while `fails` holds something."""

    def step(state, release, round):
        broadcast, error = fails.pop(0) if fails else (jnp.float32(0), None)
        value = release(asked, broadcast).value
        seen.append(np.asarray(value))
        if error is not None:
            raise error
        return state + jnp.sum(value), {}

    return Algorithm("own", lambda key: jnp.float32(0), step, (asked,))


def attempts(asked, folder, fails, seen, **settings):
    """Runs until nothing is left to fail: how each ended, and the charges after it."""
    given = dict(ledger=folder / "ledger.jsonl", out=folder / "run", **settings)
    while fails:
        with pytest.raises((RuntimeError, KeyboardInterrupt, BudgetExhausted)) as ended:
            algorithm = failing_algorithm(asked, seen, fails)
            jp.run(algorithm, population(), resume=given["out"].exists(), **given)
        yield ended.type, len(Ledger.read(given["ledger"]).charges)
    if "budget" not in settings:
        jp.run(failing_algorithm(asked, seen, fails), population(), resume=True, **given)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_fails_behind_its_release_has_paid_for_it(error, tmp_path):
    """Who debugs behind `release(...)` with other broadcasts pays for what they saw."""
    asked, seen = query(of=plan(rounds=1, taken=CLIENTS // 2)), []
    fails = [(jnp.float32(1e-6 * number), error) for number in (0, 1, 1, 2)]
    paid = list(attempts(asked, tmp_path, fails, seen))
    assert paid == [(type(error), charges) for charges in (1, 2, 2, 3)]
    np.testing.assert_array_equal(seen[1], seen[2])
    # At last the first broadcast once more, whose release was paid for.
    np.testing.assert_array_equal(seen[4], seen[0])
    assert len(Ledger.read(tmp_path / "ledger.jsonl").charges) == 3


def test_a_budget_of_one_release_shows_one_value(tmp_path):
    asked, seen = query(of=plan(rounds=1)), []
    fails = [(jnp.float32(1e-6 * number), RuntimeError("a bug")) for number in range(5)]
    budget = Budget(asked.plan.epsilon() * 1.001, 1e-6)
    paid = list(attempts(asked, tmp_path, fails, seen, budget=budget))
    assert paid == [(RuntimeError, 1)] + [(BudgetExhausted, 1)] * 4
    assert len(seen) == 1


@pytest.mark.parametrize("part", ["privacy/mechanisms.py", "federated/release/door.py"])
def test_other_code_has_another_identity(part, tmp_path):
    """TRUST 22: an update between two versions may draw other noise for the same sum."""
    package = Path(jp.__file__).parent
    for copy in (tmp_path / "same", tmp_path / "other"):
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / part).open("a") as file:
        file.write("\n")
    assert identity.environment()["code"] == identity.code(tmp_path / "same")
    assert identity.environment()["code"] != identity.code(tmp_path / "other")


def test_a_release_that_is_not_recorded_is_not_shown_and_its_replay_is_free(
    ledger_path, monkeypatch
):
    """Whatever its sum is: nobody saw another one."""
    record = Ledger.record

    def full(self, identity, release):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Ledger, "record", full)
    monkeypatch.setattr(identity, "described", lambda *_: "always the same")
    with pytest.raises(OSError, match="No space left"):
        ask(ledger_path)
    monkeypatch.setattr(Ledger, "record", record)
    _, charges = ask(ledger_path, query(half_of_it))
    assert len(charges) == 1


def test_another_sum_of_one_identity_is_charged_before_it_is_shown(ledger_path, monkeypatch):
    """For an unknown reason, here of code that no identity knows: on the SAME secret cohort."""
    monkeypatch.setattr(identity, "described", lambda *_: "always the same")
    first, charges = ask(ledger_path, query(of=HALF))
    spent = Ledger.read(ledger_path).spent(1e-6)
    with pytest.raises(BudgetExhausted):
        ask(ledger_path, query(half_of_it, of=HALF), budget=Budget(spent * 1.001, 1e-6))
    assert len(Ledger.read(ledger_path).charges) == len(charges) == 1
    second, _ = ask(ledger_path, query(half_of_it, of=HALF))
    require_independent_noise(first, second)
    for function, value in ((held_vector, first), (half_of_it, second)):
        again, charges = ask(ledger_path, query(function, of=HALF))
        np.testing.assert_array_equal(again, value)
        assert [charge.event for charge in charges] == [
            HALF.charge_event(),
            dp_accounting.GaussianDpEvent(SIGMA),
        ]


def test_each_of_several_sums_of_one_identity_is_charged_once(ledger_path, monkeypatch):
    """TRUST 34: the first is the round itself, each other one a second release."""
    monkeypatch.setattr(identity, "described", lambda *_: "always the same")

    def scaled(factor):
        return lambda *given: jnp.float32(factor) * held_vector(*given)

    functions = [scaled(factor) for factor in (1.0, 0.5, 0.25)]
    for function in [*functions, *functions]:
        _, charges = ask(ledger_path, query(function))
    assert len({charge.identity for charge in charges}) == len(charges) == 3


def test_a_round_of_an_epoch_is_for_one_question(ledger_path):
    """Its cohort and its charge are the epoch's: another broadcast would be seen for nothing."""
    asked = query(of=plan(8, participation=Cyclic(CLIENTS, CLIENTS // 4)))
    first, _ = ask(ledger_path, asked, round=2)
    with pytest.raises(InputError, match="already asked in round 2 with another broadcast"):
        ask(ledger_path, asked, round=2, broadcast=1e-6)
    again, charges = ask(ledger_path, asked, round=2)
    np.testing.assert_array_equal(again, first)
    ask(ledger_path, asked, round=3, broadcast=1e-6)
    assert len(charges) == 1


def test_a_broadcast_is_copied_before_it_is_named(ledger_path):
    """A NumPy array that is changed in place is another broadcast, and the old one the old one."""
    asked, broadcast = query(of=HALF), np.zeros((), np.float32)
    with Ledger(ledger_path, population()) as ledger:
        releaser = Releaser(population(), ledger, RunSecret.reproducible(7), run="run")
        values = []
        for value in (0.0, 1e-6, 0.0):
            broadcast[...] = value
            values.append(np.asarray(releaser.release(asked, broadcast, round=1).value))
        assert len(ledger.charges) == 2
    np.testing.assert_array_equal(values[0], values[2])
    require_independent_noise(values[0], values[1])


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("line", range(2, 7))
def test_a_run_that_ends_around_any_line_of_its_ledger_pays_for_what_was_shown(
    line, after, tmp_path
):
    """Two rounds are two charges, wherever it ended; who then asks something else pays for that.

    `faults/test_resume.py` and `tools/kills.py` kill processes, in which nothing can be caught."""
    asked = query(of=plan(rounds=2, taken=CLIENTS // 2))
    for then in (0.0, 0.25):
        seen, folder = [], tmp_path / str(then)
        given = dict(ledger=folder / "ledger.jsonl", out=folder / "run")
        with stopped(Chain, "append", line, after=after):
            jp.run(failing_algorithm(asked, seen, []), population(), **given)
        fails = [(jnp.float32(then), None)] * 2
        jp.run(failing_algorithm(asked, seen, fails), population(), resume=True, **given)
        charges = len(Ledger.read(given["ledger"]).charges)
        shown = len({value.tobytes() for value in seen})
        assert shown == charges == 2 if then == 0 else shown <= charges <= 4
    # Its first line and those of two rounds: there is none that it was not ended at.
    assert len(Chain.read(tmp_path / "0.0/ledger.jsonl").lines) == 6
