"""FedProx, AdaFedProx and SCAFFOLD of pfl: the parameters after each of a few noiseless rounds.

    python -m benchmarks.peers.pfl_algorithms FILE ALGORITHM OUT

FILE holds parameters, clients and settings (`against_pfl`); OUT gets the parameters by round.

"scaffold" is pfl's own SCAFFOLD, "scaffold_mended" the same with its two control variates
exchanged in the local step. pfl 0.6.0 takes the change of the model, y - x, where the paper's
option II has x - y (`algorithm/scaffold.py`), and so its variates are minus the paper's; the local
step adds c - c_i as in the paper, which then pushes a client the wrong way.
"""

import importlib.metadata
import json
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from pfl.aggregate.simulate import SimulatedBackend  # pyright: ignore[reportMissingImports]
from pfl.algorithm.base import NNAlgorithmParams  # pyright: ignore[reportMissingImports]
from pfl.algorithm.federated_averaging import (  # pyright: ignore[reportMissingImports]
    FederatedAveraging,
)
from pfl.algorithm.fedprox import (  # pyright: ignore[reportMissingImports]
    AdaptMuOnMetricCallback,
    FedProx,
    FedProxParams,
)
from pfl.algorithm.scaffold import (  # pyright: ignore[reportMissingImports]
    SCAFFOLD,
    SCAFFOLDParams,
)
from pfl.callback.base import TrainingProcessCallback  # pyright: ignore[reportMissingImports]
from pfl.common_types import Population  # pyright: ignore[reportMissingImports]
from pfl.data.dataset import Dataset  # pyright: ignore[reportMissingImports]
from pfl.data.federated_dataset import FederatedDataset  # pyright: ignore[reportMissingImports]
from pfl.data.sampling import get_user_sampler  # pyright: ignore[reportMissingImports]
from pfl.data.user_state import InMemoryUserStateStorage  # pyright: ignore[reportMissingImports]
from pfl.hyperparam.base import NNTrainHyperParams  # pyright: ignore[reportMissingImports]
from pfl.internal.bridge import FrameworkBridgeFactory  # pyright: ignore[reportMissingImports]
from pfl.metrics import (  # pyright: ignore[reportMissingImports]
    Metrics,
    TrainMetricName,
    Weighted,
)
from pfl.model.pytorch import PyTorchModel  # pyright: ignore[reportMissingImports]

NAMES = ("w1", "b1", "w2", "b2")


class Network(torch.nn.Module):
    """One hidden layer."""

    def __init__(self, arrays):
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(arrays[name].copy())))

    def loss(self, x, y):
        hidden = torch.tanh(x @ self.w1 + self.b1)
        return torch.nn.functional.cross_entropy(hidden @ self.w2 + self.b2, y)

    def metrics(self, x, y):
        """The mean loss of a client, which counts as one, however many images it has."""
        return {"loss": Weighted(self.loss(x, y).item(), 1)}


class Rounds(TrainingProcessCallback):
    """Notes the parameters after each round."""

    def __init__(self):
        self.found = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        held = model.pytorch_model
        self.found.append({name: getattr(held, name).detach().numpy().copy() for name in NAMES})
        return False, Metrics()


def exchange_variates() -> None:
    """From now on a client's step adds minus what pfl adds to the gradient."""
    shipped = FrameworkBridgeFactory.scaffold_bridge()

    class Mended:
        @staticmethod
        def do_control_variate_sgd(model, user_dataset, train_params, local_c, server_c):
            shipped.do_control_variate_sgd(
                model, user_dataset, train_params, local_c=server_c, server_c=local_c
            )

    FrameworkBridgeFactory.scaffold_bridge = staticmethod(lambda: Mended)


def main(file: str, name: str, out: str) -> None:
    with np.load(file, allow_pickle=False) as stored:
        arrays = dict(stored)
    ends, settings = arrays["offsets"], json.loads(str(arrays["settings"]))
    data = [
        [torch.from_numpy(arrays["x"][a:b]), torch.from_numpy(arrays["y"][a:b])]
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    users = FederatedDataset(
        lambda user: Dataset(raw_data=data[user], user_id=str(user)),
        get_user_sampler("minimize_reuse", range(len(data))),
    )
    network, rounds = Network(arrays), Rounds()
    callbacks: list = [rounds]
    ada = name == "ada_fed_prox"
    server_rate = settings["ada_server_rate"] if ada else 1.0
    server = torch.optim.SGD(network.parameters(), lr=server_rate)
    model = PyTorchModel(network, torch.optim.SGD, server)
    common = dict(
        central_num_iterations=settings["rounds"],
        evaluation_frequency=1 if ada else settings["rounds"] + 1,
        train_cohort_size=len(data),
        val_cohort_size=None,
    )
    if name == "fed_avg":
        algorithm, params = FederatedAveraging(), NNAlgorithmParams(**common)
    elif name == "fed_prox":
        algorithm, params = FedProx(), FedProxParams(**common, mu=settings["mu"])
    elif ada:
        loss = TrainMetricName("loss", Population.TRAIN, after_training=False)
        mu = AdaptMuOnMetricCallback(loss, 1, decrease_mu_after_consecutive_improvements=5)
        algorithm, params = FedProx(), FedProxParams(**common, mu=mu)
        callbacks.append(mu)
    else:
        if name == "scaffold_mended":
            exchange_variates()
        algorithm = SCAFFOLD()
        params = SCAFFOLDParams(
            **common,
            population=len(data),
            use_gradient_as_control_variate=False,
            user_state_storage=InMemoryUserStateStorage(),
        )
    algorithm.run(
        params,
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(
            local_num_epochs=settings["steps"],
            local_learning_rate=settings["rate"],
            local_batch_size=None,
        ),
        callbacks=callbacks,
        send_metrics_to_platform=False,
    )
    np.savez(out, **{f"{name}.{i}": a for i, r in enumerate(rounds.found) for name, a in r.items()})
    print(json.dumps({name: importlib.metadata.version(name) for name in ("pfl", "torch")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
