"""What a run directory promises: one owner, no leaks, no overspending."""

import errno
import fcntl
import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from jaxpfl import files
from jaxpfl.cli import main
from jaxpfl.data import from_clients
from jaxpfl.errors import BudgetExhausted, InputError, RunLocked
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.engine.description import made_up
from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator
from jaxpfl.experiments.engine.run_directory import first_attempt
from jaxpfl.experiments.records import artifacts
from jaxpfl.experiments.systems.gan_inversion.study import Study
from jaxpfl.federated.release import prepared_query
from tests.experiments import canaries
from tests.faults.runs import config_of, run_and_watch
from tests.privacy.ledgers import filled


@pytest.fixture(scope="module")
def non_private(tiny_config, tmp_path_factory, drawn) -> Path:
    """The directory of a run without privacy; `drawn` has what it drew, too."""
    openly = ["--run.reproducible_noise", "False", "--privacy.private", "False"]
    for name in ("epsilon", "noise_multiplier", "delta"):
        openly += [f"--privacy.{name}", "null"]
    out = tmp_path_factory.mktemp("non_private") / "run"
    drawn += run_and_watch(config_of(tiny_config, openly), out)
    return out


def test_no_canary_leaves_the_private_folder(finished, non_private, drawn):
    """TRUST 40: client ids, texts and secrets never appear outside private/."""
    # Two runs' secrets, at least.
    assert len(canaries.of_secrets(drawn)) >= 2 * (4 + 1)
    for out in (finished, non_private):
        (key,) = [path.read_bytes() for path in out.rglob("private/*.key")]
        private = canaries.CLIENTS | canaries.of_secrets(drawn) | {key, key.hex().encode()}
        canaries.assert_in_none(private, canaries.public_files(out))


def test_true_cohort_sizes_stay_in_the_private_folder(finished):
    """TRUST 40: under Poisson sampling the cohort's size is a function of secret draws."""
    private = (finished / "private" / "rounds.jsonl").read_text().splitlines()
    assert all("clients" in json.loads(line) for line in private)
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record.keys() <= {
            "round", "clip_norm", "update_norm", "epsilon", "evaluation",
            "sentences", "private",
        }  # fmt: skip


def test_the_private_folder_is_its_owners_only(finished, non_private):
    """TRUST 40: mode 0700, the ledger's key 0600; a finished run has no secret any more."""
    for private in (finished / "private", non_private / "private"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert stat.S_IMODE((private / "ledger.jsonl.key").stat().st_mode) == 0o600
        assert sorted(path.name for path in private.iterdir()) == [
            "begun_in",
            "ledger.jsonl.key",
            "rounds.jsonl",
        ]


def test_the_secret_stays_until_the_last_checkpoint_is_on_the_disk(tiny_config, tmp_path, capsys):
    """TRUST 33, 35, 36: what is only in memory could not be made again without it.

    The disk is full: the run stops in one sentence, keeps its last good checkpoint, and goes on
    later."""
    out, real, message = tmp_path / "run", artifacts.commit, os.strerror(errno.ENOSPC)

    def full(temporary, path, manifest):
        if path.name == "round_00000004":
            raise OSError(errno.ENOSPC, message, str(temporary))
        real(temporary, path, manifest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(artifacts, "commit", full)
        assert main(["run", str(tiny_config), "--training.rounds", "4", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["round_00000002"]
    assert (out / "private" / "secret.json").exists()
    assert carry_out.resume(out, progress=False).record["rounds"] == 4
    assert not (out / "private" / "secret.json").exists()


def test_a_run_without_privacy_says_so_everywhere(finished, non_private):
    """TRUST 11: every artefact says so, and those of the private run do not."""
    for name in ("config.yaml", "run.json", "result.json", "report.html"):
        text = (non_private / name).read_text()
        assert "NOT PRIVATE" in text, name
    for line in (non_private / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["private"] is False
    for meta in non_private.glob("checkpoints/*/manifest.json"):
        assert json.loads(meta.read_text())["private"] is False
    events = b"".join(path.read_bytes() for path in (non_private / "tensorboard").iterdir())
    assert b"NOT_PRIVATE/" in events
    assert "NOT PRIVATE" not in (finished / "run.json").read_text()
    assert json.loads((finished / "run.json").read_text())["private"] is True


def test_the_report_shows_statement_plots_and_sentences(finished):
    page = (finished / "report.html").read_text()
    result = json.loads((finished / "result.json").read_text())
    assert result["privacy"].split(",")[0] in page
    assert page.count("data:image/png;base64,") >= 4
    assert "http://" not in page
    assert "https://" not in page
    for row in result["table"]:
        assert row["model"] in page
    assert [row["model"] for row in result["table"]] == ["untrained", "unigram", "this run"]


def test_report_text_is_escaped(finished, tmp_path):
    """TRUST 39: what a model generates cannot become markup."""
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    record = {**json.loads(lines[-1]), "sentences": ["<script>alert(1)</script>"]}
    (out / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    page = carry_out.report(out).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


def test_a_second_run_in_the_directory_is_refused_by_a_lock(tiny_config, tmp_path):
    """TRUST 37: two runs in one directory -> the second is refused, whatever the clock says."""
    out = tmp_path / "run"
    out.mkdir()
    with (out / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(out / "run.lock", (0, 0))
        with pytest.raises(RunLocked, match="another process"):
            carry_out.run(config_of(tiny_config), out, progress=False)
        assert [path.name for path in out.iterdir()] == ["run.lock"]
    with files.exclusive(out):
        pass


def _cost_of(config_path: Path, rounds: int) -> float:
    from jaxpfl.experiments.systems.federated_training.study import prepare

    plan = prepare(config_of(config_path)).algorithm.queries[0].plan
    # A budget is kept by the exact accountant, whichever one the plan's statement names.
    return plan.epsilon(rounds, "pld")


def test_the_budget_stops_before_data_is_touched(tiny_config, tmp_path, monkeypatch, capsys):
    """TRUST 30: exit code 3, the round that does not fit is neither sampled nor released."""
    sampled = []
    real = prepared_query.Cohort

    def watching(*arguments, **options):
        sampled.append(options["round"])
        return real(*arguments, **options)

    monkeypatch.setattr(prepared_query, "Cohort", watching)
    limit = (_cost_of(tiny_config, 3) + _cost_of(tiny_config, 4)) / 2
    out = tmp_path / "run"
    given = [str(tiny_config), "--privacy.budget_epsilon", repr(limit), "--out", str(out)]
    assert main(["run", *given, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "BudgetExhausted"
    assert sampled == [1, 2, 3]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]
    assert json.loads((out / "result.json").read_text())["rounds"] == 3
    assert (out / "checkpoints" / "round_00000003").is_dir()
    assert (out / "report.html").exists()
    before = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(BudgetExhausted):
        carry_out.resume(out, progress=False)
    assert (out / "ledger.jsonl").read_bytes() == before
    assert sampled == [1, 2, 3]


@pytest.mark.parametrize("there", [(), ("mine.txt", "private/mine.txt")])
def test_a_run_without_a_charge_leaves_nothing(tiny_config, tmp_path, there):
    """The same command with another budget begins anew; what was there before stays."""
    out = tmp_path / "run"
    for name in there:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    before = sorted(tmp_path.rglob("*.txt"))
    given = [str(tiny_config), "--out", str(out), "--training.rounds", "1"]
    assert main(["run", *given, "--privacy.budget_epsilon", "0.01"]) == 3
    assert not (out / "config.yaml").exists() and out.exists() == bool(there)
    assert sorted(tmp_path.rglob("*.txt")) == before
    assert main(["run", *given]) == 0


def test_private_evaluation_data_is_refused_by_the_library():
    """TRUST 31: a bare population is not a statement that it is public."""
    held = from_clients({"person": {"x": np.full(1, 7.25)}})
    for private in (object(), held):
        with pytest.raises(InputError, match="DeclaredPublic"):
            Evaluator(object(), private)  # type: ignore[arg-type]
    assert "7.25" not in repr(DeclaredPublic(held)) and "person" not in repr(DeclaredPublic(held))


def test_an_edited_head_of_the_config_does_not_take_the_stamp_off():
    """TRUST 11: the stamp follows from the config, not from the comment that shows it."""
    path = Path(__file__).parents[2] / "configs" / "gan_inversion.yaml"
    config = registry.load(path, ["--run.reproducible_noise", "True"])
    study = Study(config, made_up(40))
    assert study.stamp.startswith("NOT PRIVATE")


def test_a_refusal_leaves_no_directory_behind(tmp_path):
    """What was there before stays, and so does whatever was written."""
    (tmp_path / "kept").mkdir()
    for name in ("new", "deep/er", "kept", "written"):
        with pytest.raises(InputError), files.exclusive(tmp_path / name):
            if name == "written":
                (tmp_path / name / "run.json").write_text("{}")
            raise InputError("refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "written"]
    assert (tmp_path / "written" / "run.json").exists()


@pytest.mark.parametrize(
    "kept",
    [
        *("checkpoints/a", "runs/FreD/checkpoints/a", "artifacts/a", "fine_tuning/round_1"),
        *("ledger.jsonl", "another.jsonl", "run.json", "another/run.lock", "another/run.json"),
        "another/metrics.jsonl",
    ],
)
def test_a_refusal_after_a_charge_or_work_keeps_them(tmp_path, kept):
    """Also what others write into the directory meanwhile."""
    shared, out = tmp_path / "shared.jsonl", tmp_path / "new"
    with pytest.raises(InputError, match="refused"), first_attempt(out, [shared]):
        if kept in ("ledger.jsonl", "another.jsonl"):
            filled(out / kept, 1)
        else:
            (out / kept).parent.mkdir(parents=True, exist_ok=True)
            files.write_json(out / kept, {"run": "a"} if kept == "run.json" else {})
        if kept == "run.json":
            filled(shared, 1)  # by the run "a"
        raise InputError("refused")
    assert (out / kept).exists()
