"""Rounds of pfl: `FederatedAveraging` on its simulated backend, with the Gaussian mechanism.

python -m benchmarks.peers.pfl_round FILE
"""

import importlib.metadata
import json
import sys

import torch  # pyright: ignore[reportMissingImports]
from pfl.aggregate.simulate import SimulatedBackend  # pyright: ignore[reportMissingImports]
from pfl.algorithm.base import NNAlgorithmParams  # pyright: ignore[reportMissingImports]
from pfl.algorithm.federated_averaging import (  # pyright: ignore[reportMissingImports]
    FederatedAveraging,
)
from pfl.callback.base import TrainingProcessCallback  # pyright: ignore[reportMissingImports]
from pfl.data.dataset import Dataset  # pyright: ignore[reportMissingImports]
from pfl.data.federated_dataset import FederatedDataset  # pyright: ignore[reportMissingImports]
from pfl.data.sampling import get_user_sampler  # pyright: ignore[reportMissingImports]
from pfl.hyperparam.base import NNTrainHyperParams  # pyright: ignore[reportMissingImports]
from pfl.metrics import Metrics  # pyright: ignore[reportMissingImports]
from pfl.model.pytorch import PyTorchModel  # pyright: ignore[reportMissingImports]
from pfl.postprocessor.base import Postprocessor  # pyright: ignore[reportMissingImports]
from pfl.privacy.gaussian_mechanism import GaussianMechanism  # pyright: ignore[reportMissingImports]
from pfl.privacy.privacy_mechanism import (  # pyright: ignore[reportMissingImports]
    CentrallyAppliedPrivacyMechanism,
)

from benchmarks.peers import work
from benchmarks.peers.network_torch import Network, tensors


class Trained(Network):
    """The network with the method that pfl also asks for."""

    def metrics(self, image, label):
        return {}


class Norm(Postprocessor):
    """Keeps the norm of the mean before noise: the server runs the last postprocessor first."""

    last = 0.0

    def postprocess_server(self, *, stats, central_context, aggregate_metrics):
        _, leaves = stats.get_weights()
        norms = torch.stack([torch.linalg.vector_norm(leaf) for leaf in leaves])
        self.last = torch.linalg.vector_norm(norms).item() / central_context.cohort_size
        return stats, Metrics()


class Asked(TrainingProcessCallback):
    """Answers each round, and waits for the next line before the next one."""

    def __init__(self, norm: Norm):
        self.norm = norm

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        print(json.dumps({"norm": self.norm.last}), flush=True)
        return not sys.stdin.readline(), Metrics()


def main(file: str) -> None:
    arrays, held = work.load(file)
    data = [tensors(*pair) for pair in work.each(held)]
    network, norm = Trained(arrays), Norm()
    users = FederatedDataset(
        lambda user: Dataset(raw_data=list(data[user]), user_id=str(user)),
        get_user_sampler("minimize_reuse", range(len(data))),
    )
    mechanism = GaussianMechanism(work.CLIP_NORM, work.NOISE)
    backend = SimulatedBackend(
        training_data=users,
        val_data=users,
        postprocessors=[CentrallyAppliedPrivacyMechanism(mechanism), norm],
    )
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    versions = {name: importlib.metadata.version(name) for name in ("pfl", "torch")}
    print(json.dumps(versions), flush=True)
    sys.stdin.readline()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1_000_000,
            # Evaluation is no part of the round.
            evaluation_frequency=1_000_001,
            train_cohort_size=len(data),
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.LEARNING_RATE, local_batch_size=work.BATCH
        ),
        callbacks=[Asked(norm)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(sys.argv[1])
