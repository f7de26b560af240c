"""`jaxpfl compare`: what differs, what repeats, what cannot be compared, from public files."""

import json

import pytest

from jaxpfl.cli import main

DATA = "test clients of x (declared public)"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a run of two rounds, by its files."""
    monkeypatch.chdir(tmp_path)

    def make(name, *, seed=0, loss=1.0, rate=0.1, stamp="", system="federated_training"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {"training": {"rate": rate, "rounds": 2}, "run": {"seed": seed}}
        config |= {"system": system} if system else {"every": 10}
        run = {
            "private": not stamp, "stamp": stamp, "statement": "epsilon = 3", "note": "",
            "label": "fed_avg", "config": config, "seed": seed, "evaluation": DATA,
            "population": "x [train]",
            "queries": [{"label": "update", "plan": {"clip_norm": rate}}],
        }  # fmt: skip
        scored = [(k, {"loss": loss + 2 - k, "accuracy": 0.5, "count": 7.0}) for k in range(3)]
        lines = [json.dumps({"round": k, "epsilon": 1.0 * k, "evaluation": e}) for k, e in scored]
        (folder / "run.json").write_text(json.dumps(run))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        result = {"privacy": f"epsilon of {name}", "epsilons": {"this run": 3.0}}
        (folder / "result.json").write_text(json.dumps(result))
        return name

    return make


def compared(capsys, *names):
    code = main(["compare", *names])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_settings_that_differ_scores_and_their_spread(made, capsys, tmp_path):
    names = made("a", loss=1.0), made("b", seed=1, loss=3.0), made("c", rate=0.2, loss=5.0)
    code, text = compared(capsys, *names)
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert ["training.rate", "0.1", "0.1", "0.2"] in rows and ["seed", "0", "1", "0"] in rows
    assert not any(row[:1] == ["training.rounds"] for row in rows)
    assert ["b", "1", "2", "3", "50.00", "%", "3"] in rows
    # The mean of 1 and 3; by hand, their deviation is the root of 2.
    assert ["a,", "b", "2", "±", "1.414", "50.00", "%", "±", "0.00", "%"] in rows
    assert "Run once: c." in text and "epsilon of b" in text
    page = (tmp_path / "runs/compare/report.html").read_text()
    assert 'href="../../b/report.html"' in page
    assert 'data-value="b, round 2: 3"' in page and 'data-value="c, round 2: 5"' in page
    assert "http" not in page.replace("http-equiv", "")


def test_one_run_each_has_a_caution_and_repeats_have_none(made, capsys):
    a, b, c = made("a"), made("b", rate=0.2), made("c", seed=1)
    assert "Run once: a, b." in compared(capsys, a, b)[1]
    assert "once:" not in compared(capsys, a, c)[1]


def test_what_is_not_private_says_so_and_runs_of_python_differ_by_their_plans(made, capsys):
    stamp = "NOT PRIVATE: trained without privacy"
    names = made("x/a", system=None), made("y/a", system=None, stamp=stamp, rate=0.3)
    text = compared(capsys, *names)[1]
    assert "y/a (NOT PRIVATE)" in text and "NOT PRIVATE: x/a and y/a compared" in text
    assert ["update.plan.clip_norm", "0.1", "0.3"] in [line.split() for line in text.splitlines()]


def test_what_cannot_be_compared_is_refused(made, capsys, tmp_path):
    a = made("a")
    (tmp_path / "empty").mkdir()
    for names, said in (
        ([a], "two runs or more"),
        ([a, f"{a}/../a"], "two runs or more"),
        ([a, "empty"], "no run.json"),
        ([a, made("b"), "--out", "a"], "not empty"),
    ):
        code, text = compared(capsys, *names)
        assert code == 2 and said in text
    assert not (tmp_path / "runs").exists()
