"""Rounds of Flower: its FedAvg under its own central clipping and noise, in its simulation.

python -m benchmarks.peers.flower_round FILE

The simulation runs on Ray, with an actor, whose PyTorch has one thread, for each core.
"""

import functools
import importlib.metadata
import json
import os
import sys

import ray  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from flwr.app import (  # pyright: ignore[reportMissingImports]
    ArrayRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp.strategy import (  # pyright: ignore[reportMissingImports]
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.simulation import run_simulation  # pyright: ignore[reportMissingImports]

from benchmarks.peers import work
from benchmarks.peers.network_torch import Network, tensors


@functools.cache
def loaded(file: str) -> tuple[Network, list]:
    """The network and the clients, which an actor loads once."""
    torch.set_num_threads(1)
    arrays, held = work.load(file)
    return Network(arrays), [tensors(*pair) for pair in work.each(held)]


def client_app(file: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        network, held = loaded(file)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        image, label = held[int(context.node_config["partition-id"])]
        optimizer = torch.optim.SGD(network.parameters(), lr=work.LEARNING_RATE)
        for image_B, label_B in zip(image.split(work.BATCH), label.split(work.BATCH), strict=True):
            optimizer.zero_grad()
            network.loss(image_B, label_B).backward()
            optimizer.step()
        # Of equal weight each, which its private strategy needs.
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


class Mean(FedAvg):
    """Keeps the norm of the mean change before noise."""

    norm = 0.0

    def configure_train(self, server_round, arrays, config, grid):
        self.start = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        mean, metrics = super().aggregate_train(server_round, replies)
        changed = mean.to_torch_state_dict()
        change = [torch.linalg.vector_norm(changed[name] - self.start[name]) for name in changed]
        self.norm = torch.linalg.vector_norm(torch.stack(change)).item()
        return mean, metrics


class Asked(DifferentialPrivacyServerSideFixedClipping):
    """Waits for a line before each round, and answers after it."""

    def configure_train(self, server_round, arrays, config, grid):
        if not sys.stdin.readline():
            # The driver has hung up.
            ray.shutdown()
            os._exit(0)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        _, metrics = super().aggregate_train(server_round, replies)
        print(json.dumps({"norm": self.strategy.norm}), file=sys.__stdout__, flush=True)
        # The model stays where it was, as in every program here.
        return self.current_arrays, metrics


def server_app(file: str) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        arrays, held = work.load(file)
        mean, count = Mean(fraction_evaluate=0.0), len(held["offsets"]) - 1
        start = ArrayRecord(Network(arrays).state_dict())
        versions = {name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch")}
        print(json.dumps(versions), file=sys.__stdout__, flush=True)
        Asked(mean, work.NOISE, work.CLIP_NORM, count).start(grid, start, num_rounds=1_000_000)

    return app


def main(file: str) -> None:
    _, held = work.load(file)
    cores = os.cpu_count() or 1
    run_simulation(
        server_app(file),
        client_app(file),
        num_supernodes=len(held["offsets"]) - 1,
        backend_config={
            "init_args": {"num_cpus": cores, "num_gpus": 0, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    # Ray's actors find what they run by the name of this module, which is not `__main__` there.
    from benchmarks.peers import flower_round

    flower_round.main(sys.argv[1])
