"""DP-FTRL as a run: FedAvg with correlated noise, charged once an epoch, resumed to the bit."""

import json

import jax
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from jaxpfl.experiments import loop
from tests.plans import flat_plan


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    return jp.data.from_clients(
        {
            f"client {i}": {
                "image": rng.random((4, 6, 6, 1), np.float32),
                "label": rng.integers(0, 3, 4).astype(np.int32),
            }
            for i in range(12)
        }
    )


def algorithm(noise):
    plan = flat_plan(
        population=12,
        clients_per_round=4,
        rounds=7,
        clip_norm=0.3,
        noise_multiplier=1.5,
        delta=1e-3,
        sampling="epochs",
        noise=noise,
    )
    model = jp.models.classifier_cnn((6, 6, 1), 3)
    cohort = jp.CohortSpec(batch_size=4, max_examples=4, clients_per_bucket=4)
    return jp.algorithms.fed_avg(
        model, client=optax.sgd(0.1), server=optax.sgd(1.0), plan=plan, cohort=cohort
    )


@pytest.mark.parametrize("noise", ["tree", "banded"])
def test_run_charges_an_epoch_at_its_first_round(clients, tmp_path, noise):
    made = algorithm(noise)
    result = jp.run(made, clients, ledger=tmp_path / "ledger.jsonl", out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    kinds = [line["event"]["type"] for line in lines if "event" in line]
    assert kinds == ["gaussian", "none", "none", "gaussian", "none", "none", "gaussian"]
    ledger = jp.Ledger(tmp_path / "ledger.jsonl", clients.fingerprint)
    assert ledger.spent(1e-3) == pytest.approx(made.plan.epsilon(), rel=1e-9)
    ledger.close()
    assert result.rounds == 7
    assert result.metrics["epsilon"] == pytest.approx(made.plan.epsilon())


def test_a_round_of_an_epoch_that_cannot_be_paid_is_not_begun(clients, tmp_path):
    """TRUST 30: two epochs fit, the third does not; six rounds were run."""
    made = algorithm("tree")
    limit = 0.5 * (made.plan.epsilon(6) + made.plan.epsilon(7))
    with pytest.raises(jp.BudgetExhausted):
        jp.run(
            made,
            clients,
            ledger=tmp_path / "ledger.jsonl",
            out=tmp_path / "run",
            budget=jp.Budget(limit, 1e-3),
        )
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 6


def test_resumed_in_an_epoch_is_the_same_run(clients, tmp_path, monkeypatch):
    """TRUST 33: correlated noise is made again by address, not carried along."""

    class Stop(Exception):
        pass

    def run(name, step=None, resume=False):
        made = algorithm("banded")
        if step is not None:
            made = made._replace(step=step(made.step))
        return jp.run(
            made,
            clients,
            ledger=tmp_path / f"{name}.jsonl",
            out=tmp_path / name,
            reproducible_noise=True,
            checkpoint_every=2,
            resume=resume,
        )

    def stopping(step):
        calls = iter(range(100))

        def stopped(state, cohort, keys):
            if next(calls) == 4:
                raise Stop
            return step(state, cohort, keys)

        return stopped

    whole = run("whole")
    with pytest.raises(Stop):
        run("parts", step=stopping)
    # Rounds share their noise: they must all be computed alike.
    with monkeypatch.context() as patched:
        patched.setattr(loop, "environment", lambda: {"devices": ["another"]})
        with pytest.raises(InputError, match="goes on only where it began"):
            run("parts", resume=True)
    again = run("parts", resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)
