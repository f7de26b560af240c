"""What the study of synthetic text says that it cost, alone and on a ledger with others."""

import json

from jaxpfl.cli import main
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_yaml


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
