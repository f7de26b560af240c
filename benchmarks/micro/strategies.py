"""The noise that strategies leave on the sums of releases, and what they keep in memory.

    python -m benchmarks.micro.strategies

Computed, not drawn: `rms` is the root mean square, over all rounds, of the deviation of the noise
on the sum of the releases so far, if the whole run costs one Gaussian of multiplier 1 and S = 1.
State is in parameters. `seconds` is the processor time in which a BLT's coefficients were found.
"""

import dataclasses
import math
import time

import numpy as np
import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    rounds: tuple[int, ...] = (400, 1_000, 2_052)
    separations: tuple[int, ...] = (20, 1_000, 342)
    buffers: int = 3


def rows(config: Config) -> list[dict]:
    from jaxpfl.privacy.correlated_noise import square_root
    from jaxpfl.privacy.strategies import BufferedToeplitz, tree_errors, unit

    found = []
    for rounds, separation in zip(config.rounds, config.separations, strict=True):
        epochs, own = -(-rounds // separation), {"rounds": rounds, "separation": separation}
        began = time.process_time()
        blt = BufferedToeplitz.best(rounds, separation, config.buffers)
        seconds = time.process_time() - began
        bands = square_root(min(separation, rounds))
        inverse = np.zeros(rounds)
        for t in range(rounds):
            past = bands[1 : t + 1]
            inverse[t] = (t == 0) - past @ inverse[t - len(past) : t][::-1]
        banded = np.linalg.norm(bands) ** 2 * np.cumsum(np.cumsum(inverse) ** 2)
        kinds = {
            "independent": (np.arange(1, rounds + 1), 0),
            "banded": (banded, len(bands) - 1),
            "blt": (unit(blt, rounds, separation) ** 2 * blt.errors(rounds), config.buffers),
            "tree": (unit(None, rounds, separation) ** 2 * tree_errors(rounds), 0),
        }
        for kind, (variance_T, state) in kinds.items():
            rms = math.sqrt(epochs * float(np.mean(variance_T)))
            more = {"seconds": seconds} if kind == "blt" else {}
            found.append({"what": kind, **own, "rms": rms, "state": state, **more})
    return found


if __name__ == "__main__":
    harness.use_cpu_devices(None)
    made = rows(tyro.cli(Config))
    harness.record("strategies", made)
    harness.table(made, ["what", "rounds", "separation", "rms", "state"])
