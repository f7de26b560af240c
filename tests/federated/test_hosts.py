"""Several processes of `jax.distributed`: real pairs of them, on this machine."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.privacy.chain import Chain
from jaxpfl.privacy.ledger import Ledger
from tests.federated.two_processes import JOINED, ended, free_address, start, together

ONCE = """
import json
import numpy as np
from pathlib import Path
import jaxpfl as jp
from jaxpfl.experiments.audit import audit
from jaxpfl.experiments.sweep.points import run_sweep
from jaxpfl.federated.release.releaser import Releaser

values = np.arange(16, dtype=np.float32).reshape(8, 1, 2)
clients = jp.data.from_clients({str(k): {"x": values[k]} for k in range(8)}, name="x", unit="y")
out = Path(sys.argv[3])
said = {}
for name, call in {
    "secure_release": lambda: jp.secure_release(None, clients, None, delta=0.1, ledger=out / "l"),
    "audit": lambda: audit(None, None),
    "Releaser": lambda: Releaser(clients, None, None, run=""),
    "sweep": lambda: run_sweep(None, out / "sweep"),
}.items():
    try:
        call()
    except jp.InputError as error:
        assert "2 processes" in str(error), error
        said[name] = str(error)
assert list(said) == ["secure_release", "audit", "Releaser", "sweep"] and not list(out.iterdir())
plan = jp.Plan(
    clip=jp.Clip(30.0), participation=jp.Poisson(8, 8), rounds=1, noise=jp.Noise(0.01), delta=1e-3
)
read = lambda weight, examples, key: weight * examples.batches["x"].sum((0, 1))
# What is given in process 0 counts.
found = jp.release(read, clients, plan, ledger=out / "ledger", broadcast=np.float32(1 - index))
np.testing.assert_allclose(found.value, values.sum((0, 1)), atol=3)
print(json.dumps([found.value.tolist(), found.privacy, found.ledger]))
"""


@pytest.mark.long
def test_two_processes_share_a_release_and_refuse_what_cannot_be_shared_before_anything_is_written(
    tmp_path: Path,
) -> None:
    (code, here, errors), (_, there, _) = together(JOINED + ONCE, str(tmp_path))
    assert code == 0, errors
    assert here.splitlines()[-1] == there.splitlines()[-1]
    lines = Chain.read(tmp_path / "ledger").lines
    assert [sum(kind in line for line in lines) for kind in ("event", "release")] == [1, 1]


TRAIN = """
import jax, json, sys
index, address, count, out, sums, private, *also = sys.argv[1:]
if count == "2":
    jax.distributed.initialize(address, 2, int(index))
import numpy as np
import optax
import jaxpfl as jp

values = np.random.default_rng(0).normal(size=(60, 5, 8)).astype(np.float32)
clients = jp.data.from_clients(
    {str(k): {"features": values[k, : k % 5 + 1], "label": np.arange(k % 5 + 1, dtype=np.int32)}
     for k in range(60)}, name="made up", unit="client")
model = jp.models.from_functions(
    lambda key: {"w": jax.random.normal(key, (8,))},
    lambda params, batch: jax.numpy.square(
        batch["features"] @ params["w"] - batch["label"].astype("float32")))
taken = jp.MinSeparation(60, 20, 3) if sums == "blt" else jp.Poisson(60, 20)
people = dict(rounds=4, clip=jp.Clip(0.5), participation=taken)
plan = jp.Plan.without_privacy(**people)
if private == "private":
    kind, trust = ("independent", sums) if sums == "local" else (sums, "central")
    plan = jp.Plan(noise=jp.Noise(1.0, kind, trust=trust), delta=1e-3, **people)
shared = dict(server=optax.sgd(1.0), plan=plan, cohort=jp.CohortSpec(2, 4, clients_per_bucket=8))
algorithm = jp.algorithms.fed_avg(model, client=optax.sgd(0.1), **shared)
if "states" in also:
    algorithm = jp.algorithms.scaffold(model, learning_rate=0.1, variate_clip=1.0, **shared)
answers = {1: "keep", 3: "stop"} if "stops" in also else {}
result = jp.run(algorithm, clients, ledger=out + "/ledger.jsonl", out=out, every=2,
                seed=jp.privacy.ReproducibleSeed(0), resume="resumed" in also,
                on_round=lambda round: answers.get(round.number))
print(json.dumps(np.asarray(result.params["w"]).astype(float).tolist()))
"""


def trained(tmp_path: Path, processes: int, *settings: str) -> list[list[float]]:
    """The parameters that each process ends with."""
    out = str(tmp_path / f"{processes} {' '.join(settings)}")
    found = together(TRAIN, str(processes), out, *settings, processes=processes)
    assert all(code == 0 for code, _, _ in found), found
    return [json.loads(said.splitlines()[-1]) for _, said, _ in found]


@pytest.mark.long
@pytest.mark.parametrize(
    ("noise", "also"), [("independent", ()), ("exact", ("states",)), ("blt", ()), ("local", ())]
)
def test_two_processes_make_the_releases_and_the_ledger_of_one_with_as_many_devices(
    tmp_path: Path, noise: str, also: tuple[str, ...]
) -> None:
    """With `states`, too, which clients keep between rounds and process 0 holds."""
    settings = noise, "private", *also
    (alone,) = trained(tmp_path, 1, *settings)
    assert trained(tmp_path, 2, *settings) == [alone, alone]
    one, two = (tmp_path / f"{number} {' '.join(settings)}" for number in (1, 2))
    # Named by a digest of all states.
    states = [sorted(p.name for p in each.glob("private/client_states/*")) for each in (one, two)]
    assert states[0] == states[1]
    assert bool(states[0]) == bool(also)
    one, two = (Chain.read(each / "ledger.jsonl").lines for each in (one, two))
    # Charges and releases, which are bound to the bits of the sum; the keys of the ledgers differ.
    assert one[1:] == two[1:]
    # Two epochs, whose rounds have a question and a release each.
    lines = [2, 8] if noise == "blt" else [4, 4]
    assert [sum(kind in line for line in two) for kind in ("event", "release")] == lines
    if noise == "independent":
        # Without noise, sums are compensated, and as good.
        (alone,) = trained(tmp_path, 1, noise, "without")
        for found in trained(tmp_path, 2, noise, "without"):
            np.testing.assert_allclose(found, alone, rtol=1e-6)


@pytest.mark.long
def test_a_run_that_two_processes_share_stops_in_both_with_the_parameters_that_were_kept(
    tmp_path: Path,
) -> None:
    (alone,) = trained(tmp_path, 1, "exact", "private", "stops")
    assert trained(tmp_path, 2, "exact", "private", "stops") == [alone, alone]
    assert alone != trained(tmp_path, 1, "exact", "private")[0]
    lines = Chain.read(tmp_path / "2 exact private stops/ledger.jsonl").lines
    assert sum("event" in line for line in lines) == 3


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


# What is wrong in one process of a run that is otherwise that of `TRAIN`; `test_shared_rounds` has
# processes that are not alike.
FAULTS = {
    "out of memory": """
if index == "1":
    from jaxpfl.federated.release.prepared_query import PreparedQuery
    def without_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
    PreparedQuery.sum = without_memory
""",
    "a failure that quotes data": """
if index == "0":
    from jaxpfl.federated.release.prepared_query import PreparedQuery
    def quoting(*_):
        raise KeyError("what client 3 wrote")
    PreparedQuery.sum = quoting
""",
}


def faulty(tmp_path: Path, fault: str) -> tuple[list[tuple[int, str, str]], list[dict]]:
    """What two processes say and the lines of the ledger, if there is one."""
    script = TRAIN.replace("values = ", FAULTS[fault] + "\nvalues = ", 1)
    found = together(script, "2", str(tmp_path / "run"), "independent", "private")
    assert all(code for code, _, _ in found), found
    path = tmp_path / "run" / "ledger.jsonl"
    return found, Chain.read(path).lines if path.exists() else []


@pytest.mark.long
def test_what_fails_in_one_process_is_said_by_all_and_never_released(tmp_path: Path) -> None:
    found, lines = faulty(tmp_path, "out of memory")
    said = "process 1 ran out of memory: give a smaller chunk"
    assert all(said in errors for _, _, errors in found)
    # The round was charged before, but there is no release of it.
    assert sum("event" in line for line in lines) == 1
    assert not any("release" in line for line in lines)


@pytest.mark.long
def test_a_failure_in_process_0_ends_the_others_and_its_text_stays_there(tmp_path: Path) -> None:
    """The others compute at that moment, and do not listen."""
    began = time.monotonic()
    (_, _, here), (_, _, there) = faulty(tmp_path, "a failure that quotes data")[0]
    assert "what client 3 wrote" in here
    assert "process 0 of this run ended: KeyError" in there
    assert "what client 3 wrote" not in there
    # Process 0 waits for the others when it exits, for up to 300 s.
    assert time.monotonic() - began < 200


DISTURBED = """
import os, signal
from jaxpfl.experiments.records.checkpoint import Checkpoints
step = algorithm.step

def full(*_, **__):
    raise OSError(28, "No space left on device", "/home/somebody")

def disturbed(state, release, round):
    state, metrics = step(state, release, round)
    if index == WHO and round == 2:
        DISTURBANCE
    return state, metrics

algorithm = algorithm._replace(step=disturbed)
answers = """
DISTURBANCES = {
    "a last bit": "state = jax.tree.map(lambda x: jax.numpy.nextafter(x, x + 1), state)",
    "an interrupt": "os.kill(os.getpid(), signal.SIGINT)",
    "an exception": "raise KeyError('what client 3 wrote')",
    "a full disk": "Checkpoints.save = full",
}


def disturbed(tmp_path: Path, what: str, who: int) -> tuple[list[tuple[int, str, str]], Path]:
    """What two processes end with, one of which is disturbed in round 2 of 4."""
    script = TRAIN.replace("answers = ", DISTURBED.replace("DISTURBANCE", DISTURBANCES[what]), 1)
    out = tmp_path / "disturbed"
    settings = "2", str(out), "exact", "private"
    return together(script.replace("WHO", repr(str(who))), *settings), out


def lines_of(out: Path) -> list[dict]:
    return Chain.read(out / "ledger.jsonl").lines[1:]


@pytest.mark.long
def test_a_last_bit_that_differs_in_another_process_changes_nothing(tmp_path: Path) -> None:
    """Processors may round a server's step otherwise: what process 0 has counts."""
    (alone,) = trained(tmp_path, 1, "exact", "private")
    ended, out = disturbed(tmp_path, "a last bit", 1)
    assert [json.loads(said.splitlines()[-1]) for _, said, _ in ended] == [alone, alone], ended
    assert lines_of(out) == lines_of(tmp_path / "1 exact private")


@pytest.mark.long
def test_a_last_bit_that_differs_in_process_0_is_that_of_all(tmp_path: Path) -> None:
    ended, out = disturbed(tmp_path, "a last bit", 0)
    here, there = (json.loads(said.splitlines()[-1]) for _, said, _ in ended)
    assert here == there
    assert sum("release" in line for line in lines_of(out)) == 4


@pytest.mark.long
@pytest.mark.parametrize("who", range(2))
def test_an_interrupt_in_one_process_ends_all_after_the_round_and_is_resumed(
    who: int, tmp_path: Path
) -> None:
    ended, out = disturbed(tmp_path, "an interrupt", who)
    for code, _, errors in ended:
        assert code and "interrupted after round 2" in errors, errors
    assert sum("release" in line for line in lines_of(out)) == 2
    (alone,) = trained(tmp_path, 1, "exact", "private")
    for code, said, errors in together(TRAIN, "2", str(out), "exact", "private", "resumed"):
        assert code == 0 and json.loads(said.splitlines()[-1]) == alone, errors
    assert lines_of(out) == lines_of(tmp_path / "1 exact private")


@pytest.mark.long
@pytest.mark.parametrize(("what", "who"), [("an exception", 1), ("a full disk", 0)])
def test_what_ends_one_process_ends_all_and_its_text_stays_there(
    what: str, who: int, tmp_path: Path
) -> None:
    ended, out = disturbed(tmp_path, what, who)
    assert all(code for code, _, _ in ended), ended
    own, heard = ended[who][2], ended[1 - who][2]
    said = ("KeyError", "what client 3 wrote") if who else ("OSError", "/home/somebody")
    assert said[1] in own
    assert f"{said[0]}, of which the output of process {who} says more" in heard
    assert said[1] not in heard
    assert sum("release" in line for line in lines_of(out)) == 2


TWICE = """
from jaxpfl.federated.hosts.processes import Group
for budget in (2.5, 1000.0):
    try:
        jp.run(algorithm, clients, ledger=out + str(budget), out=out + str(budget) + "d",
               budget=jp.Budget(budget, 1e-3), seed=jp.privacy.ReproducibleSeed(0))
        print("ran")
    except jp.BudgetExhausted as error:
        print(error)
with Group():
    try:
        jp.run(algorithm, clients, ledger=out + "/never", out=out + "/never_d")
    except jp.InputError as error:
        assert "one run at a time" in str(error), error
        print("refused")
"""


@pytest.mark.long
def test_a_pair_of_processes_can_fail_once_and_run_again_but_not_twice_at_a_time(
    tmp_path: Path,
) -> None:
    """An exhausted budget ends both with one sentence; what was charged was released."""
    script = TRAIN.split("answers = ")[0] + TWICE
    out, sentences = str(tmp_path / "run"), set()
    for code, said, errors in together(script, "2", out, "independent", "private"):
        assert code == 0, errors
        # Gloo writes from threads of its own, perhaps into the middle of a line.
        sentences |= set(re.findall(r"round \d+ of .*", said))
        assert re.findall(r"\b(ran|refused)(?=\[|$)", said, re.M) == ["ran", "refused"]
    (sentence,) = sentences
    assert "budget" in sentence
    lines = Chain.read(Path(f"{out}2.5")).lines
    charges, releases = (sum(kind in line for line in lines) for kind in ("event", "release"))
    assert 0 < charges == releases < 4
    assert not Path(out, "never_d").exists()
