"""The other side of `benchmarks.micro.scores`: the same scores in PyTorch, by matrix products.

    python scores_against.py FILE.npz

The file holds candidates, the clients' mean embeddings and the noise. One line answers the start:
the version, the threads and the norm of the sum of scores without noise; then each line read makes
a round and is answered with the seconds of processor time that it took.

Written as one would for speed: no client's scores are formed. With A the candidates, normalised and
centred for each prompt, and m a client's mean, its scores A m have the square norm m^T (A^T A) m,
and the sum of all scaled scores is A times the sum of all means over these norms. The arrays of the
size of the candidates are allocated once.
"""

import json
import sys
import time

import numpy as np
import torch  # pyright: ignore[reportMissingImports]


class Round:
    """Scores of all clients, summed with noise.

    Args:
      data: "candidates" [prompts, responses, d], "means" [clients, d], and "noise", its standard
        deviation.
    """

    def __init__(self, data: dict[str, np.ndarray]):
        self.candidates_KxJxD = torch.from_numpy(data["candidates"])
        self.means_CxD = torch.from_numpy(data["means"])
        self.noise = float(data["noise"])
        self.rows_KxJxD = torch.empty_like(self.candidates_KxJxD)

    def scores(self) -> torch.Tensor:
        """Without noise, [prompts, responses]."""
        length_KxJx1 = torch.linalg.vector_norm(self.candidates_KxJxD, dim=2, keepdim=True)
        torch.div(self.candidates_KxJxD, length_KxJx1, out=self.rows_KxJxD)
        self.rows_KxJxD.sub_(self.rows_KxJxD.mean(dim=1, keepdim=True))
        rows_MxD = self.rows_KxJxD.flatten(0, 1)
        gram_DxD = rows_MxD.T @ rows_MxD
        square_C = torch.linalg.vecdot(self.means_CxD @ gram_DxD, self.means_CxD)
        sum_D = square_C.rsqrt_() @ self.means_CxD
        return (rows_MxD @ sum_D).view(self.rows_KxJxD.shape[:2])

    def __call__(self) -> torch.Tensor:
        scores_KxJ = self.scores()
        return scores_KxJ.add_(torch.randn_like(scores_KxJ), alpha=self.noise)


@torch.inference_mode()
def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        round_ = Round(dict(arrays))
    version = f"{torch.__version__}, {torch.get_num_threads()} threads"
    print(json.dumps({"version": version, "norm": round_.scores().norm().item()}), flush=True)
    for _ in sys.stdin:
        before = time.process_time()
        round_()
        print(time.process_time() - before, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
