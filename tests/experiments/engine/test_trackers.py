"""Trackers get public values, each once, and cannot end a run."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import jaxpfl as jp
from tests.faults.runs import adding


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.values: dict[int, dict[str, float]] = {}
        self.ended: list[str] = []

    def begin(self, run):
        self.begun.append(run)

    def log(self, round, values):
        assert round not in self.values
        self.values[round] = dict(values)

    def sentences(self, round, texts):
        raise AssertionError("this run draws none")

    def end(self, privacy):
        self.ended.append(privacy)


class Failing(Recorder):
    """A service that is gone after the first round."""

    def log(self, round, values):
        super().log(round, values)
        if round == 1:
            raise ConnectionError("no route to the service")


def _run(out, ledger, resume=False) -> jp.Result:
    return jp.run(*adding(3), ledger=ledger, out=out, every=10, resume=resume)


class Crashing(Recorder):
    """Kills the process' work, once, before the record of round 2 is written."""

    def __init__(self) -> None:
        super().__init__()
        self.crashed = False

    def log(self, round, values):
        if round == 2 and not self.crashed:
            self.crashed = True
            raise KeyboardInterrupt
        super().log(round, values)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A run that crashes in round 2, before its first checkpoint, and is begun again."""
    folder = tmp_path_factory.mktemp("followed")
    first, failing = Recorder(), Failing()
    with jp.track(Crashing(), first, failing):
        with pytest.raises(KeyboardInterrupt):
            _run(folder / "run", folder / "ledger.jsonl")
        result = _run(folder / "run", folder / "ledger.jsonl", resume=True)
    return first, failing, result


def test_every_round_is_logged_once_though_the_run_was_resumed(followed):
    tracker, _, result = followed
    assert sorted(tracker.values) == [0, 1, 2, 3]
    lines = (result.out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert tracker.values[3]["epsilon"] == pytest.approx(result.metrics["epsilon"])
    assert tracker.values[3]["value"] == pytest.approx(result.metrics["value"])
    assert len({run.id for run in tracker.begun}) == 1
    assert tracker.ended[-1] == result.privacy


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(followed):
    _, failing, result = followed
    assert result.rounds == 3
    # It was asked again when the run was resumed.
    assert sorted(failing.values) == [0, 1, 2, 3]


def test_nothing_private_is_tracked(followed):
    tracker, _, result = followed
    told = repr([vars(run) for run in tracker.begun]) + repr(tracker.values) + repr(tracker.ended)
    assert "canary" not in told
    for key in (result.out / "private").glob("*.key"):
        assert key.read_bytes().hex() not in told


def test_a_run_outside_the_context_is_not_followed(tmp_path):
    tracker = Recorder()
    with jp.track(tracker):
        pass
    _run(tmp_path / "run", tmp_path / "ledger.jsonl")
    assert not tracker.begun


class FakeService:
    """Stands for wandb and trackio: `init` returns a run with `log` and `finish`."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.options: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.finished = False

    def init(self, **options):
        self.options = options
        return self

    def log(self, values, step=None):
        self.logged.append((values, step))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_services_by_name(tmp_path, monkeypatch, service):
    fake = FakeService()
    monkeypatch.setitem(sys.modules, service, fake)
    with jp.track(f"{service}:mine"):
        result = _run(tmp_path / "run", tmp_path / "ledger.jsonl")
    assert fake.options["project"] == "mine" and fake.options["resume"] == "allow"
    assert [step for _, step in fake.logged if step is not None] == [0, 1, 2, 3]
    assert result.privacy in repr((fake.logged, fake.summary))
    assert fake.finished


def test_mlflow_by_name(tmp_path, monkeypatch):
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Client:
        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return f"id of {name}"

        def search_runs(self, places, query):
            return []

        def create_run(self, place, **options):
            assert place == "id of mine"
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def __getattr__(self, name):
            return lambda *values, **options: calls.append((name, values, options))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    with jp.track("mlflow:mine"):
        result = _run(tmp_path / "run", tmp_path / "ledger.jsonl")
    steps = [options["step"] for name, _, options in calls if name == "log_metric"]
    assert sorted(set(steps)) == [0, 1, 2, 3]
    assert ("set_tag", ("r1", "privacy", result.privacy), {}) in calls
    assert calls[-1] == ("set_terminated", ("r1",), {})


def test_what_is_no_service_and_what_is_not_installed(monkeypatch):
    with pytest.raises(jp.InputError, match="wandb:PROJECT"), jp.track("neptune:mine"):
        pass
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(jp.InputError, match="pip install"), jp.track("wandb:mine"):
        pass
