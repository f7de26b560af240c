"""The EMNIST CNN in PyTorch, for the programs that use it."""

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]


class Network(torch.nn.Module):
    """Conv 32, conv 64, pool, dense 128, dense, from parameters in the layout of `jaxpfl`."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        super().__init__()
        for name, array in arrays.items():
            given = array
            if array.ndim == 4:
                given = array.transpose(3, 2, 0, 1)
            elif name == "hidden.kernel":
                # The feature maps are flattened channels first.
                given = array.reshape(12, 12, 64, 128).transpose(3, 2, 0, 1).reshape(128, -1)
            elif array.ndim == 2:
                given = array.T
            tensor = torch.from_numpy(np.ascontiguousarray(given))
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))

    def forward(self, image_BxCxHxW: torch.Tensor) -> torch.Tensor:
        x = functional.conv2d(image_BxCxHxW, self.convolution_0_kernel, self.convolution_0_bias)
        x = functional.conv2d(x.relu_(), self.convolution_1_kernel)
        # Bias and ReLU after the pool, to a quarter of the elements.
        x = functional.max_pool2d(x, 2) + self.convolution_1_bias[:, None, None]
        x = functional.linear(x.relu_().flatten(1), self.hidden_kernel, self.hidden_bias)
        return functional.linear(x.relu_(), self.output_kernel, self.output_bias)

    def loss(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(image), label)


def tensors(image: np.ndarray, label: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 1, 28, 28] and labels; with one channel, the layout is the same."""
    return torch.from_numpy(image.reshape(-1, 1, *image.shape[1:3])), torch.from_numpy(label)
