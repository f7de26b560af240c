"""Chooses single texts of a public pool by one release of the clients' moments.

    choice = choose([Evidence(released, embeddings_NxD)], corpora_N, 2_500)
    texts = [pool[i] for i in choice.rows_M]

1. The base q is the best mixture of the pool's corpora (`fred.scores`), and a tenth uniform.
2. `matching` gives weights for each kappa of a fixed list, none above 1 / texts.
3. One kappa is taken by Gaussian thinning, from released values alone: with xi of the noise's own
   law, released + xi and released - xi have independent noise of twice the variance (but for the
   count's, and the mean's in the covariance, which both share). Base and weights are fitted to one,
   and the other scores them as corpora (`fred.scores.unbiased`). Of the kappas that are nearer than
   the mixture by two standard errors, the nearest is taken; if there is none, the mixture.
4. Base and weights are fitted anew to the whole release. Texts are drawn by systematic sampling:
   text i is among them with probability texts x w_i, and of each corpus as many as its weight says.

A small kappa follows the release closely, by few texts; with a large one the base remains. The
list ends where an unreachable target would be bought with the pool's last near texts.

PICK, WRITE, PICK AGAIN. The pool may have a corpus that a model wrote after prompts of texts that
this release chose (`written`). It leans to the release's noise, and no half is independent of it:
estimates of its distance are too small, and may take noise for nearness. In a simulation
(`tests/algorithms/test_chosen_texts.py` has a part) the best mixture of all corpora was nearly the
written one alone, and no tilt of it was then nearer by two standard errors: what was chosen anew
was further from the clients than the first choice. So a written corpus is no part of the mixture.
It is in the base by the uniform tenth alone, and must earn its weight against public texts.

All of this reads the release and public texts, and costs no privacy. Thinning: Neufeld, Dharamshi,
Gao, Witten 2024, "Data thinning for convolution-closed distributions". Systematic sampling: Madow
1949, "On the theory of systematic sampling, II".

This method is ours, at most as a combination: FreD's one release chooses single texts. Related, for
text: Yu et al. 2023, "Selective pre-training for private fine-tuning" (a private classifier selects
public text); Xie et al. 2023, "Data selection for language models via importance resampling" (not
private).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxpfl.algorithms.chosen_texts import matching
from jaxpfl.algorithms.chosen_texts.matching import Evidence, MomentMatching, weighted_moments
from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.algorithms.fred.scores import best_mixture, unbiased
from jaxpfl.algorithms.gaussian_moments import Moments, clipped
from jaxpfl.errors import InputError
from jaxpfl.progress import track

KAPPAS = (0.1, 0.03, 0.01, 0.003, 0.001)
"""How loosely the weights may follow a release, in squared distances of embeddings of norm 1."""
_UNIFORM = 0.1
_MIXTURE = "mixture"
_SCALED = ("mean", "diagonal", "off_diagonal")


@dataclass(frozen=True, eq=False)
class Choice:
    """The texts that were chosen, and how near they are; PUBLIC.

    Attributes:
      rows_M: the drawn texts' places in the pool, int64 [texts], ascending.
      weights_N: float64 [N], sum to 1.
      kappa: which one was taken; None: the best mixture of corpora, because no choice of texts was
        nearer by more than the noise hides.
      effective_size: 1 / sum of w_i^2: as many texts of equal weight.
      shares: the weight of each corpus, the largest first.
      mixture_distance, distance, drawn_distance: estimates of the squared Frechet distance to the
        clients of the best mixture, of the weights and of the drawn texts, by the half of the
        release that decided; summed over the embedders. Where noise hides much, all three are too
        small, and may be below 0: only their differences mean something.
      judged: the same three by the judge's release, which decided nothing; () without a judge.
    """

    rows_M: np.ndarray = field(repr=False)
    weights_N: np.ndarray = field(repr=False)
    kappa: float | None
    effective_size: float
    shares: dict[str, float]
    mixture_distance: float
    distance: float
    drawn_distance: float
    judged: tuple[float, ...] = ()


def choose(
    evidence: Sequence[Evidence],
    corpora_N: np.ndarray,
    texts: int,
    *,
    judge: Evidence | None = None,
    written: str = "",
    seed: int = 0,
    progress: bool = False,
) -> Choice:
    """Chooses `texts` of a pool of N by what the clients released once; costs no privacy.

    Args:
      evidence: of each embedder, for the same N texts in the same order. Several ones are parts of
        one joint release (`FredPlan.shares`); the first one decides the mixture.
      corpora_N: the name of each text's corpus.
      judge: of a further embedder, which is in no objective and decides nothing.
      written: the corpus among them that follows from this release, and is no part of the mixture.
      seed: of the thinning and of the drawing; public.

    Raises:
      InputError: the pool has fewer texts than are to be chosen, or embeddings do not fit.
    """
    names_N = np.asarray(corpora_N)
    if not 0 < texts < len(names_N):
        most = f"the pool's {len(names_N):,}"
        raise InputError(f"texts must be positive and below {most}, found {texts:,}")
    judges = [] if judge is None else [judge]
    for released, rows_NxD in [*evidence, *judges]:
        expected = (len(names_N), released.moments.dimension)
        if np.shape(rows_NxD) != expected:
            what = f"embeddings must be float {list(expected)}, a row for each text of the pool"
            raise InputError(f"{what}, found {list(np.shape(rows_NxD))}")
    evidence, judges = (
        [Evidence(r, clipped(x_NxD, r.plan.clip_norm)) for r, x_NxD in given]
        for given in (evidence, judges)
    )
    generator, cap = np.random.default_rng(seed), (1 - 1e-9) / texts
    halves = [_halves(released, generator) for released, _ in evidence]
    fitted = [Evidence(h[0], e.embeddings_NxD) for h, e in zip(halves, evidence, strict=True)]
    other = [Evidence(h[1], e.embeddings_NxD) for h, e in zip(halves, evidence, strict=True)]
    public = np.unique(names_N[names_N != written])
    mixture_N = _best_mixture(fitted[0], names_N, public)
    weights = {_MIXTURE: _capped(mixture_N, cap)}
    problem, start = MomentMatching(fitted, _base(mixture_N), cap), None
    for kappa in track(KAPPAS, "choosing texts", progress=progress):
        weights_N, start = problem.solve(kappa, start)
        weights[f"{kappa:g}"] = weights_N
    distances, nearer = _compared(other, weights)
    nearest = min(nearer, key=lambda name: distances[name], default=_MIXTURE)

    mixture_N = _best_mixture(evidence[0], names_N, public)
    kappa, weights_N = None, _capped(mixture_N, cap)
    if nearest != _MIXTURE:
        kappa, problem = float(nearest), MomentMatching(evidence, _base(mixture_N), cap)
        weights_N = problem.solve(kappa, start).weights_N
    rows_M = systematic_sample(weights_N, names_N, texts, generator)
    drawn_N = np.bincount(rows_M, minlength=len(names_N)) / texts
    shares = {str(name): float(weights_N[names_N == name].sum()) for name in np.unique(names_N)}
    final = {_MIXTURE: _capped(mixture_N, cap), "chosen": weights_N, "drawn": drawn_N}
    distances, _ = _compared(other, final)
    judged, _ = _compared(judges, final)
    return Choice(
        rows_M=rows_M,
        weights_N=weights_N,
        kappa=kappa,
        effective_size=float(1 / np.sum(weights_N**2)),
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])),
        mixture_distance=distances[_MIXTURE],
        distance=distances["chosen"],
        drawn_distance=distances["drawn"],
        judged=tuple(judged.values()) if judges else (),
    )


def systematic_sample(
    weights_N: np.ndarray, corpora_N: np.ndarray, texts: int, generator: np.random.Generator
) -> np.ndarray:
    """Draws rows without repetition, row i with probability texts x w_i (all below 1); ascending.

    The rows lie on a line, row i with length texts x w_i, and a comb with teeth at distance 1 and a
    random offset takes those it meets (Madow 1949). Corpora lie one after another, and the rows of
    each in random order: so many are drawn of a corpus as its weight says, to within one.
    """
    order_N = np.lexsort((generator.random(len(weights_N)), corpora_N))
    ends_N = np.cumsum(weights_N[order_N]) * texts
    teeth_N = np.floor(ends_N / ends_N[-1] * texts + generator.random())
    return np.sort(order_N[np.diff(teeth_N, prepend=0) > 0])


def _best_mixture(evidence: Evidence, names_N: np.ndarray, public: np.ndarray) -> np.ndarray:
    """The weights [N] of the best mixture of the public corpora, equal within each."""
    parts = {str(name): (names_N == name) / np.sum(names_N == name) for name in public}
    moments = {name: weighted_moments(w, evidence.embeddings_NxD) for name, w in parts.items()}
    shares = best_mixture(evidence.released, moments).shares
    mixture_N = np.zeros(len(names_N))
    for name, share in shares.items():
        mixture_N += share * parts[name]
    return mixture_N


def _base(mixture_N: np.ndarray) -> np.ndarray:
    """The mixture and some of every text, so that no text is out of reach."""
    return (1 - _UNIFORM) * mixture_N + _UNIFORM / len(mixture_N)


def _capped(mixture_N: np.ndarray, cap: float) -> np.ndarray:
    """The mixture; what a small corpus has above the cap goes to the others."""
    positive_N = np.maximum(mixture_N, 1e-12 / len(mixture_N))
    return matching.capped_softmax(np.log(positive_N), cap)


def _halves(
    released: PrivateMoments, generator: np.random.Generator
) -> tuple[PrivateMoments, PrivateMoments]:
    """Two releases with independent noise of twice the variance; both the same without noise."""
    moments, noise = released.moments, released.noise
    dimension = moments.dimension
    mean_D = noise.mean * generator.standard_normal(dimension)
    lower_DxD = np.tril(generator.standard_normal((dimension, dimension)), -1)
    covariance_DxD = noise.off_diagonal * (lower_DxD + lower_DxD.T)
    covariance_DxD += np.diag(noise.diagonal * generator.standard_normal(dimension))
    scales = {name: math.sqrt(2) * getattr(noise, name) for name in _SCALED}
    # The covariance of both is still taken about the mean that was released, with its bias.
    noise = noise._replace(**scales)

    def half(sign: float) -> PrivateMoments:
        moved_DxD = moments.covariance_DxD + sign * covariance_DxD
        part = Moments(moments.count, moments.mean_D + sign * mean_D, moved_DxD)
        return PrivateMoments(part, noise, released.plan)

    return half(1.0), half(-1.0)


def _compared(
    evidence: Sequence[Evidence], weights: dict[str, np.ndarray]
) -> tuple[dict[str, float], list[str]]:
    """Distances, summed over embedders; and which are less than the first one's by two errors.

    The gain is the least over the models of what the noise hides, see `fred.scores`.
    """
    total_K, gain_K, variance_K = np.zeros((3, len(weights)))
    for released, rows_NxD in evidence:
        moments = [weighted_moments(w_N, rows_NxD) for w_N in weights.values()]
        distance_MxK, error_SxK = unbiased(released, moments)
        total_K += distance_MxK[0]
        gain_K += (distance_MxK[:, :1] - distance_MxK).min(axis=0)
        variance_K += np.var(error_SxK - error_SxK[:, :1], axis=0)
    nearer_K = gain_K > 2 * np.sqrt(variance_K)
    distances = dict(zip(weights, total_K.tolist(), strict=True))
    return distances, [name for name, nearer in zip(weights, nearer_K, strict=True) if nearer]
