"""The other side of `benchmarks.macro.word_lm`: DP-FedAvg in a loop over clients, in PyTorch.

    python word_lm_against.py FILE.npz

The file holds the parameters, the clients' tokens and the settings. One line answers the start:
the version, the threads and the first batch's loss; then each line read runs one round and is
answered with the norm of its sum. Written as one would for speed: the inputs' share of the gates
is one product over all steps, the loss PyTorch's fused one, the parameters are updated in place.
"""

import json
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]


class WordLM(torch.nn.Module):
    """The CIFG language model with projection and tied output."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        super().__init__()

        def parameter(array: np.ndarray) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.from_numpy(array.copy()))

        inputs = arrays["embedding"].shape[1]
        self.embedding = parameter(arrays["embedding"])
        self.inputs = parameter(arrays["kernel"][:inputs])
        self.recurrent = parameter(arrays["kernel"][inputs:])
        self.bias = parameter(arrays["bias"])
        self.projection = parameter(arrays["projection"])
        self.output_bias = parameter(arrays["output_bias"])

    def forward(self, tokens_TxB: torch.Tensor) -> torch.Tensor:
        """Logits [T * B, V]."""
        x_TxBxE = torch.nn.functional.embedding(tokens_TxB, self.embedding)
        gates_TxBx3H = torch.addmm(self.bias, x_TxBxE.flatten(0, 1), self.inputs)
        gates_TxBx3H = gates_TxBx3H.view(*tokens_TxB.shape, -1)
        m_BxP = gates_TxBx3H.new_zeros(tokens_TxB.shape[1], self.projection.shape[1])
        c_BxH = gates_TxBx3H.new_zeros(tokens_TxB.shape[1], self.projection.shape[0])
        outputs = []
        for gates_Bx3H in gates_TxBx3H.unbind(0):
            j, f, o = torch.addmm(gates_Bx3H, m_BxP, self.recurrent).chunk(3, dim=1)
            # F c + (1 - F) tanh(j)
            c_BxH = torch.lerp(torch.tanh(j), c_BxH, torch.sigmoid(f + 1))
            m_BxP = (torch.sigmoid(o) * torch.tanh(c_BxH)) @ self.projection
            outputs.append(m_BxP)
        m_NxP = torch.stack(outputs).flatten(0, 1)
        return torch.addmm(self.output_bias, m_NxP, self.embedding.t())

    def loss(self, tokens_BxL: torch.Tensor) -> torch.Tensor:
        tokens_LxB = tokens_BxL.t()
        return torch.nn.functional.cross_entropy(
            self(tokens_LxB[:-1]), tokens_LxB[1:].reshape(-1), ignore_index=-1
        )


def round_(model: WordLM, start: list[torch.Tensor], data: dict[str, np.ndarray]) -> float:
    """One round on all clients; returns the norm of the sum of the clipped changes."""
    parameters = list(model.parameters())
    learning_rate, clip_norm = float(data["learning_rate"]), float(data["clip_norm"])
    total = [torch.zeros_like(leaf) for leaf in start]
    for tokens_SxBxL in torch.from_numpy(data["tokens"]):
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        for tokens_BxL in tokens_SxBxL:
            gradients = torch.autograd.grad(model.loss(tokens_BxL), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-learning_rate)
        with torch.no_grad():
            change = torch._foreach_sub(parameters, start)
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(change)))
            torch._foreach_add_(total, change, alpha=min(1.0, clip_norm / norm.item()))
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(total))).item()
    noise = float(data["noise"]) * clip_norm
    torch._foreach_add_(total, [torch.randn_like(leaf) for leaf in total], alpha=noise)
    with torch.no_grad():
        torch._foreach_add(start, total, alpha=1 / len(data["tokens"]))
    return norm


def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        data = dict(arrays)
    data["tokens"] = data["tokens"].astype(np.int64)
    model = WordLM(data)
    start = [leaf.detach().clone() for leaf in model.parameters()]
    first = model.loss(torch.from_numpy(data["tokens"][0, 0])).item()
    hello = {"version": f"{torch.__version__}, {torch.get_num_threads()} threads", "loss": first}
    print(json.dumps(hello), flush=True)
    for _ in sys.stdin:
        print(round_(model, start, data), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
