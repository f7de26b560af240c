"""A loop over clients in PyTorch, written as one would for speed.

    python -m benchmarks.peers.torch_loop FILE [PROCESSES]

With 1 process (the default), PyTorch's threads share each product. With more, each process trains a
share of the clients on one thread, and writes its sum to memory that all see.
"""

import sys

import torch  # pyright: ignore[reportMissingImports]
import torch.multiprocessing  # pyright: ignore[reportMissingImports]

from benchmarks.peers import work
from benchmarks.peers.network_torch import Network, tensors

Tensors = list[torch.Tensor]


def add_clients(network: Network, start: Tensors, held: list, total: Tensors) -> None:
    """Adds each client's clipped change to `total`."""
    parameters = list(network.parameters())
    for image, label in held:
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        batches = zip(image.split(work.BATCH), label.split(work.BATCH), strict=True)
        for image_B, label_B in batches:
            gradients = torch.autograd.grad(network.loss(image_B, label_B), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-work.LEARNING_RATE)
        with torch.no_grad():
            change = torch._foreach_sub(parameters, start)
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(change)))
            factor = min(1.0, work.CLIP_NORM / norm.item())
            torch._foreach_add_(total, change, alpha=factor)


def released(start: Tensors, total: Tensors, clients: int) -> float:
    """The noisy mean, applied to a copy; returns the norm of the mean before noise."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(total))).item()
    deviation = work.NOISE * work.CLIP_NORM
    torch._foreach_add_(total, [torch.randn_like(leaf) for leaf in total], alpha=deviation)
    torch._foreach_add(start, total, alpha=1 / clients)
    return norm / clients


def _worker(file: str, index: int, count: int, total: Tensors, doors) -> None:
    torch.set_num_threads(1)
    arrays, clients = work.load(file)
    network = Network(arrays)
    start = [leaf.detach().clone() for leaf in network.parameters()]
    held = [tensors(*pair) for pair in work.each(clients)][index::count]
    begin, end = doors
    while True:
        begin.wait()
        torch._foreach_zero_(total)
        add_clients(network, start, held, total)
        end.wait()


def main(file: str, processes: int = 1) -> None:
    arrays, clients = work.load(file)
    network = Network(arrays)
    start = [leaf.detach().clone() for leaf in network.parameters()]
    count = len(clients["offsets"]) - 1
    if processes == 1:
        held = [tensors(*pair) for pair in work.each(clients)]

        def round_() -> float:
            total = [torch.zeros_like(leaf) for leaf in start]
            add_clients(network, start, held, total)
            return released(start, total, count)

    else:
        context = torch.multiprocessing.get_context("spawn")
        doors = context.Barrier(processes + 1), context.Barrier(processes + 1)
        totals = [
            [torch.zeros_like(leaf).share_memory_() for leaf in start] for _ in range(processes)
        ]
        for index, total in enumerate(totals):
            given = (file, index, processes, total, doors)
            context.Process(target=_worker, args=given, daemon=True).start()

        def round_() -> float:
            for door in doors:
                door.wait()
            total = [leaf.clone() for leaf in totals[0]]
            for other in totals[1:]:
                torch._foreach_add_(total, other)
            return released(start, total, count)

    work.serve(round_, torch=torch.__version__)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
