"""`jaxpfl audit`: every release of a config, on canaries; an exit code where a bound exceeds."""

import json
from pathlib import Path

import pytest

from jaxpfl import cli
from jaxpfl.experiments import audit as audit_module
from jaxpfl.experiments import registry
from jaxpfl.experiments.audit import AuditSettings, audit
from jaxpfl.experiments.report.page import Page, write_page
from jaxpfl.privacy import Guarantee
from jaxpfl.privacy.accounting import rounded_up
from jaxpfl.privacy.auditing import Bound
from tests.experiments import test_dry_run
from tests.refusals import refusal

TINY = test_dry_run.TINY.replace("clients: 5000", "clients: 500").replace("1.0e-5", "1.0e-4")
TINY = TINY.replace("clients_per_round: 16", "clients_per_round: 100")
FRED = """\
prefinetune: {epochs: 1}
fred:
  candidates: {numpy: "docstrings:numpy", rich: "docstrings:rich"}
  embedder: hashed:8
  epsilon: 1.0
  delta: 1.0e-4
"""
FEW = AuditSettings(canaries=60, runs=2, rounds=2)
NOVA = "algorithm: {name: fed_nova}, rounds: 3"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_the_command_prints_a_table_and_writes_a_record_that_a_runs_page_shows(
    tiny, tmp_path, capsys
):
    page = Page("a run", "", "", "private", privacy_notes=[], facts=[], sections=[])
    html = write_page(tmp_path, page)
    assert "What an audit shows" not in html.read_text()
    html.unlink()
    given = ["audit", str(tiny), "--canaries", "400", "--runs", "2", "--rounds", "2"]
    assert cli.main([*given, "--run.devices", "2", "--out", "audit.json"]) == 0
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed and "2 of 3" in printed
    record = json.loads((tmp_path / "audit.json").read_text())
    (found,) = record["releases"].values()
    config = registry.load(tiny)
    (release,) = registry.system_of(config.system).describe(config).releases.values()
    assert release.questions is None
    # The ledger's, of the rounds that were played.
    assert found["epsilon"] == pytest.approx(release.plans[0].epsilon(2), rel=1e-6)
    assert 0 <= found["bound"] <= found["epsilon"]
    assert found["trials"] == 800 and not record["exceeded"]
    # Nothing else is left, and no ledger of the user's is there.
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "audit.json"}
    _, shown = write_page(tmp_path, page).read_text().split("What an audit shows")
    assert f">{rounded_up(found['epsilon'])}<" in shown and f">{found['bound']:.4g}<" in shown


def test_a_bound_that_exceeds_its_epsilon_has_an_exit_code(tiny, capsys, monkeypatch):
    def refuted(trials, stated, confidence):
        return Bound(2 * stated.epsilon(), 400, confidence)

    monkeypatch.setattr(audit_module, "lower_bound", refuted)
    given = ["audit", str(tiny), "--canaries", "10", "--runs", "1", "--run.devices", "2"]
    assert cli.main(given) == 5
    assert "EXCEEDS IT" in capsys.readouterr().out


def test_every_release_of_a_config_is_audited_by_the_plans_that_it_costs(tiny):
    """And its client function is asked, of an algorithm that is not plain FedAvg."""
    text = TINY.replace('"docstrings:numpy"', "null").replace("rounds: 3", NOVA)
    tiny.write_text(text + FRED)
    config = registry.load(tiny)
    releases = registry.system_of(config.system).describe(config).releases
    assert releases["rounds"].questions is not None
    for release in releases.values():
        events = [plan.event() for plan in release.plans]
        assert Guarantee.of_events(events, 1e-4).epsilon() == release.guarantee.epsilon()
    # FreD's second moments have the square of their number of coordinates.
    record = audit(config, FEW, progress=False)
    assert set(record["releases"]) == {"FreD", "rounds"} and not record["exceeded"]
    assert record["releases"]["rounds"]["trials"] == 120


def test_a_config_without_privacy_is_refused(tiny):
    overrides = ["--privacy.private=false", "--privacy.noise_multiplier=null"]
    config = registry.load(tiny, [*overrides, "--privacy.delta=null"])
    refusal(lambda: audit(config, FEW, progress=False), "no epsilon to audit")
