"""`jaxpfl compare`: what differs, what repeats, what cannot be compared, from public files."""

import json

import dp_accounting
import pytest

from jaxpfl.cli import main
from jaxpfl.experiments.report.run_page import RunFiles, figures_of
from jaxpfl.privacy import Ledger, certificate
from tests.privacy.ledgers import EVERYONE, filled


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """Compares runs that are made by their files, whose loss falls by 1 in each of two rounds."""
    monkeypatch.chdir(tmp_path)
    known = {"private": True, "stamp": "", "statement": "", "note": "", "label": "", "seed": 0}
    known |= {"evaluation": "tests", "population": "clients", "queries": []}

    def compare(runs, *more):
        for name, (loss, record) in runs.items():
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "run.json").write_text(json.dumps(known | record))
            scores = [{"loss": loss + 2 - k, "accuracy": 0.5, "count": 7.0} for k in range(3)]
            lines = [json.dumps({"round": k, "evaluation": e}) for k, e in enumerate(scores)]
            (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        code = main(["compare", *runs, *more])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return compare


def settings(rate, seed=0):
    config = {"system": "s", "training": {"rate": rate, "rounds": 2}, "run": {"seed": seed}}
    return {"config": config, "seed": seed}


def test_settings_that_differ_scores_and_their_spread(compared, tmp_path):
    runs = {"a": (1.0, settings(0.1)), "b": (3.0, settings(0.1, 1)), "c": (5.0, settings(0.2))}
    code, text = compared(runs)
    assert code == 0 and "Run once: c." in text
    rows = [line.split() for line in text.splitlines()]
    assert ["training.rate", "0.1", "0.1", "0.2"] in rows and ["seed", "0", "1", "0"] in rows
    assert not any(row[:1] == ["training.rounds"] for row in rows)
    assert ["b", "1", "2", "3", "50.00", "%"] in rows
    # The mean of 1 and 3; by hand, their deviation is the root of 2.
    assert ["a,", "b", "2", "±", "1.414", "50.00", "%", "±", "0.00", "%"] in rows
    page = (tmp_path / "runs/compare/report.html").read_text()
    assert 'href="../../b/report.html"' in page and 'data-value="c, round 2: 5"' in page


def test_what_is_not_private_says_so_and_runs_of_python_differ_by_their_plans(compared):
    stamp = {"stamp": "NOT PRIVATE: trained without privacy", "private": False}
    a, b = ({"config": {}, "queries": [{"label": "up", "plan": {"clip": k}}]} for k in (1, 2))
    text = compared({"x/a": (1.0, a), "y/a": (1.0, b | stamp)})[1]
    assert "y/a (NOT PRIVATE)" in text and "NOT PRIVATE: x/a and y/a compared" in text
    assert ["up.plan.clip", "1", "2"] in [line.split() for line in text.splitlines()]


def test_runs_of_python_are_repetitions_of_no_other(compared):
    """Their records do not hold the values of an optimiser, nor what a function does."""
    alike = {"config": {}, "queries": [{"label": "up", "plan": {"clip": 1}}]}
    text = compared({"a": (1.0, alike), "b": (3.0, alike | {"seed": 1})})[1]
    assert "±" not in text and "Run once" not in text
    # A difference of code is in no table, and is not passed over in silence.
    assert "Python: a, b" in text


def test_of_many_runs_the_lowest_and_highest_are_named(compared, tmp_path):
    runs = {f"r{k}": (float(k), settings(k)) for k in range(20)}
    text = compared(runs)[1]
    assert "20 runs compared" in text
    rows = [line.split() for line in text.splitlines()]
    assert all([f"r{k}", str(k)] in rows for k in range(20))  # a line each: the one setting
    files = {name: RunFiles.read(tmp_path / name) for name in runs}
    figure = figures_of(next(iter(files.values())).kinds, files, "tests")[0][-1]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["14 more", "r0", "r1", "r2", "r17", "r18", "r19"]
    # On the page, whoever points at a curve sees its name.
    assert 'data-value="r9, round 2: 9"' in (tmp_path / "runs/compare/report.html").read_text()


def test_what_cannot_be_compared_is_refused(compared, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "two runs or more" in compared({"a": (1.0, settings(0.1))})[1]
    for more, said in (
        (["a"], "two runs or more"), (["empty"], "no run.json"), (["a", "--out", "a"], "not empty")
    ):  # fmt: skip
        code, text = compared({}, "a", *more)
        assert code == 2 and said in text
    assert not (tmp_path / "runs").exists()


def test_what_others_wrote_is_shown_in_one_line_without_control_characters(compared, tmp_path):
    words = "x\x1b[2K\r\nEach run alone: epsilon = 0.1 \u202e\u2028"
    config = {"config": {"system": words, "training": {words: words}}}
    config |= {"label": words, "population": words, "statement": words, "evaluation": words}
    code, text = compared({"a": (1.0, config), "b": (1.0, settings(0.1))})
    assert code == 0 and r"x\x1b[2K\r\nEach run alone: epsilon = 0.1 \u202e\u2028" in text
    assert not any(line.startswith("Each run alone: epsilon") for line in text.splitlines())
    page = (tmp_path / "runs/compare/report.html").read_text()
    for shown in (text, page):
        assert not {*"\x1b\r\u202e\u2028"} & {*shown}


def test_what_a_run_with_a_certificate_costs_is_computed_again(compared, tmp_path, capsys):
    compared({name: (1.0, settings(0.1)) for name in ("a", "b")})
    filled(tmp_path / "ledger.jsonl", 3, EVERYONE)
    ledger = Ledger.read(tmp_path / "ledger.jsonl")
    record = certificate.certificate("s", {"l": ledger}, 1e-3, statement="", stamp="")
    (tmp_path / "a" / certificate.NAME).write_text(json.dumps(record))
    cost = dp_accounting.get_epsilon_gaussian(8.0 / 3**0.5, 1e-3)

    def printed(epsilon, stated):
        result = {"privacy": f"(epsilon = {stated}, delta = 0.001)"}
        result["epsilons"] = {"this run": epsilon, "everything on its ledger": epsilon}
        (tmp_path / "a" / "result.json").write_text(json.dumps(result))
        code = main(["compare", "a", "b", "--out", f"{epsilon} {stated}"])
        return code, "".join(capsys.readouterr())

    code, text = printed(cost, cost)
    (line,) = [line for line in text.splitlines() if "computed again" in line]
    assert code == 0 and line.startswith("a ") and f"epsilon = {cost:.6g}" in line
    assert any(line.startswith("b ") and "not checked" in line for line in text.splitlines())
    for less in ((0.1, cost), (cost, 0.1)):
        code, text = printed(*less)
        assert code == 2 and "a/certificate.json" in text and "0.1" in text
