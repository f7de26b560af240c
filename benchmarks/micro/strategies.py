"""The noise that strategies leave on the sums of releases, and what they keep in memory.

    python -m benchmarks.micro.strategies
    python -m benchmarks.micro.strategies --dense --rounds 400 --separations 20

Computed, not drawn: `rms` is the root mean square, over all rounds, of the deviation of the noise
on the sum of the releases so far, if the whole run costs one Gaussian of multiplier 1 and S = 1.
State is in parameters. `seconds` is the processor time in which a strategy was found.

With `--dense`, jax_privacy's matrix without any structure alone, for comparison. It holds where a
client takes part every `separation` rounds exactly, and keeps the noise of all rounds.
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
    dense: bool = False


def dense_row(rounds: int, separation: int) -> dict:
    import jax
    from jax_privacy.matrix_factorization import dense

    jax.config.update("jax_enable_x64", True)
    began, epochs = time.process_time(), -(-rounds // separation)
    matrix = dense.optimize(rounds, epochs=epochs)
    # How far a client moves C X in all its rounds, whichever it begins with.
    gram = np.abs(np.asarray(matrix).T @ np.asarray(matrix))
    moved_T = [math.sqrt(gram[t::separation, t::separation].sum()) for t in range(separation)]
    variance_T = dense.per_query_error(strategy_matrix=matrix)
    rms = float(max(moved_T)) * math.sqrt(float(np.mean(variance_T)))
    seconds = time.process_time() - began
    own = {"rounds": rounds, "separation": separation, "rms": rms}
    return {"what": "dense, jax_privacy", **own, "state": rounds, "seconds": seconds}


def variances(kind: str, rounds: int, separation: int, buffers: int = 3) -> np.ndarray:
    """The variance of the noise on the sum of the first t releases [rounds], at z S = 1."""
    from jaxpfl.privacy.correlated_noise import square_root
    from jaxpfl.privacy.strategies import BufferedToeplitz, tree_errors, unit

    if kind == "independent":
        return np.arange(1.0, rounds + 1)
    if kind == "blt":
        blt = BufferedToeplitz.best(rounds, separation, buffers)
        return unit(blt, rounds, separation) ** 2 * blt.errors(rounds)
    if kind == "tree":
        return unit(None, rounds, separation) ** 2 * tree_errors(rounds)
    bands, inverse = square_root(min(separation, rounds)), np.zeros(rounds)
    for t in range(rounds):
        past = bands[1 : t + 1]
        inverse[t] = (t == 0) - past @ inverse[t - len(past) : t][::-1]
    return np.linalg.norm(bands) ** 2 * np.cumsum(np.cumsum(inverse) ** 2)


def rows(config: Config) -> list[dict]:
    from jaxpfl.privacy.strategies import BufferedToeplitz

    found = []
    for rounds, separation in zip(config.rounds, config.separations, strict=True):
        epochs, own = -(-rounds // separation), {"rounds": rounds, "separation": separation}
        began = time.process_time()
        BufferedToeplitz.best(rounds, separation, config.buffers)
        seconds = time.process_time() - began
        states = {"independent": 0, "banded": min(separation, rounds) - 1}
        states |= {"blt": config.buffers, "tree": 0}
        for kind, state in states.items():
            variance_T = variances(kind, rounds, separation, config.buffers)
            rms = math.sqrt(epochs * float(np.mean(variance_T)))
            more = {"seconds": seconds} if kind == "blt" else {}
            found.append({"what": kind, **own, "rms": rms, "state": state, **more})
    return found


if __name__ == "__main__":
    harness.use_cpu_devices(None)
    chosen = tyro.cli(Config)
    pairs = zip(chosen.rounds, chosen.separations, strict=True)
    made = [dense_row(*pair) for pair in pairs] if chosen.dense else rows(chosen)
    harness.record("strategies", made)
    harness.table(made, ["what", "rounds", "separation", "rms", "state"])
