"""What observes a run: TensorBoard is optional, numbers are flat."""

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from jaxpfl import progress
from jaxpfl.experiments.engine import observers
from jaxpfl.experiments.engine.observers import Observers
from jaxpfl.experiments.engine.setting import Tracking
from jaxpfl.experiments.records.lines import flat
from jaxpfl.progress import Progress


@pytest.mark.parametrize("installed", [True, False])
def test_a_run_goes_on_without_tensorboard(tmp_path, monkeypatch, installed):
    """metrics.jsonl is the same."""
    if not installed:
        monkeypatch.setattr(observers, "find_spec", lambda name: None)
    algorithm = SimpleNamespace(rounds=2, params=None)
    cost = SimpleNamespace(epsilon=lambda round: 0.5 * round)
    run: Any = SimpleNamespace(path=tmp_path, stamp="", algorithm=algorithm, cost=cost)
    bar = Progress("test", progress=False)
    with Observers(run, Tracking(evaluate_every=2), bar, done=0, kept=None) as found:
        for round in range(3):
            found.observe(round, {"norm": 1.0 * round}, None)
            found.publish()
            found.publish()
        assert found.metrics.records[2] == {"round": 2, "norm": 2.0, "epsilon": 1.0}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["norm"] for line in lines] == [0.0, 1.0, 2.0]
    assert "epsilon" not in json.loads(lines[1])
    assert (tmp_path / "tensorboard").exists() == installed


def test_numbers_of_a_record_are_flat():
    record = {"round": 1, "loss": 2.0, "evaluation": {"accuracy": 0.5, "name": "x"}}
    assert flat(record) == {"loss": 2.0, "evaluation/accuracy": 0.5}


def test_progress_that_is_off_prints_messages_alone_and_without_a_terminal_a_line(capsys):
    with Progress("test", total=1, progress=False) as bar:
        bar.update(1, {"loss": "2"})
        bar.message("a warning")
    assert capsys.readouterr() == ("", "a warning\n")
    with Progress("test", total=2, step="round", clients=10) as bar:
        bar.update(1)
        bar.update(2, {"loss": "2"})
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "round 2/2" in err and "clients/s" in err and "loss 2" in err


def test_a_line_says_when_its_values_are_from(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with Progress("test", total=3, step="round", clients=10) as bar:
        bar.begin(0)
        for done, values in enumerate([{}, {"loss": "1"}, {}, {}]):
            bar.update(done, values)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"test: round {n}/3" for n in range(4)]
    assert "compiling" in lines[0] and "loss 1 at round 1" in lines[2]
    # The first round compiles, and says nothing of the speed of others.
    assert [" left" in line for line in lines] == [False, False, True, False]
    assert ["clients/s" in line for line in lines] == [False, False, True, True]


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_window_keeps_bar_count_and_time_and_a_label_as_it_is(width):
    """A user's name for a candidate or a sweep is no markup."""
    shown = io.StringIO()
    bar = progress._rich_bar(Console(file=shown, force_terminal=True, width=width))
    with bar:
        task = bar.add_task("[red]x[/] (NOT PRIVATE)", total=2000, status="compiling")
        status = "12.34 rounds/s  perplexity 123.4  accuracy 0.1234  this run's epsilon 7.123"
        bar.update(task, completed=1234, status=status)
        table = bar.make_tasks_table(bar.tasks)
    Console(file=(once := io.StringIO()), width=width).print(table)
    lines = once.getvalue().rstrip("\n").split("\n")
    assert len(lines) == 1
    assert lines[0].startswith("[red]x[/]")
    assert "1234/2000" in lines[0] and ":" in lines[0] and "━" in lines[0]
    assert "12.34 rounds/s" in lines[0] or width < 80
