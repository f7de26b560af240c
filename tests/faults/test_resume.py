"""Kill -9 at any instant, then resume: the same bits as the run that was never interrupted."""

import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from jaxpfl import files
from jaxpfl.cli import main
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.carry_out import Outcome
from jaxpfl.experiments.engine import run_directory, setting
from jaxpfl.experiments.records import artifacts
from jaxpfl.experiments.records.lines import MetricsFile
from jaxpfl.federated.release import identity, prepared_query, releaser
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Charge, Ledger, guarantee_of
from tests.experiments.crashes import stopped
from tests.faults.runs import (
    assert_same,
    charges_of,
    config_of,
    continue_run,
    in_round,
    releases_of,
    start_victim,
)
from tests.refusals import refusal


@pytest.mark.parametrize(
    "place",
    [0.5, pytest.param(0.93, marks=pytest.mark.long)]
    + [pytest.param(number / 24, marks=pytest.mark.slow) for number in range(24)],
)
def test_a_run_killed_at_a_durable_operation_resumes_to_the_same_bits(
    tiny_config, tmp_path, counted, place
):
    """TRUST 33: SIGKILL between any two writes, mid-save and mid-delete too."""
    straight, instants = counted
    victim = start_victim(tiny_config, tmp_path / "run", max(1, round(place * instants)))
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    continue_run(tiny_config, tmp_path / "run")
    assert_same(tmp_path / "run", straight)


def _of_round_4(temporary: Path, *_) -> bool:
    return temporary.name.endswith("4")


def _record_of_round_4(file: MetricsFile, round: int, _: object) -> bool:
    return round == 4


@pytest.fixture(scope="module")
def crashed_once(tiny_config, tmp_path_factory) -> Path:
    """A run in this process that crashed in the middle of its last round, 7."""
    out = tmp_path_factory.mktemp("crashed") / "run"
    with in_round(7):
        carry_out.run(config_of(tiny_config), out, progress=False)
    return out


@pytest.fixture
def crashed(crashed_once, tmp_path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(crashed_once, tmp_path / "run"))


# Rounds are recorded and written one late; the checkpoint after round 4 has that round written.
INSTANTS = {
    "before a charge": partial(stopped, Ledger, "charge", when=lambda *_, round, **__: round == 4),
    "after a charge": partial(in_round, 4),
    "before a record": partial(stopped, Ledger, "record", 3),
    "after a record": partial(stopped, Ledger, "record", 3, after=True),
    "before metrics": partial(stopped, MetricsFile, "append", when=_record_of_round_4),
    "after metrics": partial(stopped, MetricsFile, "append", after=True, when=_record_of_round_4),
    "in a checkpoint": partial(stopped, artifacts, "commit", when=_of_round_4),
    "after a checkpoint": partial(stopped, artifacts, "commit", after=True, when=_of_round_4),
    "before the result": partial(
        stopped, files, "write_json", when=lambda path, *_, **__: path.name == "result.json"
    ),
    "before the secret goes": partial(stopped, run_directory, "forget_secret"),
}


# What follows at once on another instant.
LONG = ("after a record", "before metrics")


@pytest.mark.parametrize(
    "instant",
    [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in INSTANTS],
)
def test_a_crash_at_a_chosen_instant_resumes_to_the_same_bits(
    tiny_config, tmp_path, straight, instant
):
    """TRUST 33, 34: one charge a round, wherever between its charge and its checkpoint it died."""
    out = tmp_path / "run"
    with INSTANTS[instant]():
        carry_out.run(config_of(tiny_config), out, progress=False)
    assert (out / "private" / "secret.json").exists()
    carry_out.resume(out, progress=False)
    assert_same(out, straight)


def _back_to_round_4(out: Path) -> None:
    """Without its latest checkpoint, a run has rounds 5 and 6 to replay."""
    shutil.rmtree(out / "checkpoints" / "round_00000006")


def _one_client_less(patched) -> None:
    """Rounds 5 and 6 sum otherwise, as on a device that rounds otherwise: nobody can know it.

    On one machine in 7,000 a round has nobody, and here one client more.
    """
    real = prepared_query.Cohort

    def other(held, chosen, *arguments, round, **options):
        if round in (5, 6):
            chosen = chosen[1:] if len(chosen) else np.arange(1)
        return real(held, chosen, *arguments, round=round, **options)

    patched.setattr(prepared_query, "Cohort", other)


def _watched(patched) -> dict[int, np.ndarray]:
    """What every round releases from now on, as one vector."""
    found: dict[int, np.ndarray] = {}
    real = releaser.Releaser.release

    def watching(self, query, *arguments, round, **options):
        answer = real(self, query, *arguments, round=round, **options)
        leaves = jax.tree.leaves(jax.device_get(answer.value))
        found[round] = np.concatenate([leaf.ravel() for leaf in leaves])
        return answer

    patched.setattr(releaser.Releaser, "release", watching)
    return found


def test_a_replay_that_comes_out_otherwise_is_another_release_and_is_charged(
    tiny_config, tmp_path, monkeypatch, straight, capsys
):
    """TRUST 34: charged without amplification, with noise of its own; the statement contains it.

    Round 5 has another sum. Round 6 starts from what it gave, so that its broadcast is another one:
    it has a cohort and an amplified charge of its own, and so has round 7."""
    config, out = config_of(tiny_config), tmp_path / "run"
    with monkeypatch.context() as patched, in_round(7):
        first = _watched(patched)
        carry_out.run(config, out, progress=False)
    _back_to_round_4(out)
    with monkeypatch.context() as patched:
        _one_client_less(patched)
        again = _watched(patched)
        resumed = carry_out.resume(out, progress=False)
    assert "without amplification" in capsys.readouterr().err
    # Two releases with one noise would differ by that client's update alone.
    assert sorted(again) == [5, 6, 7]
    deviation = np.std(again[5] - first[5])
    multiplier = config.privacy.noise_multiplier
    assert multiplier is not None
    noise = multiplier * config.privacy.clip_norm
    # Six standard errors of so many values.
    assert deviation == pytest.approx(noise * np.sqrt(2), rel=6 / np.sqrt(2 * first[5].size))
    charges = charges_of(out)
    assert charges[:7] == charges_of(straight)[:6] + charges[6:7]
    extra = [charge for charge in charges if charge.label.endswith(" released again")]
    assert [charge.round for charge in extra] == [5]
    for charge in extra:
        assert isinstance(charge.event, GaussianDpEvent)
        assert charge.event.noise_multiplier == multiplier
    assert [charge.round for charge in charges[7:]] == [5, 6, 7]
    assert [charge.event for charge in charges[8:]] == [charge.event for charge in charges[:2]]
    cost = _stated_epsilon(charges)
    assert resumed.record["metrics"]["epsilon"] == pytest.approx(cost, rel=1e-6)
    assert resumed.record["metrics"]["epsilon"] > _result(straight)["metrics"]["epsilon"]
    assert "1 of its releases were made again" in resumed.record["privacy"]


def _stated_epsilon(charges: list[Charge]) -> float:
    """As the config asks for it; the ledger's budget is kept by the exact accountant."""
    events = [charge.event for charge in charges]
    return Guarantee.of_events(events, 1e-3, accountant="rdp").epsilon()


def _result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def test_a_replay_that_cannot_be_paid_for_publishes_nothing(
    tiny_config, tmp_path, straight, monkeypatch
):
    """TRUST 30, 34: no metrics, no checkpoint, no result of a release that nobody paid for.

    What the first four rounds released was paid for, and is the result."""
    planned = guarantee_of(charges_of(straight), 1e-3).epsilon()
    config = config_of(tiny_config, ["--privacy.budget_epsilon", repr(planned * 1.001)])
    out = tmp_path / "run"
    with in_round(7):
        carry_out.run(config, out, progress=False)
    _back_to_round_4(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if _published(path)}
    with monkeypatch.context() as patched:
        _one_client_less(patched)
        with pytest.raises(BudgetExhausted):
            carry_out.resume(out, progress=False)
    after = {path: path.read_bytes() for path in out.rglob("*") if _published(path)}
    result = json.loads(after.pop(out / "result.json"))
    assert after == before
    assert result["rounds"] == 4
    # The release that was paid for is still there to be made.
    carry_out.resume(out, progress=False)
    assert charges_of(out) == charges_of(straight)


def _published(path: Path) -> bool:
    """What carries a release out of the process; a page only shows what stands in these."""
    kept = path.name in ("metrics.jsonl", "result.json") or "checkpoints" in path.parts
    return path.is_file() and kept


def test_another_environment_makes_rounds_of_their_own(crashed, straight, monkeypatch):
    """TRUST 34: rounds 5 and 6 are replayed by another version: other cohorts, other charges."""
    out = crashed
    _back_to_round_4(out)
    real = identity.environment()
    monkeypatch.setattr(identity, "environment", lambda: {**real, "versions": {"jaxlib": "0.0.0"}})
    resumed = carry_out.resume(out, progress=False)
    charges, once = charges_of(out), charges_of(straight)
    assert [charge.round for charge in charges] == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7]
    # Fresh cohorts: amplified like any other round.
    assert {repr(charge.event) for charge in charges} == {repr(once[0].event)}
    assert len(set(releases_of(out)) - set(releases_of(straight))) == 3
    lines = [(each / "metrics.jsonl").read_text().splitlines() for each in (out, straight)]
    assert lines[0][:5] == lines[1][:5]
    assert lines[0][5] != lines[1][5]
    cost = _stated_epsilon(charges)
    assert resumed.record["metrics"]["epsilon"] == pytest.approx(cost, rel=1e-6)


def test_a_damaged_checkpoint_falls_back_and_still_ends_in_the_same_bits(crashed, straight, capsys):
    """TRUST 33, 35: the message names both checkpoints; a torn line of metrics is replaced."""
    latest = sorted((crashed / "checkpoints").iterdir())[-1]
    assert latest.name == "round_00000006"
    (latest / "record.json").write_text("{}")
    with (crashed / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 6, "clip')
    carry_out.resume(crashed, progress=False)
    message = capsys.readouterr().err
    assert "round_00000006" in message
    assert "round_00000004" in message
    assert_same(crashed, straight)


@pytest.mark.parametrize("damage", ["edit", "replace"])
def test_a_tampered_ledger_blocks_the_resume(crashed, damage):
    """TRUST 40: an edited or replaced ledger line is found."""
    path = crashed / "ledger.jsonl"
    lines = path.read_text().splitlines()
    if damage == "edit":
        charge = max(number for number, line in enumerate(lines) if '"round"' in line)
        lines[charge], edits = re.subn(r'("round": ?)\d+', r"\g<1>9", lines[charge])
        assert edits == 1
    else:
        lines = lines[:2]
    path.write_text("\n".join(lines) + "\n")
    refusal(lambda: carry_out.resume(crashed, progress=False), "ledger")


def test_what_a_run_is_cannot_change(crashed, straight):
    """Another seed, plan or config, a secret that is gone or replaced: one sentence each."""
    out = crashed
    config, secret = out / "config.yaml", out / "private" / "secret.json"
    text, words = config.read_text(), secret.read_text()

    def refused(message, kind=CorruptFile):
        with pytest.raises(kind, match=message):
            carry_out.resume(out, progress=False)

    for old, new in (
        ("seed: 0", "seed: 1"),
        ("noise_multiplier: 1.0", "noise_multiplier: 2.0"),
        ("rounds: 7", "rounds: 9"),
        ("reproducible_noise: true", "reproducible_noise: false"),
    ):
        assert old in text
        config.write_text(text.replace(old, new))
        refused("the field '(config|seed|queries)'", InputError)
    config.write_text(text)
    secret.unlink()
    refused(r"secret\.json: is missing")
    secret.write_text(json.dumps({"words": [1, 2, 3, 4], "reproducible": True}))
    refused("was replaced", InputError)
    for rubbish in ([1, 2], [1, 2, 3, -4], "four", None):
        secret.write_text(json.dumps({"words": rubbish, "reproducible": True}))
        refused(r"secret\.json: .*(four words|'words')")
    secret.write_text("{}")
    refused(r"secret\.json: the field")
    secret.write_text(words)
    carry_out.resume(out, progress=False)
    assert_same(out, straight)


def test_a_finished_run_resumes_to_itself_without_its_secret(straight, tmp_path, capsys):
    """TRUST 35: without its last checkpoint nothing can be made again, and nothing is invented."""
    out = Path(shutil.copytree(straight, tmp_path / "run"))
    assert not (out / "private" / "secret.json").exists()
    found = carry_out.resume(out, progress=False)
    assert_same(out, straight)
    assert main(["resume", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["privacy"] == found.record["privacy"]
    assert_same(out, straight)
    for damage in (
        lambda: (out / "checkpoints/round_00000007/record.json").write_text("{}"),
        lambda: shutil.rmtree(out / "checkpoints"),
    ):
        damage()
        refusal(lambda: carry_out.resume(out, progress=False), "its secret is gone", CorruptFile)


def test_the_stamp_is_read_back_and_never_computed_again(crashed, monkeypatch):
    """TRUST 11: what began as NOT PRIVATE stays so, whatever the code thinks of it later."""
    out = crashed
    monkeypatch.setattr(setting, "REPRODUCIBLE", "")
    resumed = carry_out.resume(out, progress=False)
    assert resumed.record["privacy"].startswith("NOT PRIVATE")
    assert not resumed.record["private"]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["private"] is False for line in lines)


def test_noise_of_the_operating_system_differs_between_runs(tiny_config, tmp_path):
    """TRUST 21: the noise never follows the seed unless asked for."""
    config = config_of(tiny_config, ["--run.reproducible_noise", "False", "--training.rounds", "1"])
    found: list[Outcome] = []
    for name in ("first", "second"):
        found.append(carry_out.run(config, tmp_path / name, progress=False))
    releases = [releases_of(tmp_path / name)[0][1] for name in ("first", "second")]
    assert releases[0] != releases[1]
    assert all("NOT PRIVATE" not in each.record["privacy"] for each in found)
    assert jax.device_count() == 2
