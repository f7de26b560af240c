"""Every system by two real processes, and by one with as many devices."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxpfl.experiments.config.reader import to_mapping, to_yaml
from jaxpfl.experiments.own_table import config_of as synthesis
from jaxpfl.privacy.chain import Chain
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.experiments.systems.chosen_corpus.test_writer import OWN
from tests.experiments.systems.gan_inversion.test_study import STUDY as GANS
from tests.experiments.systems.oov_concatenation.test_study import STUDY as WORDS
from tests.experiments.systems.training_bias import test_study as training_bias
from tests.federated.two_processes import ended, free_address, start
from tests.loopback import completions

EXACT = ("--privacy.noise", "exact")
LOOK = (
    "--popri.clients_send",
    "moments",
    "--popri.checkpoint",
    "judged",
    "--popri.judge",
    "hashed:16",
)
CHANGES = {
    # FreD, prefinetuning, and the rounds from the corpus that FreD chose.
    "fred": (*EXACT, "--prefinetune.other_candidates", "false"),
    # Process 0 writes and tunes, with the generator split over two devices.
    "popri": (*EXACT, "--training.model_devices", "2"),
    "one_look": (*EXACT, *LOOK),
    "private_evolution": EXACT,
    "steered": EXACT,
    # DP-FTRL, whose noise several rounds share.
    "fed_avg": ("--privacy.sampling", "cyclic", "--privacy.noise", "exact_banded"),
    # Histograms of a model's accuracy on clients, and four GANs.
    "gan_inversion": EXACT,
    # With a writer, which process 0 alone loads.
    "chosen_corpus": EXACT,
    "oov_concatenation": ("--words.privacy.noise", "exact", "--characters.privacy.noise", "exact"),
    "training_bias": EXACT,
}
OF = {"one_look": "popri"}


def config_of(name: str, folder: Path, pipeline: Path, synthetic: Callable) -> Path:
    if name == "fred":
        return pipeline
    write_lines(folder / "clients.jsonl", NEAR + FAR, 60, 3, "canarytext{}")
    write_lines(folder / "public.jsonl", NEAR, 30, 4, "publicword{}")
    others = {"gan_inversion": GANS, "oov_concatenation": WORDS.format(folder=folder)}
    if name == "chosen_corpus":
        given = f"{folder}/clients.jsonl", [f"{folder}/public.jsonl"]
        text = synthesis(*given, epsilon=1_000, texts=20, embedder="hashed:8")
        own = OWN.format(folder=folder, texts=20, rounds=1)
        others[name] = text.replace("writer: null\n", own)
    if name == "training_bias":
        for file, lines in training_bias.FILES.items():
            write_lines(folder / f"{file}.jsonl", *lines)
        others[name] = training_bias.STUDY.format(folder=folder)
    path = folder / "config.yaml"
    path.write_text(others.get(name) or to_yaml(synthetic(OF.get(name, name))))
    return path


def started(
    config: Path,
    out: Path,
    number: int,
    changes: Sequence[str],
    how=("-m", "jaxpfl"),
    others: Sequence[str] = (),
):
    """The processes of a run, which have four devices together; `others`: an argument of each."""
    address = free_address()
    command = [*how, "run", str(config), "--out", str(out)]
    command += [*changes, "--run.reproducible_noise", "true", "--run.devices", str(4 // number)]
    joined = [["--distributed", f"{address},{index}/{number}"] for index in range(number)]
    return [
        start([*command, *(own if number > 1 else []), *others[index : index + 1]])
        for index, own in enumerate(joined)
    ]


def ledgers(out: Path) -> dict[Path, list]:
    """The charges and releases of a run, without each ledger's own first line."""
    found = sorted(out.rglob("ledger.jsonl"))
    return {path.relative_to(out): Chain.read(path).lines[1:] for path in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_two_processes_make_the_releases_of_one(name, pipeline_config, synthetic_config, tmp_path):
    config = config_of(name, tmp_path, pipeline_config, synthetic_config)
    for number in (1, 2):
        out = tmp_path / str(number)
        for code, _, errors in ended(started(config, out, number, CHANGES[name]), seconds=1500):
            assert code == 0, errors
    alone, shared = (ledgers(tmp_path / number) for number in "12")
    # A release is named by a hash of its exact sum and its noise.
    assert any("release" in line for lines in alone.values() for line in lines)
    assert alone == shared


OTHER_EMBEDDINGS = """
import sys
from jaxpfl import cli
from jaxpfl.text.embed.hashed import HashedNgrams
if sys.argv[-1].endswith(",1/2"):
    embed = HashedNgrams.__call__
    HashedNgrams.__call__ = lambda self, examples: embed(self, examples) * 0.5
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_process_whose_embeddings_differ_ends_both_before_a_charge(pipeline_config, tmp_path):
    """Both read the same clients by the same config, and agree at first."""
    out, how = tmp_path / "run", ("-c", OTHER_EMBEDDINGS)
    for code, _, errors in ended(started(pipeline_config, out, 2, EXACT, how), seconds=600):
        assert code == 2, errors
        assert "process 1 has other clients or another config than process 0" in errors
    assert [line for lines in ledgers(out).values() for line in lines] == []


@pytest.mark.long
def test_a_process_with_another_setting_ends_both_before_anything_is_written(
    synthetic_config, tmp_path
):
    config, out = config_of("private_evolution", tmp_path, tmp_path, synthetic_config), "run"
    others = ("--run.seed=3", "--run.seed=4")
    for code, _, errors in ended(started(config, tmp_path / out, 2, EXACT, others=others), 600):
        assert code == 2, errors
        assert "process 1 has another --run.seed than process 0" in errors
    assert not (tmp_path / out / "config.yaml").exists()


INTERRUPTED = """
import os, signal, sys
from jaxpfl import cli
from jaxpfl.federated.release.releaser import Releaser
step = Releaser.step
def interrupted(self, act, *rest):
    returned = step(self, act, *rest)
    if sys.argv[-1].endswith(",0/2") and act.__module__.endswith("fed_avg"):
        os.kill(os.getpid(), signal.SIGINT)
    return returned
Releaser.step = interrupted
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_interrupt_of_the_rounds_after_fred_ends_both_with_its_sentence(
    pipeline_config, tmp_path
):
    """Process 0 restates what FreD's release cost while the other one waits for its end."""
    out, how = tmp_path / "run", ("-c", INTERRUPTED)
    for code, _, errors in ended(started(pipeline_config, out, 2, CHANGES["fred"], how), 900):
        assert code == 130, errors
        assert "interrupted after round 1" in errors
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_a_remote_model_is_asked_by_process_0_alone(synthetic_config, tmp_path):
    mapping, requests = to_mapping(synthetic_config("private_evolution")), []
    with completions(lambda _, number: (200, f" {number} ka lo\nand more")) as (address, asked):
        mapping["generator"] = {"api": address, "model": "far"}
        (config := tmp_path / "config.yaml").write_text(json.dumps(mapping))
        for number in (1, 2):
            asked.clear()
            out = tmp_path / str(number)
            for code, _, errors in ended(started(config, out, number, EXACT), seconds=900):
                assert code == 0, errors
            requests.append(len(asked))
    assert requests[0] == requests[1] > 0
    assert len(ledgers(tmp_path / "2").popitem()[1]) == len(ledgers(tmp_path / "1").popitem()[1])
