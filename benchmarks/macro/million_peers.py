"""What pfl and TensorFlow Federated need for the clients of `million`, by their own code.

    python -m benchmarks.macro.million_peers --folder DISK --pfl PYTHON --tff PYTHON

The population of `million`, smaller, in the form that each library reads: ours as `jaxpfl convert`
writes it; for TFF the SQLite file of its `SqlClientData`; for pfl, which leaves reading to a
function of the user, raw memory-mapped arrays, the least that it can cost. Then, each in a process
of its own, imports left out:

- `open`: until clients can be sampled: the list of users, or the fingerprints;
- `first cohort`: its sampling, and its examples in memory;
- `before the rounds`: ours identifies the data and the client's program, TFF compiles;
- `first round` and `a later round`: each client one batch of at most 16 examples of a softmax
  regression, clip 0.5, Gaussian noise: DP-FedAvg by each library's own algorithm;
- ", processor": the processor time of the program itself, without TFF's worker.

Two sizes, for the slope: what grows with the number of clients is what a million would need. The
environments are made as for `benchmarks.peers` and by tools/tff_environment.sh.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Container, Iterator

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.macro.large_population import forget, written
from benchmarks.macro.million import Config, generate
from benchmarks.macro.stackoverflow import watched
from benchmarks.micro.tff import entry, field, varint, write_sqlite

OURS = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np, optax
import jaxpfl as jp
from jaxpfl.data import Cohort, open as opened
begin()
clients = opened(folder + "/clients")
end("open")
spec = jp.CohortSpec(16, 16, clients_per_bucket=64)
chosen = np.sort(np.random.default_rng(0).choice(len(clients), cohort, replace=False))
examples = sum(int(bucket.mask.sum()) for bucket in Cohort(clients, chosen, spec, seed=1, round=0))
end("first cohort")
def loss(params, batch):
    scores = batch["x"].astype("float32") / 255 @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
model = jp.models.from_functions(
    lambda key: {"w": jax.numpy.zeros((784, 10)), "b": jax.numpy.zeros(10)}, loss)
plan = jp.Plan(clip=jp.Clip(0.5), participation=jp.Poisson(len(clients), cohort), rounds=1000,
               noise=jp.Noise(0.5), delta=1e-7)
algorithm = jp.algorithms.fed_avg(
    model, client=optax.sgd(0.1), server=optax.sgd(1.0), plan=plan, cohort=spec)
def watch(round):
    end("before the rounds" if round.number == 0 else
        "first round" if round.number == 1 else "a later round")
    return "stop" if round.number == 3 else None
jp.run(algorithm, clients, ledger=folder + "/ledger", out=folder + "/run", on_round=watch)
"""
PFL = """
import numpy as np, torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
begin()
offsets = np.load(folder + "/others/offsets.npy", mmap_mode="r")
x = np.memmap(folder + "/others/x", np.uint8, "r").reshape(-1, 784)
label = np.load(folder + "/others/label.npy", mmap_mode="r")
def user(number):
    part = slice(offsets[number], min(offsets[number] + 16, offsets[number + 1]))
    pixels = torch.from_numpy(x[part].astype(np.float32) / 255)
    return Dataset([pixels, torch.from_numpy(label[part].astype(np.int64))], user_id=str(number))
users = FederatedDataset(user, get_user_sampler("random", list(range(len(offsets) - 1))))
end("open")
examples = sum(len(data) for data, _ in users.get_cohort(cohort))
end("first cohort")
class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(784, 10)
    def loss(self, x, y, eval=False):
        self.train(not eval)
        return torch.nn.functional.cross_entropy(self.layer(x), y)
    def metrics(self, x, y):
        return {}
class Timed(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        end("first round" if central_iteration == 0 else "a later round")
        return False, Metrics()
network = Regression()
backend = SimulatedBackend(
    training_data=users, val_data=users,
    postprocessors=[CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.5, 0.5))])
FederatedAveraging().run(
    NNAlgorithmParams(central_num_iterations=3, evaluation_frequency=1000,
                      train_cohort_size=cohort, val_cohort_size=None),
    backend, PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=16),
    callbacks=[Timed()], send_metrics_to_platform=False)
"""
TFF = """
import numpy as np, tensorflow as tf, tensorflow_federated as tff
tff.backends.native.set_sync_local_cpp_execution_context()
begin()
spec = {"x": tf.TensorSpec([], tf.string), "label": tf.TensorSpec([], tf.int64)}
read = tff.simulation.datasets.load_and_parse_sql_client_data
data = read(folder + "/others/clients.sqlite", spec)
end("open")
def batches(example):
    pixels = tf.reshape(tf.io.decode_raw(example["x"], tf.uint8), [784])
    return tf.cast(pixels, tf.float32) / 255, tf.cast(example["label"], tf.int32)
generator = np.random.default_rng(0)
def sampled():
    return [data.create_tf_dataset_for_client(user).take(16).map(batches).batch(16)
            for user in generator.choice(data.client_ids, cohort, replace=False)]
examples = sum(len(y) for each in sampled() for _, y in each)
end("first cohort")
@tf.function
def scores(weights, x, training):
    return tf.matmul(x, weights[0][0]) + weights[0][1]
@tf.function
def loss(output, label, sample_weight=None):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, output))
zeros = (np.zeros((784, 10), np.float32), np.zeros(10, np.float32))
model = tff.learning.models.FunctionalModel(
    initial_weights=(zeros, ()), predict_on_batch_fn=scores, loss_fn=loss,
    input_spec=(tf.TensorSpec([None, 784], tf.float32), tf.TensorSpec([None], tf.int32)))
process = tff.learning.algorithms.build_unweighted_fed_avg(
    model, client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
    model_aggregator=tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(0.5, cohort, 0.5))
state = process.initialize()
end("before the rounds")
for number in range(3):
    state = process.next(state, sampled()).state
    end("a later round" if number else "first round")
# Its worker would outlive it, and hold its output open.
import glob, os
for path in glob.glob("/proc/self/task/*/children"):
    for child in open(path).read().split():
        os.kill(int(child), 9)
"""
TIMED = """
import json, sys, time
folder, cohort = sys.argv[1], int(sys.argv[2])
found = {}
def begin():
    global last, last_cpu
    last, last_cpu = time.perf_counter(), time.process_time()
def end(name):
    # Of two later rounds, the mean.
    part = 0.5 if name == "a later round" else 1.0
    for each, taken in (name, time.perf_counter() - last), (
        name + ", processor", time.process_time() - last_cpu):
        found[each] = found.get(each, 0.0) + part * taken
    begin()
"""
TOLD = "\nprint(json.dumps(found | {'examples': examples}))"


@dataclasses.dataclass(frozen=True)
class Peers:
    folder: pathlib.Path  # on a disk with room; what is made is removed at the end
    pfl: pathlib.Path | None = None
    tff: pathlib.Path | None = None
    without: tuple[str, ...] = ()  # such as jaxpfl
    clients: tuple[int, ...] = (10_000, 100_000)
    cohort: int = 100


def main(config: Peers) -> None:
    found = ("pfl", config.pfl, PFL), ("TFF", config.tff, TFF), ("jaxpfl", sys.executable, OURS)
    programs = [each for each in found if each[1] is not None and each[0] not in config.without]
    config.folder.mkdir(parents=True, exist_ok=True)
    for clients in config.clients:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="peers-", dir=config.folder))
        try:
            population, names = Config(clients=clients), [name for name, *_ in programs]
            sizes = write(folder / "clients", folder / "others", population, names)
            for name, python, code in programs:
                forget(folder / ("clients" if name == "jaxpfl" else "others"))
                program = TIMED + code + TOLD
                done = watched(str(python), "-c", program, str(folder), str(config.cohort))
                row = {"what": name, "clients": clients, "cohort": config.cohort}
                row |= json.loads(done.output.splitlines()[-1])
                row |= {"folder MB": sizes[name], "peak MB": done.peak}
                row |= {"anonymous MB": done.anonymous, "load average": os.getloadavg()[0]}
                print(json.dumps(row), flush=True)
                harness.record("million_peers", [row])
        finally:
            shutil.rmtree(folder)


def write(
    clients: pathlib.Path, folder: pathlib.Path, config: Config, names: Container[str]
) -> dict[str, float]:
    """Writes the population as the libraries in `names` read it: ours to `clients`; MB of each."""
    sizes = {}
    if "jaxpfl" in names:
        sizes["jaxpfl"] = written(clients, lambda: generate(config)) / 2**20
    folder.mkdir()
    if "pfl" in names:
        sizes["pfl"] = arrays(folder, config) / 2**20
    if "TFF" in names:
        table(folder / "clients.sqlite", config)
        sizes["TFF"] = (folder / "clients.sqlite").stat().st_size / 2**20
    return sizes


def arrays(folder: pathlib.Path, config: Config) -> int:
    """Writes pixels, labels and offsets; their bytes."""
    labels, sizes = [], [0]
    with (folder / "x").open("wb") as raw:
        for batch in generate(config).batches:
            raw.write(np.asarray(batch.columns["x"]).tobytes())
            labels.append(batch.columns["label"])
            sizes += batch.sizes
    np.save(folder / "label.npy", np.concatenate(labels))
    np.save(folder / "offsets.npy", np.cumsum(sizes))
    return sum(path.stat().st_size for path in folder.iterdir())


def table(path: pathlib.Path, config: Config) -> None:
    """Writes TFF's database, with an index: without one, a client is a scan of all."""
    users = (
        (user, size)
        for batch in generate(config).batches
        for user, size in zip(batch.client_ids, batch.sizes, strict=True)
    )
    counts: list[tuple[str, int]] = []

    def examples() -> Iterator[tuple[str, bytes]]:
        user, rest = "", 0
        for batch in generate(config).batches:
            rows, classes = batch.columns["x"], np.asarray(batch.columns["label"])
            for pixels, label in zip(np.asarray(rows), classes.tolist(), strict=True):
                if not rest:
                    user, rest = next(users)
                    counts.append((user, rest))
                rest -= 1
                features = entry("x", 1, pixels.tobytes()) + entry("label", 3, varint(label))
                yield user, field(1, features)

    write_sqlite(path, examples(), counts, index=True)


if __name__ == "__main__":
    main(tyro.cli(Peers, description=__doc__))
