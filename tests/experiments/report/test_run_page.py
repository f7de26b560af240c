"""The page of one run, made of invented files."""

import pytest

from jaxpfl.experiments.report.page import page_html
from jaxpfl.experiments.report.run_page import RunFiles, run_page

START = {
    "label": "FedAvg", "population": "clients", "unit": "one client", "stamp": "",
    "statement": "(epsilon = 8)", "private": True, "config": {}, "queries": [], "captured": {},
    "versions": {}, "run": "a", "seed": 0, "devices": 1, "backend": "cpu", "evaluation": "tests",
    "plan": {"rounds": 1, "clients_per_round": 2, "population": 3, "unit": "client"},
}  # fmt: skip
SCORES = {"loss": 0.5, "perplexity": 1.649, "accuracy": 0.75, "count": 4.0}
UNTRAINED = {"loss": 0.4, "perplexity": 1.492, "accuracy": 0.5, "count": 4.0}
RECORDS = [{"round": 0, "evaluation": UNTRAINED}, {"round": 1, "evaluation": SCORES}]


@pytest.mark.parametrize("language", [True, False])
def test_perplexity_is_the_score_of_language_models_alone(tmp_path, language):
    rows = [{"model": "untrained", **UNTRAINED}, {"model": "this run", **SCORES}]
    table = [{"private": True, **row} for row in rows]
    result = {"table": table, "tested_on": "tests", "language": language, "privacy": "ours"}
    html = page_html(tmp_path, run_page(RunFiles(tmp_path, START, RECORDS, result)))
    metric, values = ("perplexity", "(1.492)") if language else ("loss", "(0.4)")
    assert f"worse than untrained {values}: {metric}" in html
    assert f">{metric}</th>" in html and f'alt="{metric.capitalize()} on tests"' in html
    assert ("erplexity" in html) == language
    assert 'data-value="this run, round 1: 0.5"' in html
