"""Streams that are closed, full or read by nobody: the work goes on, and what was lost is said."""

import errno
import io
import json
import os
import subprocess
import sys

import pytest

from jaxpfl.progress import Messages, Progress

# What a shell does to the streams of a command: the exit code of a result, whether it is said.
STREAMS = {
    ">&-": (6, True),
    ">/dev/full": (6, True),
    "<&- >&- 2>&-": (6, False),
    ">/dev/full 2>/dev/full": (6, False),
    "2>&-": (0, False),
    "2>/dev/full": (0, False),
}
SHORT = [["configs"], ["configs", "quickstart", "--json"], ["--help"]]


def started(arguments: list[str], redirected: str, **environment: str) -> "subprocess.Popen[str]":
    """A command with redirected streams; what the shell leaves of them comes back as text."""
    return subprocess.Popen(
        ["bash", "-c", f'exec "$@" {redirected}', "bash", sys.executable, "-m", "jaxpfl"]
        + arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


@pytest.mark.parametrize("streams", STREAMS)
def test_a_result_that_is_lost_is_said_and_has_an_exit_code_of_its_own(streams):
    code, says = STREAMS[streams]
    # Side by side; a shell that takes the errors, too, has one of them.
    runs = [started(each, streams) for each in (SHORT[1:2] if "2>" in streams else SHORT)]
    mistaken = started(["fly", "--json"], streams)
    for run in runs:
        out, err = run.communicate()
        assert (run.returncode, err.count("\n"), bool(out)) == (code, says, not code), err
        assert not says or err.startswith("error: stdout")
    _, err = mistaken.communicate()
    assert mistaken.returncode == 2 and err.count("\n") == ("2>" not in streams)


def test_a_pipe_that_nobody_reads_is_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jaxpfl", "data", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 141 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: stdout")


def test_letters_that_a_terminal_lacks_are_escaped(tmp_path):
    rows = "".join(f"u{i % 30},{i % 3},{i % 7}\n" for i in range(120))
    (tmp_path / "größe漢.csv").write_text(f"client,y,x\n{rows}")
    given = ["init", str(tmp_path / "größe漢.csv"), "--label", "y", "--features", "x", "--out"]
    run = started([*given, str(tmp_path / "größe.yaml")], "", PYTHONIOENCODING="ascii")
    out, err = run.communicate()
    assert (run.returncode, err) == (0, "") and "gr" in out
    assert (tmp_path / "größe.yaml").exists()


class Broken(io.StringIO):
    """A stream, or a terminal, whose end is gone."""

    def __init__(self, error: Exception, terminal: bool) -> None:
        super().__init__()
        self.error, self.terminal = error, terminal

    def write(self, text: str) -> int:
        raise self.error

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.EIO, "hung up"), ValueError("I/O operation"), None]
)
def test_progress_that_nobody_reads_does_not_end_the_work(monkeypatch, error, terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", None if error is None else Broken(error, terminal))
    with Progress("rounds", total=3) as bar:
        bar.begin(0)
        for done in range(4):
            bar.update(done, {"loss": "1.0"})
        bar.message("warning: of something")


def test_messages_know_that_some_were_lost():
    kept, lost = Messages(io.StringIO()), Messages(Broken(BrokenPipeError(), False))
    assert (kept.write("a"), lost.write("a")) == (1, 1)
    assert kept.lost is None and isinstance(lost.lost, BrokenPipeError)
    assert kept.getvalue() == "a"


@pytest.mark.long
def test_a_run_without_streams_is_whole(tiny_config, tmp_path):
    """With no stream open, no message of a library gets into the ledger."""
    for streams, code in (("<&- >&- 2>&-", 6), ("2> >(exec true)", 0)):
        out = tmp_path / f"run{code}"
        changes = ["--training.rounds", "2", "--out", str(out)]
        run = started(["run", str(tiny_config), *changes], streams, FORCE_COLOR="1")
        run.communicate()
        assert run.returncode == code
        assert json.loads((out / "result.json").read_text())["rounds"] == 2
        checked = started(["budget", str(out / "ledger.jsonl"), "--delta", "1e-3"], "")
        checked.communicate()
        assert checked.returncode == 0
