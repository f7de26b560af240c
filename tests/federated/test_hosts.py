"""Several processes of `jax.distributed`: real pairs of them, on this machine."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.privacy.chain import Chain
from jaxpfl.privacy.ledger import Ledger
from tests.federated.pairs import JOINED, ended, free_address, start

REFUSED = """
import numpy as np
from pathlib import Path
import jaxpfl as jp
from jaxpfl.experiments import choose_corpus
from jaxpfl.experiments.sweep.points import run_sweep
from jaxpfl.federated.release import Releaser

values = np.zeros((1, 2), np.float32)
clients = jp.data.from_clients({str(k): {"x": values} for k in range(8)}, name="x", unit="y")
out = Path(sys.argv[3])
said = {}
for name, call in {
    "release": lambda: jp.release(lambda b, e, k: e.mask.sum(), clients, None, ledger=out / "l"),
    "Releaser": lambda: Releaser(clients, None, None, run=""),
    "sweep": lambda: run_sweep(None, out / "sweep"),
    "fred": lambda: choose_corpus.choose_corpus(
        "docstrings:jax", ["docstrings:numpy"], plan=None, out=out / "f"
    ),
}.items():
    try:
        call()
    except jp.InputError as error:
        assert "2 processes" in str(error), error
        said[name] = str(error)
print(*said)
"""


@pytest.mark.long
def test_what_cannot_be_shared_among_processes_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    address = free_address()
    pair = [
        start(["-c", JOINED + REFUSED, str(index), address, str(tmp_path)]) for index in range(2)
    ]
    for code, said, errors in ended(pair):
        assert code == 0, errors
        assert said.split() == ["release", "Releaser", "sweep", "fred"]
    assert not list(tmp_path.iterdir())


TRAIN = """
import jax, json, sys
count, index, address, out, sums, private, *also = sys.argv[1:]
if count == "2":
    jax.distributed.initialize(address, 2, int(index))
import numpy as np
import optax
import jaxpfl as jp
from jaxpfl.federated.accumulators import Compensated, FixedPoint

values = np.random.default_rng(0).normal(size=(60, 5, 8)).astype(np.float32)
clients = jp.data.from_clients(
    {str(k): {"features": values[k, : k % 5 + 1], "label": np.arange(k % 5 + 1, dtype=np.int32)}
     for k in range(60)}, name="made up", unit="client")
model = jp.models.from_functions(
    lambda key: {"w": jax.random.normal(key, (8,))},
    lambda params, batch: jax.numpy.square(
        batch["features"] @ params["w"] - batch["label"].astype("float32")))
people = dict(rounds=4, clip=jp.Clip(0.5), participation=jp.Poisson(60, 20))
plan = jp.Plan.without_privacy(**people)
if private == "private":
    plan = jp.Plan(noise=jp.Noise(1.0), delta=1e-3, **people)
algorithm = jp.algorithms.fed_avg(
    model, client=optax.sgd(0.1), server=optax.sgd(1.0), plan=plan,
    cohort=jp.CohortSpec(2, 4, clients_per_bucket=8),
    execution=jp.Execution(accumulator=FixedPoint(60) if sums == "fixed" else Compensated()))
budget = jp.Budget(2.5, 1e-3) if "budget" in also else None
result = jp.run(algorithm, clients, ledger=out + "/ledger.jsonl", out=out, every=2,
                reproducible_noise=True, budget=budget)
print(json.dumps(np.asarray(result.params["w"]).astype(float).tolist()))
"""


def trained(tmp_path: Path, processes: int, *settings: str) -> list[list[float]]:
    """The parameters that each process ends with; 4 devices in all."""
    address, out = free_address(), str(tmp_path / f"{processes} {' '.join(settings)}")
    started = [
        start(["-c", TRAIN, str(processes), str(index), address, out, *settings], devices=devices)
        for index, devices in enumerate([4 // processes] * processes)
    ]
    found = ended(started)
    assert all(code == 0 for code, _, _ in found), found
    return [json.loads(said.splitlines()[-1]) for _, said, _ in found]


@pytest.mark.long
def test_two_processes_make_the_releases_and_the_ledger_of_one_with_as_many_devices(
    tmp_path: Path,
) -> None:
    (alone,) = trained(tmp_path, 1, "fixed", "private")
    assert trained(tmp_path, 2, "fixed", "private") == [alone, alone]
    one, two = (Chain.read(tmp_path / f"{n} fixed private/ledger.jsonl").lines for n in (1, 2))
    # Charges and releases, which are bound to the bits of the sum; the keys of the ledgers differ.
    assert one[1:] == two[1:]
    assert sum("event" in line for line in two) == 4
    assert sum("release" in line for line in two) == 4


@pytest.mark.long
def test_two_processes_add_up_compensated_sums_as_one_does(tmp_path: Path) -> None:
    (alone,) = trained(tmp_path, 1, "compensated", "without")
    for found in trained(tmp_path, 2, "compensated", "without"):
        np.testing.assert_allclose(found, alone, rtol=1e-6)


@pytest.mark.long
def test_an_exhausted_budget_ends_all_processes_with_one_sentence(tmp_path: Path) -> None:
    address, out = free_address(), tmp_path / "run"
    arguments = [address, str(out), "fixed", "private", "budget"]
    started = [start(["-c", TRAIN, "2", str(index), *arguments]) for index in range(2)]
    found = [
        line
        for _, _, errors in ended(started)
        for line in errors.splitlines()
        if line.startswith("jaxpfl.errors.BudgetExhausted: ")
    ]
    assert len(found) == 2
    assert found[0] == found[1]
    charges = Ledger.read(out / "ledger.jsonl").charges
    assert 0 < len(charges) < 4
    # All that was charged was released, and nothing else.
    lines = Chain.read(out / "ledger.jsonl").lines
    assert sum("release" in line for line in lines) == len(charges)


CONFIG = """
data:
  source: "digits?clients=60&alpha=0.5&seed=0"
  clients: 60
  split: {train: 0.8, valid: 0.1, test: 0.1}
model: {name: classifier_cnn, image_shape: [8, 8, 1], classes: 10}
privacy: {noise_multiplier: 1.0, delta: 1.0e-3, clip_norm: 0.5}
training:
  rounds: 30
  clients_per_round: 10
  batch_size: 8
  max_examples: 8
  client: {name: sgd, learning_rate: 0.1}
  server: {name: sgd, learning_rate: 1.0}
evaluation: {every: 0}
run: {devices: 2, checkpoint_every: 1}
"""


@pytest.mark.long
def test_a_killed_process_ends_the_run_with_a_sentence_and_one_process_resumes_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    address, out = free_address(), tmp_path / "run"
    command = ["-m", "jaxpfl", "run", str(tmp_path / "config.yaml"), "--out", str(out)]
    first, second = (
        start([*command, "--distributed", f"{address},{index}/2"]) for index in range(2)
    )
    try:
        while first.poll() is None and not list(out.glob("checkpoints/round_*")):
            time.sleep(0.1)
        second.kill()
        (code, _, errors), _ = ended([first, second])
    finally:
        first.kill()
        second.kill()
    assert code == 1, errors
    assert "process 1 of this run" in errors
    assert "resume" in errors
    before = Ledger.read(out / "ledger.jsonl").charges
    done = max(int(path.name[-8:]) for path in out.glob("checkpoints/round_*"))
    assert len(before) >= done
    resumed = start(["-m", "jaxpfl", "resume", str(out)])
    ((code, _, errors),) = ended([resumed])
    assert code == 0, errors
    after = Ledger.read(out / "ledger.jsonl").charges
    assert after[: len(before)] == before
    # One process has other devices: it asks the rounds after the checkpoint anew, and pays for it.
    assert [charge.round for charge in after[len(before) :]] == list(range(done + 1, 31))
