"""A system that the package does not know: the one of docs/adding_a_system.md, to the letter."""

import json
import re
from pathlib import Path

import pytest

from jaxpfl import cli
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.dry_run import dry_run
from jaxpfl.privacy.ledger import Ledger
from tests.experiments.crashes import crashed_and_resumed

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_system.md"
BLOCK = r"```{}\n(.*?)```"


def _block(language: str) -> str:
    found = re.search(BLOCK.format(language), PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def config_path(tmp_path, monkeypatch) -> Path:
    """One folder, one line of the registry, and a config."""
    folder = tmp_path / "outside" / "private_mean"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(_block("python"))
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setitem(registry.SYSTEMS, "private_mean", "private_mean")
    path = tmp_path / "mean.yaml"
    path.write_text(_block("yaml"))
    return path


def test_it_takes_60_lines_and_is_run_charged_and_reported(config_path, tmp_path, capsys):
    assert 0 < len(_block("python").splitlines()) <= 60
    out = tmp_path / "out"
    assert cli.main(["run", str(config_path), "--out", str(out)]) == 0
    assert "mean: " in capsys.readouterr().out
    record = json.loads((out / "result.json").read_text())
    assert (record["system"], record["private"], record["stamp"]) == ("private_mean", True, "")
    # The mean of the digits 0 to 9; the noise of the mean has standard deviation 2 * 9 / 60.
    assert 4.5 - 2 < record["metrics"]["mean"] < 4.5 + 2
    ledger = Ledger.read(out / "ledger.jsonl")
    assert len(ledger) == 1
    assert f"epsilon = {ledger.spent(1e-3):.3g}"[:12] in record["privacy"]
    stated = dry_run(registry.load(config_path))["privacy"]["mean"]["epsilon"]
    assert stated == pytest.approx(record["metrics"]["epsilon"])
    page = (out / "report.html").read_text()
    assert f"{record['metrics']['mean']:.3g}" in page
    (out / "report.html").unlink()
    assert cli.main(["report", str(out)]) == 0
    assert (out / "report.html").read_text() == page


def test_killed_anywhere_it_ends_alike_at_one_charge(config_path, tmp_path):
    """TRUST 33."""
    config = registry.load(config_path, ["--run.reproducible_noise", "true"])
    straight = carry_out.run(config, tmp_path / "straight", progress=False).record
    out = tmp_path / "out"
    resumed = crashed_and_resumed(config, out, at=(1, 1))
    assert resumed["metrics"]["mean"] == straight["metrics"]["mean"]
    assert len(Ledger.read(out / "ledger.jsonl")) == 1
    assert "NOT PRIVATE" in (out / "report.html").read_text()


def test_a_sweep_over_it(config_path, tmp_path, capsys):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("{base: mean.yaml, metric: mean, grid: {privacy.noise_multiplier: [1, 2]}}")
    out = tmp_path / "sweep"
    assert cli.main(["sweep", str(sweep), "--out", str(out)]) == 0
    record = json.loads((out / "sweep.json").read_text())
    assert [row["privacy.noise_multiplier"] for row in record["rows"]] == [1.0, 2.0]
    assert all(point["private"] for point in record["points"])
    assert (out / "report.html").exists()
    cases = ", cases: {a: {privacy.ledger: shared.jsonl}, b: {}}}"
    sweep.write_text(sweep.read_text().removesuffix("}") + cases)
    assert cli.main(["sweep", str(sweep), "--out", str(tmp_path / "other")]) == 2
    assert "privacy.ledger" in capsys.readouterr().err
