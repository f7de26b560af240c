"""One look: POPri's rewards from one release of the clients' moments, in place of scores by round.

    target = private_moments(embedded, plan, ledger=ledger, run="one look", secret=RunSecret())
    rewards = MomentRewards(target, rounds=10)
    algorithm = popri(generator, samples, rewards, embedder, settings)
    state, _ = algorithm.step(algorithm.init(key), None, 1)  # a round; nobody is asked

POPri's scores are linear in one vector of a client, the mean of its embeddings. FreD's release
(`algorithms.fred`) gives this mean over ALL clients, and their covariance, for the whole epsilon.
Everything after it is post-processing: all rounds are free, and so is the choice of prompts,
temperature, learning rate and checkpoint. The algorithm has no query of its own.

| kind    | reward of a candidate x                                       | asks for        |
|---------|---------------------------------------------------------------|-----------------|
| frechet | how fast x brings the round's candidates nearer to the        | place and       |
|         | clients' moments, by Frechet distance (`frechet.witness`)     | spread          |
| mean    | <x, p - m>: the same for the means alone, p of the clients and | place           |
|         | m of the round's candidates                                   |                 |

With few clients the noise hides most of their covariance. The hidden part is taken from a round's
candidates (`fred.scores.estimate`). Measured: docs/synthetic_text.md.

This method is ours. Related: DP-MERF (Harder, Adamczewski, Park 2021) trains a generator on one
release of mean features.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxpfl.algorithms.frechet import moments, witness
from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.algorithms.fred.scores import estimate
from jaxpfl.algorithms.gaussian_moments import clipped
from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.federated.release.query import Query


@dataclass(frozen=True)
class MomentRewards(Checked):
    """Rewards of candidates by moments that were released once; takes a `Scorer`'s place in POPri.

    Attributes:
      target: the clients' moments and their noise, as `private_moments` released them; PUBLIC.
      rounds: POPri's rounds; each is free.
      kind: the kind of reward, see the head of this file.
    """

    target: PrivateMoments = field(repr=False)
    rounds: PositiveInt
    kind: Literal["frechet", "mean"] = "frechet"
    queries: tuple[Query, ...] = field(default=(), init=False)

    def of(self, embeddings_KxJxD: Any, candidates_KxJ: np.ndarray) -> np.ndarray:
        """The rewards of a round's responses, float32 [prompts, responses]; asks nobody.

        Args:
          embeddings_KxJxD: PUBLIC embeddings, float [prompts, responses, d].
          candidates_KxJ: bool; the responses whose moments are the round's. All, if none is one.

        Raises:
          InputError: embeddings of another dimension than the clients', or not finite.
        """
        rows_KxJxD = np.asarray(embeddings_KxJxD, np.float32)
        dimension = self.target.moments.dimension
        if rows_KxJxD.ndim != 3 or rows_KxJxD.shape[-1] != dimension:
            what = f"embeddings must be float [prompts, responses, {dimension}] like the clients'"
            raise InputError(f"{what}, found {list(rows_KxJxD.shape)}")
        # Clipped as the clients' embeddings were.
        rows_KxJxD = clipped(rows_KxJxD, self.target.plan.clip_norm)
        rows_MxD = rows_KxJxD.reshape(-1, dimension)
        candidates_NxD = rows_KxJxD[candidates_KxJ] if candidates_KxJ.any() else rows_MxD
        current = moments(candidates_NxD, np.inf)
        if self.kind == "mean":
            reward_M = rows_MxD @ (self.target.moments.mean_D - current.mean_D)
        else:
            reward_M = witness(estimate(self.target, current), current, rows_MxD)
        return reward_M.reshape(rows_KxJxD.shape[:2]).astype(np.float32)
