"""What the study of synthetic text says that it cost, alone and on a ledger with others."""

import json

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from jaxpfl.algorithms.fred import FredPlan, private_moments
from jaxpfl.cli import main
from jaxpfl.errors import BudgetExhausted
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_yaml
from jaxpfl.experiments.systems.synthetic_text.study import prepare
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import RunSecret
from jaxpfl.text.embed import embed, embedder


@pytest.mark.long
def test_fred_popri_and_fed_avg_on_the_same_clients_have_one_epsilon(synthetic_config, tmp_path):
    """TRUST 29: one ledger composes all three, and forgetting any of them gives less."""
    path = tmp_path / "shared.jsonl"
    shared = ("--privacy.ledger", str(path), "--privacy.budget_epsilon", "30")
    study = prepare(synthetic_config("popri", *shared))
    fred = FredPlan.calibrated(epsilon=2.0, delta=1e-3, unit="client", max_examples=4)
    embedded = embed(study.clients, embedder("hashed:32"), progress=False)
    with Ledger(path, study.clients) as ledger:
        private_moments(embedded, fred, ledger=ledger, secret=RunSecret(), run="fred")
    scores = carry_out.run(synthetic_config("popri", *shared), tmp_path / "popri", progress=False)
    rounds = carry_out.run(
        synthetic_config("fed_avg", *shared), tmp_path / "fed_avg", progress=False
    )
    assert not (tmp_path / "popri" / "ledger.jsonl").exists()
    labels = [charge.label for charge in Ledger.read(path).charges]
    assert labels[-4:] == ["popri"] * 2 + ["fed_avg"] * 2
    assert len(labels) > 4
    z = [outcome.record["plan"]["noise_multiplier"] for outcome in (scores, rounds)]
    # Neither says what it cost by itself and nothing more.
    assert "with everything else on its ledger" in scores.record["privacy"]
    assert "with everything else on its ledger" in rounds.record["privacy"]
    plan = study.plan

    def poisson(multiplier):
        gaussian = dp_accounting.GaussianDpEvent(multiplier)
        return dp_accounting.PoissonSampledDpEvent(plan.participation.sampling_rate, gaussian)

    events = [
        [fred.guarantee().event],
        [dp_accounting.SelfComposedDpEvent(poisson(z[0]), 2)],
        [dp_accounting.SelfComposedDpEvent(poisson(z[1]), 2)],
    ]

    def epsilon(parts):
        accountant = PLDAccountant()
        for part in parts:
            for event in part:
                accountant.compose(event)
        return accountant.get_epsilon(1e-3)

    spent = Ledger.read(path).spent(1e-3)
    assert spent == pytest.approx(epsilon(events), rel=1e-3)
    for left_out in range(3):
        rest = [part for number, part in enumerate(events) if number != left_out]
        assert epsilon(rest) < spent - 0.05
    # The ledger's own budget stops the next study before anybody is asked.
    tight = ("--privacy.ledger", str(path), "--privacy.budget_epsilon", f"{spent + 0.1}")
    with pytest.raises(BudgetExhausted):
        carry_out.run(synthetic_config("popri", *tight), tmp_path / "more", progress=False)
    assert len(Ledger.read(path).charges) == len(labels)


def test_without_privacy_everything_says_so(synthetic_config, tmp_path, monkeypatch):
    """TRUST 11: epsilon = infinity is asked for in writing and stamped on the page."""
    changes = ("--privacy.private", "false", "--training.rounds", "1")
    config = synthetic_config("popri")
    mapping = to_yaml(config).replace("epsilon: 8.0\n", "epsilon: null\n", 1)
    mapping = mapping.replace("delta: 0.001", "delta: null").replace(
        "private: true", "private: false"
    )
    path = tmp_path / "config.yaml"
    path.write_text(mapping)
    assert main(["run", str(path), "--out", str(tmp_path / "run"), *changes[2:]]) == 0
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["metrics"]["epsilon"] is None
    assert not record["private"]
    assert "NOT PRIVATE" in record["privacy"]
    assert "NOT PRIVATE" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "config.yaml").read_text().startswith("# NOT PRIVATE")


def test_a_run_with_reproducible_noise_is_not_called_private(synthetic_config, tmp_path):
    """TRUST 21: in the record as in the statement, so in a sweep's table too."""
    config = synthetic_config("popri", "--run.reproducible_noise", "True")
    record = carry_out.run(config, tmp_path / "out", progress=False).record
    assert record["private"] is False
    assert record["privacy"].startswith("NOT PRIVATE: the noise can be drawn again")
