"""A step of DP-SGD in Opacus, whose privacy engine makes the model, the loss and the optimizer.

    python -m benchmarks.peers.opacus_examples FILE MODE

MODE is Opacus's way to each example's norm: "hooks" keeps every example's gradient, "ghost" (fast
gradient clipping) has the norms alone from a first backward pass, and the sum from a second.
"""

import importlib.metadata
import sys
import warnings

import opacus  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from benchmarks.peers import work
from benchmarks.peers.network_torch import Network, tensors


def layers(arrays: work.Arrays) -> nn.Sequential:
    """The network of `network_torch` in layers, which Opacus needs, with the same parameters."""
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, work.CLASSES),
    )
    given = dict(Network(arrays).named_parameters())
    names = [f"{name}_{leaf}" for name in work.LAYERS for leaf in ("kernel", "bias")]
    with torch.no_grad():
        for parameter, name in zip(network.parameters(), names, strict=True):
            parameter.copy_(given[name])
    return network


def main(file: str, mode: str) -> None:
    # Opacus has much to say about its generator of noise and about hooks on the first layer.
    warnings.simplefilter("ignore")
    arrays, held = work.load(file)
    image, label = tensors(held["image"], held["label"])
    network = layers(arrays)
    made = opacus.PrivacyEngine().make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=work.LEARNING_RATE),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(image, label), batch_size=len(label)
        ),
        noise_multiplier=work.NOISE,
        max_grad_norm=work.EXAMPLE_CLIP_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    network, optimizer, *criterion, _ = made
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
    start = [leaf.detach().clone() for leaf in network.parameters()]

    def round_() -> float:
        with torch.no_grad():
            torch._foreach_copy_(list(network.parameters()), start)
        optimizer.zero_grad()
        criterion(network(image), label).backward()
        optimizer.step()
        # The sum before noise, which the optimizer keeps.
        norms = torch.stack([leaf.summed_grad.norm() for leaf in network.parameters()])
        return norms.norm().item() / len(label)

    versions = {name: importlib.metadata.version(name) for name in ("opacus", "torch")}
    work.serve(round_, **versions)


if __name__ == "__main__":
    main(*sys.argv[1:])
