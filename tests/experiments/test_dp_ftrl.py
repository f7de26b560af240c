"""DP-FTRL as a run: FedAvg with correlated noise, charged once an epoch, resumed to the bit."""

import json

import optax
import pytest

import jaxpfl as jp
from jaxpfl.experiments.engine.build import build_plan, with_strategy
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.experiments.registry import load
from jaxpfl.federated.release import identity, prepared_query
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.strategies import BufferedToeplitz
from tests.algorithms.systems import CLIENT, SERVER, Linear, numbers
from tests.experiments import conftest as studies
from tests.faults.runs import in_round
from tests.plans import flat_plan
from tests.refusals import refusal
from tests.trees import assert_same


def algorithm(noise, client=None):
    """Epochs of three rounds."""
    own = {"sampling": "min_separation", "separation": 3} if noise in ("blt", "tree") else {}
    plan = flat_plan(
        population=12, clients_per_round=4, rounds=7, clip_norm=0.3, noise_multiplier=1.5,
        delta=1e-3, noise=noise, **{"sampling": "cyclic"} | own,
    )  # fmt: skip
    settings = dict(client=client or CLIENT, server=SERVER, plan=plan)
    cohort = jp.CohortSpec(4, 4, clients_per_bucket=4)
    return jp.algorithms.fed_avg(Linear(), **settings, cohort=cohort)


def run(folder, name, made, **more):
    """A run of digits' clients in the folder `name`, on a ledger of its own."""
    held = {"ledger": folder / f"{name}.jsonl", "out": folder / name}
    return jp.run(made, numbers(12), **held, **more)


# A run whose noise can be drawn again.
SEEDED = {"seed": jp.privacy.ReproducibleSeed(0), "every": 2}


def _charged(path):
    return [(charge.round, charge.label) for charge in Ledger.read(path).charges]


@pytest.mark.parametrize("noise", ["banded", "blt"])
def test_run_charges_an_epoch_at_its_first_round_and_begins_none_that_cannot_be_paid(
    tmp_path, noise
):
    """TRUST 30: two epochs fit, the third does not; six rounds were run."""
    made = algorithm(noise)
    plan = made.queries[0].plan
    result = run(tmp_path, "run", made)
    assert _charged(tmp_path / "run.jsonl") == [(1, "fed_avg"), (4, "fed_avg"), (7, "fed_avg")]
    ledger = Ledger.read(tmp_path / "run.jsonl")
    assert {repr(charge.event) for charge in ledger.charges} == {repr(plan.charge_event())}
    assert ledger.spent(1e-3) == pytest.approx(plan.epsilon(), rel=1e-9)
    assert (result.rounds, result.metrics["epsilon"]) == (7, pytest.approx(plan.epsilon()))
    budget = jp.Budget(0.5 * (plan.epsilon(6) + plan.epsilon(7)), 1e-3)
    with pytest.raises(jp.BudgetExhausted):
        run(tmp_path, "short", made, budget=budget)
    assert json.loads((tmp_path / "short" / "result.json").read_text())["rounds"] == 6


@pytest.fixture
def begun(tmp_path):
    """Runs up to a crash within round 5, the second of its epoch; returns what goes on."""

    def to_round_5(noise):
        def go_on(client=None, resume=True):
            return run(tmp_path, "parts", algorithm(noise, client), **SEEDED, resume=resume)

        with in_round(5):
            go_on(resume=False)
        return go_on

    return to_round_5


@pytest.mark.parametrize(
    "noise", ["banded", "exact_banded", "blt", pytest.param("tree", marks=pytest.mark.long)]
)
def test_correlated_noise_goes_on_only_where_it_began(tmp_path, monkeypatch, begun, noise):
    """TRUST 33: it is made again by address; with anything else changed it is refused."""
    go_on = begun(noise)
    before = _charged(tmp_path / "parts.jsonl")
    assert before == [(1, "fed_avg"), (4, "fed_avg")]
    for name, value in (
        ("devices", ["another"]),
        ("flags", {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}),
        ("versions", {"jaxlib": "0.0.0"}),
    ):
        with monkeypatch.context() as patched:
            changed = {**identity.environment(), name: value}
            patched.setattr(identity, "environment", lambda changed=changed: changed)
            refusal(go_on, "must be those of its first round")
    refusal(lambda: go_on(optax.sgd(0.2)), "must be those of its first round")
    assert _charged(tmp_path / "parts.jsonl") == before
    again = go_on()
    whole = run(tmp_path, "whole", algorithm(noise), **SEEDED)
    assert_same(whole.params, again.params)
    parts, straight = (Ledger.read(tmp_path / f"{name}.jsonl") for name in ("parts", "whole"))
    assert parts.charges == straight.charges


def test_a_replayed_sum_that_differs_is_refused_where_rounds_share_noise(
    tmp_path, monkeypatch, begun
):
    """TRUST 34: a second sum with the same noise would show their difference."""
    go_on = begun("banded")
    # Rounds 5 and 6 are released and recorded, and lost with the checkpoint after them.
    real = prepared_query.Cohort
    with monkeypatch.context() as patched, in_round(7):
        patched.setattr(Checkpoints, "save", lambda *_, **__: None)
        go_on()
    written = (tmp_path / "parts" / "metrics.jsonl").read_text()

    def one_client_less(held, chosen, *arguments, round, **options):
        return real(held, chosen[1:], *arguments, round=round, **options)

    with monkeypatch.context() as patched:
        patched.setattr(prepared_query, "Cohort", one_client_less)
        refusal(go_on, "second release would reveal it")
    assert (tmp_path / "parts" / "metrics.jsonl").read_text() == written
    assert go_on().rounds == 7


def test_with_independent_noise_a_change_costs_the_whole_epoch_again(tmp_path, begun):
    """Another client function goes on, and who takes part is drawn anew: one more Gaussian."""
    begun("independent")(optax.sgd(0.2))
    # Rounds 5, 6 of the second epoch, and the third: charged under another identity.
    assert [round for round, _ in _charged(tmp_path / "parts.jsonl")] == [1, 4, 4, 7]
    plan = algorithm("independent").queries[0].plan
    spent = Ledger.read(tmp_path / "parts.jsonl")
    assert {repr(charge.event) for charge in spent.charges} == {repr(plan.charge_event())}
    assert spent.spent(1e-3) > plan.epsilon() * 1.05


def test_a_config_is_written_with_the_coefficients_of_its_noise(tmp_path):
    """And resumed with those: what another version finds does not count."""
    overrides = ["--privacy.sampling", "min_separation", "--privacy.separation", "2"]
    studies.write_lines(tmp_path / "public.jsonl", studies.NEAR, 40, 5)
    path = tmp_path / "config.yaml"
    path.write_text(studies.TINY.format(folder=tmp_path, method="fed_avg"))
    config = load(path, [*overrides, "--privacy.noise", "blt"])
    found = with_strategy(config)
    rounds = config.training.rounds
    assert config.privacy.blt is None
    assert found.privacy.blt == BufferedToeplitz.best(rounds, 2)
    own = BufferedToeplitz((0.5,), (0.25,))
    kept = load(path, [*overrides, "--privacy.noise", "blt", "--privacy.blt.decays", "[0.5]",
                       "--privacy.blt.scales", "[0.25]"])  # fmt: skip
    assert with_strategy(kept) == kept and kept.privacy.blt == own
    plan = build_plan(kept.privacy, kept.training, 60)
    assert plan.noise.blt == own
