"""A run with the noise of a larger population says so wherever it says anything of privacy."""

import json
import re

import pytest
import yaml

from jaxpfl.experiments import carry_out
from jaxpfl.experiments.dry_run import dry_run
from jaxpfl.experiments.registry import load
from jaxpfl.privacy.ledger import Ledger
from tests.experiments.statements import of_lines, of_page, of_record
from tests.experiments.sweep.three_points import BASE
from tests.experiments.test_statements import DATA_SETS
from tests.refusals import refusal

LABEL = (
    "SIMULATED: noise of 10 clients scaled as if 100 of 10,000 took part; no guarantee for "
    "these clients' data"
)
SIMULATED = {"population": 10_000, "clients_per_round": 100, "delta": 1.0e-5}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.yaml"

    def written(**changes):
        path.write_text(yaml.safe_dump({**BASE, "simulated": SIMULATED, **changes}))
        return load(path)

    return written


@pytest.mark.long
def test_every_statement_of_a_simulated_run_has_the_label_and_both_epsilons(config, tmp_path):
    outcome = carry_out.run(config(), tmp_path / "run", progress=False)
    out = outcome.out
    result = json.loads((out / "result.json").read_text())
    statement = result["privacy"]
    assert statement.startswith(f"{LABEL}; the larger population would have (epsilon = 8")
    assert not result["private"]
    spent = Ledger.read(out / "ledger.jsonl").spent(1e-3)
    assert spent > 20
    assert result["epsilons"]["this run"] == pytest.approx(spent)
    _, second, *_ = re.findall(r"epsilon = ([\d.e+]+)", statement)
    assert float(second) == pytest.approx(spent, rel=0.01)
    page = (out / "report.html").read_text()
    said = {
        "config.yaml": (out / "config.yaml").read_text().splitlines()[0],
        "run.json": json.loads((out / "run.json").read_text())["stamp"],
        "terminal": "\n".join(outcome.lines),
        "report.html": page.replace("&#x27;", "'").replace("&#39;", "'"),
    }
    for name, text in said.items():
        assert LABEL in text, name
    assert all("(SIMULATED)" in c.label for c in Ledger.read(out / "ledger.jsonl").charges)
    assert of_record(result) == []
    assert of_page(page, DATA_SETS) == of_lines(outcome.lines, DATA_SETS) == []


DATA = {**BASE["data"], "clients": 60}


def test_a_dry_run_says_that_the_noise_is_simulated(config):
    assert LABEL in json.dumps(dry_run(config(data=DATA))).replace("\\u2019", "'")


BANDED = {**BASE["privacy"], "sampling": "cyclic", "noise": "banded"}
REFUSED = [
    ({"simulated": {**SIMULATED, "clients_per_round": 4}}, "clients_per_round must be at least"),
    ({"simulated": {**SIMULATED, "delta": 0}}, "simulated.delta"),
    ({"privacy": {"private": False}}, "simulated must be absent where privacy.private"),
    ({"privacy": BANDED}, "cannot be simulated by fewer clients"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_a_config_that_cannot_be_simulated_is_refused(config, changes, words):
    refusal(lambda: dry_run(config(data=DATA, **changes)), words)
