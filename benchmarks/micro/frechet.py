"""Frechet distance: moments of a corpus, projection of a noisy covariance, and their distance.

    python -m benchmarks.micro.frechet
    python -m benchmarks.micro.frechet --examples 20000 --dimensions 384

The task of every program: float32 embeddings [examples, d] of one corpus, rows longer than 1
clipped to 1; the private side's mean and covariance with privacy noise, to be projected to
the semidefinite matrices; the distance of the two. The programs:

    jaxpfl                  `moments`, `Reference` (projects and factors), `distance`
    numpy + scipy sqrtm     as the formula reads: np.cov, eigh for the projection, sqrtm(C1 C2)
    numpy, eigenvalues      float32 products of the symmetric kind, eigh, C^(1/2), eigvalsh
    numpy, best             the same, and the fastest calls found for each step: einsum for the
                            norms, a matrix product for the mean, and eigvalsh in the range of
                            the projected matrix alone
    plain JAX               one jitted program in float32

`numpy, best` makes the same BLAS and LAPACK calls as jaxpfl, without its guards (rows that are
not finite, large common means, corpora in pieces, float64 sums): level with it is the aim.
Rows have norm 1, as sentence encoders give them; `--long-rows 0.1` makes a tenth need the clip.
`error` is against the same formulas in float64. Then distances scored a minute, for whole
candidates and for mixtures of `parts` corpora, by a reference of full rank and by a noisy one.
"""

import dataclasses
import functools
import math
import warnings

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    examples: int = 100_000
    dimension: int = 768
    repeats: int = 7
    long_rows: float = 0.0  # share of rows to clip; the others have norm 1
    noise: float = 6e-5  # on the covariance: about (0.6, 2e-6) and 150,000 examples, clip norm 1
    dimensions: tuple[int, ...] = (384, 768)  # of the scoring
    candidates: int = 40
    parts: int = 3


def main(config: Config) -> list[dict]:
    # One device: XLA then has all cores for one product.
    harness.use_cpu_devices(1)
    import numpy as np

    from jaxpfl.algorithms import frechet

    rows = distance_once(config, np, frechet)
    harness.table(rows, ["what", "seconds", "jaxpfl faster", "error", "rank"])
    scores = scoring(config, np, frechet)
    shown = ["what", "d", "rank", "ms", "a minute", "times numpy", "cpu ms", "numpy cpu ms"]
    harness.table(scores, shown)
    print(f"recorded in {harness.record('frechet', rows + scores)}")
    return rows + scores


def corpus(np, seed: int, examples: int, dimension: int):
    """float32 [examples, d]: norms 1 but for rounding, a common mean, decaying eigenvalues."""
    rng = np.random.default_rng(seed)
    rows_NxD = rng.standard_normal((examples, dimension), dtype=np.float32)
    rows_NxD *= (1 + np.arange(dimension, dtype=np.float32)) ** np.float32(-0.5)
    rows_NxD += rng.standard_normal(dimension, dtype=np.float32) / np.float32(dimension**0.5)
    rows_NxD /= np.linalg.norm(rows_NxD, axis=1, keepdims=True)
    # Rotated, so that no coordinate is special.
    rotation_DxD, _ = np.linalg.qr(rng.standard_normal((dimension, dimension)))
    return rows_NxD @ rotation_DxD.astype(np.float32)


def noisy(np, frechet, clean, scale: float):
    """The moments with symmetric Gaussian noise on the covariance."""
    noise_DxD = np.random.default_rng(7).normal(size=clean.covariance_DxD.shape)
    noise_DxD = scale * (noise_DxD + noise_DxD.T) / 2
    return frechet.Moments(clean.count, clean.mean_D, clean.covariance_DxD + noise_DxD)


def distance_once(config: Config, np, frechet) -> list[dict]:
    """The whole task, each program's time and error."""
    import jax
    import jax.numpy as jnp
    import scipy.linalg

    rows_NxD = corpus(np, 0, config.examples, config.dimension)
    rows_NxD[: round(config.long_rows * config.examples)] *= 2
    np.random.default_rng(2).shuffle(rows_NxD)
    clean = frechet.moments(corpus(np, 1, 20_000, config.dimension), 1.0)
    private = noisy(np, frechet, clean, config.noise)
    mean_D, covariance_DxD = private.mean_D, private.covariance_DxD

    def jaxpfl():
        return frechet.Reference(private).distance(frechet.moments(rows_NxD, 1.0))

    def with_sqrtm():
        norm_N = np.linalg.norm(rows_NxD, axis=1)
        clipped_NxD = rows_NxD * np.minimum(1, 1 / norm_N)[:, None]
        shift_D = clipped_NxD.mean(axis=0) - mean_D
        own_DxD = np.cov(clipped_NxD, rowvar=False, bias=True)
        value_D, vector_DxD = np.linalg.eigh(covariance_DxD)
        projected_DxD = vector_DxD * np.maximum(value_D, 0) @ vector_DxD.T
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that the matrix is singular, and it is
            root_DxD = scipy.linalg.sqrtm(projected_DxD @ own_DxD)
        trace = np.trace(projected_DxD) + np.trace(own_DxD) - 2 * np.trace(np.real(root_DxD))
        return shift_D @ shift_D + trace

    def with_eigenvalues():
        norm_N = np.linalg.norm(rows_NxD, axis=1)
        clipped_NxD = rows_NxD * np.minimum(1, 1 / norm_N)[:, None]
        own_D = clipped_NxD.mean(axis=0)
        own_DxD = (clipped_NxD.T @ clipped_NxD) / len(rows_NxD) - np.outer(own_D, own_D)
        value_D, vector_DxD = np.linalg.eigh(covariance_DxD)
        value_D = np.maximum(value_D, 0)
        root_DxD = vector_DxD * np.sqrt(value_D) @ vector_DxD.T
        product_D = np.maximum(np.linalg.eigvalsh(root_DxD @ own_DxD @ root_DxD), 0)
        shift_D = own_D - mean_D
        return shift_D @ shift_D + value_D.sum() + np.trace(own_DxD) - 2 * np.sqrt(product_D).sum()

    ones_N = np.ones(len(rows_NxD), np.float32)

    def best():
        norm_N = np.sqrt(np.einsum("nd,nd->n", rows_NxD, rows_NxD))
        clipped_NxD = rows_NxD
        long = np.flatnonzero(norm_N > 1 + 1e-6)  # not for rounding's sake: jaxpfl's own rule
        if long.size:
            clipped_NxD = rows_NxD.copy()
            clipped_NxD[long] /= norm_N[long, None]
        own_D = (ones_N @ clipped_NxD).astype(np.float64) / len(rows_NxD)
        own_DxD = (clipped_NxD.T @ clipped_NxD).astype(np.float64) / len(rows_NxD)
        own_DxD -= np.outer(own_D, own_D)
        value_D, vector_DxD = np.linalg.eigh(covariance_DxD)
        kept_R = value_D > 0
        factor_DxR = vector_DxD[:, kept_R] * np.sqrt(value_D[kept_R])
        product_R = np.maximum(np.linalg.eigvalsh(factor_DxR.T @ own_DxD @ factor_DxR), 0)
        trace = value_D[kept_R].sum() + np.trace(own_DxD) - 2 * np.sqrt(product_R).sum()
        return np.sum((own_D - mean_D) ** 2) + trace

    @jax.jit
    def in_jax(rows_NxD, mean_D, covariance_DxD):
        norm_N = jnp.linalg.norm(rows_NxD, axis=1)
        clipped_NxD = rows_NxD * jnp.minimum(1, 1 / norm_N)[:, None]
        own_D = clipped_NxD.mean(axis=0)
        products_DxD = jnp.matmul(clipped_NxD.T, clipped_NxD, precision="highest")
        own_DxD = products_DxD / len(rows_NxD) - jnp.outer(own_D, own_D)
        value_D, vector_DxD = jnp.linalg.eigh(covariance_DxD)
        value_D = jnp.maximum(value_D, 0)
        root_DxD = vector_DxD * jnp.sqrt(value_D) @ vector_DxD.T
        product_D = jnp.maximum(jnp.linalg.eigvalsh(root_DxD @ own_DxD @ root_DxD), 0)
        trace = value_D.sum() + jnp.trace(own_DxD) - 2 * jnp.sqrt(product_D).sum()
        return jnp.sum((own_D - mean_D) ** 2) + trace

    arguments = jax.device_put(
        (rows_NxD, mean_D.astype(np.float32), covariance_DxD.astype(np.float32))
    )
    programs = {
        "jaxpfl": jaxpfl,
        "numpy + scipy sqrtm": with_sqrtm,
        "numpy, eigenvalues": with_eigenvalues,
        "numpy, best": best,
        "plain JAX": functools.partial(in_jax, *arguments),
    }
    seconds = harness.interleaved(programs, config.repeats)
    wide = frechet.moments(rows_NxD.astype(np.float64), 1.0)
    reference = frechet.Reference(private)
    expected = reference.distance(wide)
    return [
        {
            "what": name,
            "examples": config.examples,
            "d": config.dimension,
            "long rows": config.long_rows,
            "rank": reference.rank,
            "seconds": seconds[name],
            "jaxpfl faster": seconds[name] / seconds["jaxpfl"],
            "error": abs(float(program()) / expected - 1),
        }
        for name, program in programs.items()
    ]


class InTurn:
    """The same distances by NumPy alone, one after the other: the cores share each product.

    Of the forms of NumPy the fastest that was found: one factor of the reference, and of each
    candidate two products and the eigenvalues of a symmetric matrix.
    """

    def __init__(self, np, reference) -> None:
        self.np, self.mean_D = np, reference.mean_D
        value_D, vector_DxD = np.linalg.eigh(reference.covariance_DxD)
        kept_R = value_D > len(value_D) * np.finfo(np.float64).eps * value_D[-1]
        self.factor_DxR = vector_DxD[:, kept_R] * np.sqrt(value_D[kept_R])
        self.trace = value_D[kept_R].sum()

    def distances(self, candidates) -> list[float]:
        return [
            self._distance(each.mean_D, each.covariance_DxD.trace(), self._projected(each))
            for each in candidates
        ]

    def _projected(self, each):
        return self.factor_DxR.T @ each.covariance_DxD @ self.factor_DxR

    def _distance(self, mean_D, trace, projected_RxR) -> float:
        np, shift_D = self.np, mean_D - self.mean_D
        overlap = np.sqrt(np.maximum(np.linalg.eigvalsh(projected_RxR), 0)).sum()
        return float(shift_D @ shift_D + self.trace + trace - 2 * overlap)


def _cpu(turns: list[harness.Turn]) -> float:
    return min(turn.cpu_seconds for turn in turns)


def scoring(config: Config, np, frechet) -> list[dict]:
    """Distances a minute, once the candidates' moments are known."""
    rows = []
    for dimension in config.dimensions:
        clean, *parts = (
            frechet.moments(corpus(np, seed, 5000, dimension), 1.0)
            for seed in range(config.parts + 1)
        )
        shares_PxK = np.random.default_rng(0).dirichlet(np.ones(config.parts), config.candidates)
        candidates = [frechet.mixture(parts, shares_K) for shares_K in shares_PxK]
        of = {"clean": clean, "noisy": noisy(np, frechet, clean, config.noise)}
        # The parts' way to the factor is inside, the factoring is not: it is paid once a reference.
        functions, ranks = {}, {}
        for name, moments in of.items():
            reference, in_turn = frechet.Reference(moments), InTurn(np, moments)
            what = f"candidates, {name} reference"
            ranks[what] = reference.rank
            ours = functions[what] = functools.partial(reference.distances, candidates)
            peer = functions[f"{what}, numpy"] = functools.partial(in_turn.distances, candidates)
            np.testing.assert_allclose(ours(), peer(), rtol=1e-7)
        turns = harness.turns(functions, max(2, math.ceil(config.repeats / 2)))
        best = {what: min(turn.seconds for turn in found) for what, found in turns.items()}
        rows += [
            {
                "what": what,
                "d": dimension,
                "rank": rank,
                "ms": 1e3 * best[what] / config.candidates,
                "times numpy": best[f"{what}, numpy"] / best[what],
                "cpu ms": 1e3 * _cpu(turns[what]) / config.candidates,
                "numpy cpu ms": 1e3 * _cpu(turns[f"{what}, numpy"]) / config.candidates,
                "a minute": round(60 * config.candidates / best[what]),
            }
            for what, rank in ranks.items()
        ]
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
