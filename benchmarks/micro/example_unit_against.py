"""The other side of `benchmarks.micro.example_unit --words`: Opacus's clipped sums over sentences.

    python example_unit_against.py FILE.npz

The file holds the vocabulary, the sentences [B, L + 1] and Opacus's way to each example's norm:
"hooks" keeps every example's gradient, "ghost" (fast gradient clipping) has the norms alone from a
first backward pass, and the sum from a second. One line answers the start; then each line read
makes one clipped sum, in one thread, and is answered with the processor time that it took.

Opacus has no CIFG cell and no tied weights. The model is its LSTM with as many parameters as the
CIFG layer, between an embedding and an output matrix of the sizes of ours.
"""

import importlib.metadata
import json
import resource
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import opacus  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from opacus.layers import DPLSTM  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

EMBEDDING, HIDDEN = 96, 281  # 4 H (96 + H + 2) + 96 H: 453,096; a CIFG layer of 670 has 452,250


class WordLM(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = DPLSTM(EMBEDDING, HIDDEN, batch_first=True)
        self.projection = nn.Linear(HIDDEN, EMBEDDING, bias=False)
        self.output = nn.Linear(EMBEDDING, vocabulary)

    def forward(self, tokens_BxT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        hidden_BxTxH, _ = self.lstm(self.embedding(tokens_BxT))
        return self.output(self.projection(hidden_BxTxH))


def main(file: str) -> None:
    # Opacus has much to say about its generator of noise and about hooks on the first layer.
    warnings.simplefilter("ignore")
    # Threads that wait for each other would take processor time, too.
    torch.set_num_threads(1)
    with np.load(file, allow_pickle=False) as arrays:
        data = dict(arrays)
    tokens_BxL = torch.from_numpy(data["tokens"].astype(np.int64))
    inputs_BxT, targets_N = tokens_BxL[:, :-1].contiguous(), tokens_BxL[:, 1:].reshape(-1)
    network, mode = WordLM(int(data["vocabulary"])), str(data["mode"])
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(tokens_BxL), batch_size=len(tokens_BxL)
    )
    network, optimizer, *criterion, _ = opacus.PrivacyEngine().make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
    shape = {"shape": inputs_BxT.shape} if mode == "ghost" else {}

    def clipped_sum() -> None:
        optimizer.zero_grad()
        criterion(network(inputs_BxT).flatten(0, 1), targets_N, **shape).backward()
        optimizer.accumulate() if mode == "ghost" else optimizer.clip_and_accumulate()

    versions = {name: importlib.metadata.version(name) for name in ("opacus", "torch")}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize() / 2**20
    print(json.dumps({**versions, "resident MB": resident}), flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        clipped_sum()
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
