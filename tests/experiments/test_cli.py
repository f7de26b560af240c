"""The command line: what it prints, where, and its exit codes."""

import json
import subprocess
import sys

import pytest

from jaxpfl.cli import main, parser

CALIBRATE = "calibrate --delta 3e-6 --rounds 20 --population 10000 --clients-per-round 1000"


def _json(capsys) -> dict:
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1
    return json.loads(printed)


@pytest.mark.parametrize("command", [[], ["run"], ["calibrate"]])
def test_help_documents_the_exit_codes(capsys, command):
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    for line in ("0    done", "2    bad input", "3    the privacy budget is exhausted", "6    "):
        assert line in text


@pytest.mark.parametrize("arguments", [["fly"], ["calibrate", "--delta", "1e-5"]])
def test_bad_input_is_exit_code_2_with_one_sentence(capsys, arguments):
    """TRUST 9, 10, 11: on the command line."""
    assert main([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["exit_code"] == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    # Without --json, stdout stays empty.
    assert (main(arguments), capsys.readouterr().out) == (2, "")


def test_calibrate_prints_noise_and_the_whole_statement(capsys):
    assert main([*CALIBRATE.split(), "--epsilon", "7"]) == 0
    text = capsys.readouterr().out
    for word in ("noise multiplier = 0.757", "epsilon", "delta", "unit", "adjacency", "accountant"):
        assert word in text


def test_run_report_and_budget_agree(tiny_config, tmp_path, capsys):
    """The last lines of a run are the table and the statement."""
    out = tmp_path / "run"
    changes = ["--training.rounds", "1", "--run.reproducible_noise", "False"]
    assert main(["run", str(tiny_config), *changes, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    source = tiny_config.parent / "clients.jsonl"
    table = lines[lines.index(f"Compared on test clients of {source} (declared public):") :]
    assert "perplexity" in table[1]
    assert [line.split("  ")[0] for line in table[2:5]] == ["untrained", "unigram", "this run"]
    frequencies = f"validation clients of {source} (declared public)"
    assert table[5] == f"unigram: word frequencies of {frequencies}"
    # One round of noise on a model that was never trained.
    assert any("ends worse than" in line for line in table[6:])
    for word in ("epsilon", "delta", "unit = client", "adjacency", "accountant = RDP"):
        assert word in lines[-1]
    assert lines[-1].endswith("if nothing else is released from these clients")
    assert f"jaxpfl run {tiny_config} --training.rounds 1" in (out / "report.html").read_text()

    (out / "report.html").unlink()
    assert main(["report", str(out), "--json"]) == 0
    assert _json(capsys)["report"] == str(out / "report.html")
    assert (out / "report.html").is_file()

    assert main(["resume", str(out), "--json"]) == 0
    record = _json(capsys)
    assert (record["rounds"], record["private"]) == (1, True)
    assert [row["model"] for row in record["table"]] == ["untrained", "unigram", "this run"]
    asked = ["budget", str(out / "ledger.jsonl"), "--delta", "1e-3", "--accountant", "rdp"]
    assert main([*asked, "--json"]) == 0
    spent = _json(capsys)
    assert main(asked) == 0
    assert "add or remove one client, accountant = RDP" in capsys.readouterr().out
    assert spent["charges"] == 1
    assert spent["epsilon"] == pytest.approx(record["metrics"]["epsilon"], rel=1e-6)

    assert main(["run", str(tiny_config), "--out", str(out)]) == 2
    assert "resume" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    module = [sys.executable, "-m", "jaxpfl", "--help"]
    shown = subprocess.run(module, capture_output=True, text=True, check=True).stdout
    assert "calibrate" in shown
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split()[0] == "jaxpfl"


def test_shells_complete_commands_options_and_files():
    """In bash, as a user of `shtab` sees it."""
    shtab = pytest.importorskip("shtab")
    script = shtab.complete(parser(), "bash")
    for words, expected in (
        (["com"], "compare"),
        (["run", "--liv"], "--live"),
        (["run", "pyp"], "pyproject.toml"),
    ):
        typed = (
            f"compopt() {{ :; }}; COMP_WORDS=(jaxpfl {' '.join(words)}); COMP_CWORD={len(words)}"
        )
        command = f"{script}\n{typed}; _shtab_jaxpfl; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected]
