"""Rounds of fluke: its FedAvg, with a server that clips each client's change and adds noise.

python -m benchmarks.peers.fluke_round FILE

fluke's own private algorithm clips the gradients of examples, so clients are clipped here in a
class derived from its server, which is the way in which it is extended.
"""

import importlib.metadata
import io
import sys
from contextlib import redirect_stdout

import torch  # pyright: ignore[reportMissingImports]
from fluke import DDict, FlukeENV  # pyright: ignore[reportMissingImports]
from fluke.algorithms.fedavg import FedAVG  # pyright: ignore[reportMissingImports]
from fluke.data import FastDataLoader  # pyright: ignore[reportMissingImports]
from fluke.server import Server  # pyright: ignore[reportMissingImports]

from benchmarks.peers import work
from benchmarks.peers.network_torch import Network, tensors
from benchmarks.peers.torch_loop import released


class PrivateServer(Server):
    """Clips and sums what clients send; the model stays where it was, as in every program here."""

    norm = 0.0

    def aggregate(self, eligible, client_models):
        with torch.no_grad():
            start = [leaf.detach() for leaf in self.model.parameters()]
            total = [torch.zeros_like(leaf) for leaf in start]
            for model in client_models:
                change = torch._foreach_sub([leaf.detach() for leaf in model.parameters()], start)
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(change)))
                torch._foreach_add_(total, change, alpha=min(1.0, work.CLIP_NORM / norm.item()))
            self.norm = released(start, total, len(eligible))


class DPFedAvg(FedAVG):
    def get_server_class(self):
        return PrivateServer

    def finalize(self):
        """Nothing: after each call of `run` it would evaluate, and close what holds the clients."""


class Held:
    """What fluke asks for the clients' data: one loader each, no test sets."""

    def __init__(self, held: work.Arrays):
        self.pairs = [tensors(*pair) for pair in work.each(held)]

    def assign(self, clients: int, batch_size: int):
        loaders = [
            FastDataLoader(
                *pair, num_labels=work.CLASSES, batch_size=batch_size, skip_singleton=False
            )
            for pair in self.pairs
        ]
        return (loaders, [None] * clients), None


def main(file: str) -> None:
    arrays, held = work.load(file)
    data = Held(held)
    FlukeENV().set_evaluator(None)
    FlukeENV().set_eval_cfg(post_fit=False, pre_fit=False, locals=False, server=False)
    client = DDict(
        batch_size=work.BATCH,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=work.LEARNING_RATE),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
    )
    settings = DDict(client=client, server=DDict(weighted=False), model=Network(arrays))
    algorithm = DPFedAvg(len(data.pairs), data, settings)

    def round_() -> float:
        # It draws its progress on the standard output, which is the driver's.
        with redirect_stdout(io.StringIO()):
            algorithm.run(n_rounds=1, eligible_perc=1.0, finalize=False)
        return algorithm.server.norm

    versions = {name: importlib.metadata.version(name) for name in ("fluke-fl", "torch")}
    work.serve(round_, **versions)


if __name__ == "__main__":
    main(sys.argv[1])
