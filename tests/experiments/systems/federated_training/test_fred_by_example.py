"""FreD for examples in a run: a ledger of its own, beside that of the rounds for clients."""

import json

import dp_accounting
import pytest

from jaxpfl import cli
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.dry_run import dry_run
from jaxpfl.experiments.export import export
from jaxpfl.privacy import verify
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.verify import digest_of
from tests.experiments.ledgers import certified

EXAMPLE = [
    *("--fred.unit", "example", "--prefinetune.other_candidates", "false"),
    *("--privacy.private", "false", "--privacy.epsilon", "null"),
    *("--privacy.delta", "null", "--fred.delta", "1e-3"),
]


@pytest.fixture
def carried_out(pipeline_config, tmp_path):
    def carry(*more):
        config = registry.load(pipeline_config, [*EXAMPLE, *more])
        return carry_out.run(config, tmp_path / "run", progress=False)

    return carry


def test_each_ledger_has_its_unit_and_its_epsilon(carried_out, tmp_path):
    """TRUST 29: guarantees for clients and for examples have no common epsilon."""
    outcome = carried_out()
    apart = Ledger.read(outcome.out / "runs" / "FreD" / "ledger.jsonl")
    rounds = Ledger.read(outcome.out / "ledger.jsonl")
    assert (apart.unit, rounds.unit) == ("example", "client")
    assert apart.spent(1e-3) == pytest.approx(4.0, rel=1e-3)
    assert {charge.label for charge in rounds.charges} == {"fed_avg"}
    # The number of examples is declared public: no release of it is charged.
    assert len(apart.charges) == 2
    assert apart.recorded_budget.epsilon == pytest.approx(4.0, rel=1e-4)
    own, besides = outcome.record["privacy"].split("FreD's release, on a ledger of its own: ")
    assert own.startswith("NOT PRIVATE") and "unit = client" in own
    assert "epsilon = 4," in besides and "unit = example" in besides
    assert outcome.record["stamp"].startswith("NOT PRIVATE")
    assert "no part of the privacy stated above" in (outcome.out / "report.html").read_text()
    assert certified(outcome.out).count("ledger.jsonl: fits") == 2
    assert set(outcome.record["metrics"]["fred"]) == {"far", "near", "mostly far"}
    # The client's epsilon is compared with the client's ledger, and not with FreD's.
    certificate = json.loads((outcome.out / "certificate.json").read_text())
    for unit, fits in (("example", True), ("client", False)):
        changed = certificate | {"statement": f"(epsilon = 4.1, delta = 0.001), unit = {unit}"}
        changed["seal"] = digest_of({k: v for k, v in changed.items() if k != "seal"})
        if fits:
            assert verify.check(changed)
        else:
            with pytest.raises(verify.Unfit, match="cheapest run costs inf"):
                verify.check(changed)
    again = carry_out.resume(outcome.out, progress=False)
    assert again.record["privacy"] == outcome.record["privacy"]
    export(outcome.out, tmp_path / "exported", progress=False)
    assert outcome.record["privacy"] in (tmp_path / "exported" / "README.md").read_text()


def test_algorithm_1_costs_what_it_realises_beside_rounds_without_privacy(carried_out):
    """Table 1 of the paper: a private choice, and rounds that are not private."""
    outcome = carried_out("--fred.mode", "paper")
    ledger = Ledger.read(outcome.out / "runs" / "FreD" / "ledger.jsonl")
    plan, fred = outcome.record["fred"]["plan"], outcome.record["fred"]
    precision = sum(z**-2 for z in plan["multipliers"][1:])
    exact = dp_accounting.get_epsilon_gaussian(precision**-0.5, 1e-3)
    assert ledger.spent(1e-3) == pytest.approx(exact, rel=2e-3)
    assert ledger.spent(1e-3) > 3 * 4.0
    assert "states 4 at delta 0.001; the numbers of examples and of" in fred["statement"]
    assert "adjacency = replace one example" in fred["statement"]
    assert fred["private"] and not fred["statement"].startswith("NOT PRIVATE")
    assert outcome.record["stamp"].startswith("NOT PRIVATE")
    assert fred["statement"] in outcome.record["privacy"]
    assert certified(outcome.out).count("ledger.jsonl: fits") == 2


def test_a_dry_run_says_that_it_assumes_the_examples(pipeline_config):
    known = ["--data.clients", "300", "--fred.mode", "paper", "--fred.delta", "1e-6"]
    config = registry.load(pipeline_config, [*EXAMPLE, *known])
    note = " ".join(dry_run(config)["notes"])
    assert "ASSUMED" in note and "states 4 at delta" in note


PRIVATE = [f"--privacy.{given}" for given in ("private=true", "epsilon=8", "delta=1e-3")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--fred.unit", "client", "--fred.mode", "paper"], "fred.unit: example"),
        (["--fred.epsilon", "null"], "go together"),
        (["--fred.unit", "client"], "but for fred.unit: example"),
        (PRIVATE, "privacy.private must be false"),
        (["--privacy.ledger", "shared.jsonl"], "privacy.ledger absent"),
    ],
)
def test_what_has_no_meaning_is_refused(pipeline_config, changes, message):
    with pytest.raises(InputError, match=message):
        registry.load(pipeline_config, [*EXAMPLE, *changes])


def test_the_command_prints_and_charges_what_algorithm_1_realises(
    pipeline_config, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, out = pipeline_config.parent, tmp_path / "fred"
    command = ["fred", "--private", folder / "clients.jsonl", "--candidates", folder / "near.jsonl"]
    command += [folder / "far.jsonl", "--epsilon", 4, "--delta", 1e-4, "--embedder", "hashed:8"]
    command += ["--mode", "paper", "--out", out]
    assert cli.main([*map(str, command)]) == 2
    assert "--unit example" in capsys.readouterr().err
    assert cli.main([*map(str, command), "--unit", "example"]) == 0
    spent = Ledger.read(out / "ledger.jsonl").spent(1e-4)
    record = json.loads((out / "fred.json").read_text())
    assert record["released_count"] == 900 and spent > 4 * 4.0
    for text in (capsys.readouterr().out, record["statement"]):
        assert "states 4 at delta 0.0001; the numbers of examples and of clients" in text
        assert "adjacency = replace one example" in text
        assert f"(epsilon = {spent:.4g}"[:14] in text
    assert certified(out).count("ledger.jsonl: fits") == 1
