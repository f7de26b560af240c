"""Clients' scores of public candidates, such as generated texts, summed with user-level privacy.

    for each round t:
        embed the public candidates: K prompts with J responses each
        sample a cohort                                each client with probability q
        for each client i in the cohort:
            score every candidate and clip the vector of all scores to L2 norm S
        release = sum of scores + N(0, z^2 S^2)

| kind         | a client's score of a candidate               | centred over       | norm         |
|--------------|-----------------------------------------------|--------------------|--------------|
| cosine       | its mean cosine with the client's texts       | -                  | clipped to S |
| zscore       | the same                                      | all candidates     | S, or 0      |
| per_prompt   | the same                                      | prompt's responses | S, or 0      |
| nn_histogram | how many of the client's texts are nearest it | -                  | clipped to S |

`cosine` is POPri's Algorithm 1 as printed. `zscore` is POPri's public code, which divides by the
standard deviation, so the norm is sqrt(K J) before the clip scales it to S. `per_prompt` suits
the ranking of each prompt's responses: differences between prompts use up none of the norm.
`nn_histogram` is the vote of private evolution; a client votes with at most `max_texts` of its
texts, so S = max_texts clips no client.

The first three kinds are released as d coordinates (`clients.scores`). The noise of a score then
has a root-mean-square standard deviation of z S sqrt(d / (K J)) instead of z S. With noise =
"every_score" the remaining noise is added, as POPri does; it costs accuracy and adds no privacy.

Source: POPri (Hou et al., "Private federated learning using preference-optimized synthetic data");
private evolution (Lin et al. 2024).
"""

import dataclasses
import hashlib
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients import scores
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.federated.release.releaser import Release
from jaxpfl.privacy.keys import key_from_words
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import embeddings_of

ScoreKind = Literal["cosine", "zscore", "per_prompt", "nn_histogram"]

_CENTRING: dict[str, scores.Centring] = {"cosine": "none", "zscore": "all", "per_prompt": "prompt"}


@dataclasses.dataclass(frozen=True)
class Scorer(Checked):
    """How clients score candidates, and the query that asks them.

    Attributes:
      plan: its clip norm is S, which must be constant, and its unit must be the client.
      noise: "projected", or "every_score" for the published noise. A histogram ignores it, because
        its votes have noise in every direction anyway.
      max_texts: for nn_histogram only: the most texts that a client votes with in a round. A client
        with more texts votes with a new uniform subset in every round.

    Raises:
      InputError: the plan's unit is not the client, its sampling is cyclic, or it clips adaptively.
    """

    plan: Plan
    kind: ScoreKind = "per_prompt"
    noise: Literal["projected", "every_score"] = "projected"
    max_texts: PositiveInt = 64
    execution: Execution = dataclasses.field(default_factory=Execution)

    def check_fields(self) -> None:
        if self.plan.unit != "client":
            raise InputError(f"scores protect each client, found the unit {self.plan.unit!r}")
        if self.plan.participation.in_epochs:
            # Every release draws a new cohort.
            expected = "sample cohorts by Poisson or fixed-size participation"
            raise InputError(f"the plan of scores must {expected}, found {self.plan.sampling}")
        if self.plan.clip.adaptive is not None:
            raise InputError("the plan of scores must not clip adaptively: they have one clip norm")

    @property
    def rounds(self) -> int:
        """The plan's rounds; each of them asks `queries`."""
        return self.plan.rounds

    @property
    def queries(self) -> tuple[Query, ...]:
        return (self.query,)

    def release(self, release: Release, candidates_KxJxD: Any, round: int) -> np.ndarray:
        """Releases the noisy sum of a cohort's scores, float32 [prompts, responses].

        Args:
          candidates_KxJxD: PUBLIC embeddings of the candidates, float [prompts, responses, d], of
            any norm; a zero embedding has cosine 0 with everything.

        Raises:
          InputError: the candidates have another shape, are not finite, or are too few to rank.
          BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
        """
        candidates = self._candidates(candidates_KxJxD)
        prompts, responses, _ = candidates.shape
        if self.kind == "nn_histogram":
            rows_MxD = scores.unit_rows(jnp.asarray(candidates)).reshape(prompts * responses, -1)
            votes_M = release(self.query, rows_MxD).value
            return np.asarray(votes_M).reshape(prompts, responses)
        space = scores.score_space(candidates, _CENTRING[self.kind])
        sum_D = release(self.query, space.factor_DxD).value
        scores_KxJ = space.scores(sum_D)
        if self.noise == "every_score" and self.plan.private:
            # This noise adds no privacy, so its key may be public.
            content = np.asarray(sum_D, np.float32).tobytes()
            digest = hashlib.sha256(f"noise of every score {round} ".encode() + content).digest()
            key = key_from_words(np.frombuffer(digest[:16], np.uint32))
            std = jnp.float32(self.plan.value_noise_std(self.plan.clip_norm))
            scores_KxJ = scores_KxJ + space.orthogonal_noise(key, std)
        return np.asarray(scores_KxJ)

    def floats_per_client(self, prompts: int, responses: int, dimension: int) -> tuple[int, int]:
        """Returns how many float32 numbers a client receives and sends in a round."""
        if self.kind == "nn_histogram":
            return prompts * responses * dimension, prompts * responses
        return dimension * (dimension + 1) // 2, dimension

    @cached_property
    def query(self) -> Query:
        """Made once: a release asks for the very object that the algorithm states."""
        by_text = self.kind == "nn_histogram"
        most, chunk = (self.max_texts, 4) if by_text else (1, 64)
        execution = self.execution
        if execution.chunk is None:
            execution = dataclasses.replace(execution, chunk=chunk)
        client_fn = scores.NearestVotes()
        if not by_text:
            client_fn = scores.LinearScores(None if self.kind == "cosine" else self.plan.clip_norm)
        per_bucket = 4 * chunk * execution.replicas
        return Query(
            "scores",
            client_fn,
            self.plan,
            CohortSpec(min(8, most), most, clients_per_bucket=per_bucket),
            columns=("embedding",) if by_text else ("mean_embedding",),
            prepare=_with_embeddings if by_text else _with_means,
            execution=execution,
        )

    def _candidates(self, candidates_KxJxD: Any) -> np.ndarray:
        candidates_KxJxD = np.asarray(candidates_KxJxD)
        shape, dtype = list(candidates_KxJxD.shape), candidates_KxJxD.dtype
        if dtype.kind != "f" or len(shape) != 3:
            what = "candidates must be float [prompts, responses, d] like the clients' embeddings"
            raise InputError(f"{what}, found {dtype} {shape}")
        prompts, responses, _ = shape
        ranked = responses if self.kind == "per_prompt" else prompts * responses
        if prompts < 1 or ranked < 2:
            raise InputError(f"kind = {self.kind!r} ranks at least 2 candidates, found {shape}")
        with np.errstate(over="ignore"):
            candidates_KxJxD = np.ascontiguousarray(candidates_KxJxD, np.float32)
        if not np.isfinite(candidates_KxJxD).all():
            prompt, response, _ = np.argwhere(~np.isfinite(candidates_KxJxD))[0].tolist()
            where = f"prompt {prompt}, response {response}"
            raise InputError(f"the embedding of {where} must be finite in float32, found another")
        return candidates_KxJxD


class ScoresState(NamedTuple):
    """The sum of the noisy scores of all rounds so far, float32 [prompts, responses]; public."""

    sum_KxJ: jax.Array


def candidate_scores(candidates_KxJxD: Any, scorer: Scorer) -> Algorithm:
    """Returns an algorithm that scores fixed candidates and adds up the scores of all rounds.

    Every round asks another cohort. The population must have the column "embedding", float
    [examples, d], which `text.embed.embed` makes.

    Args:
      candidates_KxJxD: PUBLIC embeddings of the candidates, float [prompts, responses, d].
      scorer: how clients score; its plan gives the number of rounds.
    """

    def init(key):
        return ScoresState(jnp.zeros(np.shape(candidates_KxJxD)[:2], jnp.float32))

    def step(state, release, round):
        scores_KxJ = scorer.release(release, candidates_KxJxD, round)
        return ScoresState(state.sum_KxJ + scores_KxJ), {}

    return Algorithm("candidate_scores", init, step, (scorer.query,))


def _with_means(clients: Population) -> Population:
    means_CxD = scores.mean_embeddings(embeddings_of(clients), clients.offsets)
    return clients.with_examples({"mean_embedding": means_CxD}, np.arange(len(clients) + 1))


def _with_embeddings(clients: Population) -> Population:
    return clients.with_columns({"embedding": embeddings_of(clients)})
