"""`jaxpfl.run` carries out every system from start to finish, and goes on after a crash."""

import json

import pytest

import jaxpfl as jp
from jaxpfl.privacy import Guarantee, Ledger, events
from tests.algorithms.systems import every_system
from tests.trees import assert_same

# Many programs to compile; their studies' tests crash, too.
every = every_system("fed_avg_gan", "popri", "private_evolution")


@every
def test_a_crashed_run_goes_on_to_the_same_bits_and_each_round_is_charged_once(system, tmp_path):
    """TRUST 33: the last round's releases were made and charged, and then the process broke."""

    def run(name, algorithm=None, **settings):
        made, clients = system()
        return jp.run(
            algorithm or made,
            clients,
            ledger=tmp_path / name / "ledger.jsonl",
            out=tmp_path / name,
            every=1,
            # So that two runs can be compared.
            seed=jp.privacy.ReproducibleSeed(0),
            **settings,
        )

    straight = run("straight")
    algorithm = system()[0]

    def crashing(state, release, round):
        found = algorithm.step(state, release, round)
        if round == algorithm.rounds:
            raise RuntimeError("crash")
        return found

    with pytest.raises(RuntimeError, match="crash"):
        run("broken", algorithm._replace(step=crashing))
    with Ledger.read(tmp_path / "broken" / "ledger.jsonl") as broken:
        assert len(broken) == algorithm.rounds * len(algorithm.queries)
    resumed = run("broken", resume=True)

    assert_same((resumed.state, resumed.params), (straight.state, straight.params))
    assert (resumed.params is None) == (algorithm.params is None)
    for name in ("metrics.jsonl", "result.json"):
        found, expected = (tmp_path / each / name for each in ("broken", "straight"))
        assert found.read_bytes() == expected.read_bytes()
    ledgers = [Ledger.read(tmp_path / name / "ledger.jsonl") for name in ("broken", "straight")]
    assert ledgers[0].charges == ledgers[1].charges
    charged = Guarantee.of_events([charge.event for charge in ledgers[0].charges], 1e-3, "client")
    assert events.counts(charged.event) == events.counts(algorithm.event())
    # A finished run has no secret left, and its directory can be looked at again without one.
    assert not (tmp_path / "broken" / "private" / "secret.json").exists()
    assert_same(run("broken", resume=True).state, straight.state)


@every
def test_a_private_run_states_what_its_ledger_was_charged_with(system, tmp_path):
    algorithm, clients = system()
    ledger = tmp_path / "ledger.jsonl"
    result = jp.run(algorithm, clients, ledger=ledger, out=tmp_path)
    charges = Ledger.read(ledger).charges
    assert len(charges) == algorithm.rounds * len(algorithm.queries)
    plan = algorithm.queries[0].plan
    whole = Guarantee.of_events([algorithm.event()], plan.delta, plan.unit, plan.accountant)
    assert result.metrics["epsilon"] == pytest.approx(whole.epsilon())
    assert result.privacy.startswith(whole.statement())
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["statement"] == whole.statement()
    assert {charge.run for charge in charges} == {run["run"]}
    page = (tmp_path / "report.html").read_text()
    assert result.privacy in page and algorithm.name in page
    # A second run, on the same ledger: nothing of it is the first one's.
    other = jp.run(algorithm, clients, ledger=ledger, out=tmp_path / "other")
    assert len(Ledger.read(ledger)) == 2 * len(charges)
    assert "with everything else on its ledger" in other.privacy
