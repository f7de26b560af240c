"""Clients' scores of public candidates, such as generated texts, summed with user-level privacy.

    for each round t:
        candidates: K prompts with J responses each, embedded             public
        sample a cohort                                each client with probability q
        for each client i in the cohort:
            score every candidate, bound the L2 norm of all scores by S
        release = sum of scores + N(0, z^2 S^2)

| kind         | a client's score of a candidate        | centred over       | norm              |
|--------------|----------------------------------------|--------------------|-------------------|
| cosine       | its mean cosine with the client's texts| -                  | clipped to S      |
| zscore       | the same                               | all candidates     | S, or 0           |
| per_prompt   | the same                               | a prompt's         | S, or 0           |
| nn_histogram | the client's texts nearest to it       | -                  | clipped to S      |

`cosine` is POPri's Algorithm 1 as printed, `zscore` its public code: with the deviation divided
out, the norm is sqrt(K J) and the clip scales it to S. `per_prompt` suits a ranking of each
prompt's responses: how well the prompts themselves fit the clients takes no part of the norm.
`nn_histogram` is private evolution's vote; a client votes with at most `max_texts` of its texts, so
S = max_texts clips nobody.

The first three kinds are released as d coordinates (`federated.scores`): the noise of a score then
has standard deviation z S sqrt(d / (K J)) in root mean square, not z S. Under noise =
"every_score" the rest is added, as POPri does; that costs accuracy and protects nobody more.

Source: POPri (Hou et al., "Private federated learning using preference-optimized synthetic data");
private evolution (Lin et al. 2024).
"""

import dataclasses
import hashlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.query import Execution, Query
from jaxpfl.federated.release import Release
from jaxpfl.federated.scores import (
    Centring,
    LinearScores,
    NearestVotes,
    mean_embeddings,
    score_space,
    unit_rows,
)
from jaxpfl.privacy.keys import key_from_words
from jaxpfl.privacy.plan import Plan

ScoreKind = Literal["cosine", "zscore", "per_prompt", "nn_histogram"]
ScoreNoise = Literal["projected", "every_score"]

_CENTRING: dict[str, Centring] = {"cosine": "none", "zscore": "all", "per_prompt": "prompt"}


@dataclasses.dataclass(frozen=True)
class Scorer:
    """How clients score candidates, and the query that asks them.

    Attributes:
      plan: makes the cohorts, the noise and the events; its clip norm is S, constant, and its unit
        the client.
      kind: of score, see the head of this file.
      noise: "projected", or "every_score" for the published noise. Both are the same for a
        histogram, whose votes have noise in every direction anyway.
      max_texts: the most texts that a client votes with in a round; of a client with more texts a
        new uniform subset votes. Only of nn_histogram.
      execution: devices, chunk and accumulator.
      query: what clients are asked.

    Raises:
      InputError: the plan protects another unit than the client, samples in epochs, or clips
        adaptively.
    """

    plan: Plan
    kind: ScoreKind = "per_prompt"
    noise: ScoreNoise = "projected"
    max_texts: int = 64
    execution: Execution = dataclasses.field(default_factory=Execution)
    query: Query = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, (*_CENTRING, "nn_histogram"))
        checks.one_of("noise", self.noise, ("projected", "every_score"))
        checks.positive_int("max_texts", self.max_texts)
        _check(self.plan)
        # Made once: a release asks for the very object that the algorithm states.
        object.__setattr__(self, "query", self._query())

    def release(self, release: Release, candidates_KxJxD: Any, round: int) -> np.ndarray:
        """Releases the noisy sum of a cohort's scores, float32 [prompts, responses].

        Args:
          release: of this round.
          candidates_KxJxD: the candidates' embeddings, float [prompts, responses, d], of any
            length; a zero one has cosine 0 with everything. PUBLIC.

        Raises:
          InputError: candidates of another shape, not finite, or fewer than two to be ranked.
          BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
        """
        candidates = self._candidates(candidates_KxJxD)
        prompts, responses, _ = candidates.shape
        if self.kind == "nn_histogram":
            rows_MxD = unit_rows(jnp.asarray(candidates)).reshape(prompts * responses, -1)
            votes_M = release(self.query, rows_MxD).value
            return np.asarray(votes_M).reshape(prompts, responses)
        space = score_space(candidates, _CENTRING[self.kind])
        sum_D = release(self.query, space.factor_DxD).value
        scores_KxJ = space.scores(sum_D)
        if self.noise == "every_score" and self.plan.private:
            # It protects nobody more, so it may follow from what is public.
            std = jnp.float32(self.plan.value_noise_std(self.plan.clip_norm))
            scores_KxJ += space.orthogonal_noise(_public_key(sum_D, round), std)
        return np.asarray(scores_KxJ)

    def floats_per_client(self, prompts: int, responses: int, dimension: int) -> tuple[int, int]:
        """Returns how many float32 numbers a client receives and sends in a round.

        For the linear kinds it is L, half of a square, and its coordinates: neither grows with the
        candidates.
        """
        if self.kind == "nn_histogram":
            return prompts * responses * dimension, prompts * responses
        return dimension * (dimension + 1) // 2, dimension

    def _query(self) -> Query:
        by_text = self.kind == "nn_histogram"
        most, chunk = (self.max_texts, 4) if by_text else (1, 64)
        execution = self.execution
        if execution.chunk is None:
            execution = dataclasses.replace(execution, chunk=chunk)
        client_fn = NearestVotes()
        if not by_text:
            client_fn = LinearScores(None if self.kind == "cosine" else self.plan.clip_norm)
        return Query(
            "scores",
            client_fn,
            self.plan,
            CohortSpec(
                batch_size=min(8, most),
                max_examples=most,
                clients_per_bucket=4 * chunk * execution.devices.size,
            ),
            columns=("embedding",) if by_text else ("mean_embedding",),
            prepare=_with_embeddings if by_text else _with_means,
            execution=execution,
        )

    def _candidates(self, candidates_KxJxD: Any) -> np.ndarray:
        """The candidates as float32 [prompts, responses, d]."""
        found = np.asarray(candidates_KxJxD)
        if found.dtype.kind != "f" or found.ndim != 3:
            raise InputError(
                "candidates must be float [prompts, responses, d] like the clients' embeddings, "
                f"found {found.dtype} {list(found.shape)}"
            )
        prompts, responses, _ = found.shape
        ranked = responses if self.kind == "per_prompt" else prompts * responses
        if prompts < 1 or ranked < 2:
            raise InputError(
                f"kind = {self.kind!r} ranks at least 2 candidates, found {list(found.shape)}"
            )
        with np.errstate(over="ignore"):
            found = found.astype(np.float32, copy=False)
        # A NaN or an infinity is the least or the greatest.
        if not (np.isfinite(found.max()) and np.isfinite(found.min())):
            prompt, response, _ = np.argwhere(~np.isfinite(found))[0].tolist()
            raise InputError(
                f"the candidate of prompt {prompt}, response {response}: its embedding is not "
                "finite in float32"
            )
        return found


class ScoresState(NamedTuple):
    """What clients have said of the candidates so far; public.

    Attributes:
      sum_KxJ: float32, the sum of the noisy scores of all rounds.
    """

    sum_KxJ: jax.Array


def candidate_scores(candidates_KxJxD: Any, scorer: Scorer) -> Algorithm:
    """Returns an algorithm that scores fixed candidates and adds up the scores of all rounds.

    Every round asks another cohort. It reads the column "embedding", float [examples, d], such as
    `text.embed.embed` makes it.

    Args:
      candidates_KxJxD: their embeddings, float [prompts, responses, d]. PUBLIC.
      scorer: plan, and kind of score.
    """
    shape = np.shape(candidates_KxJxD)[:2]

    def init(key):
        del key  # nothing is drawn
        return ScoresState(jnp.zeros(shape, jnp.float32))

    def step(state, release, round):
        scores_KxJ = scorer.release(release, candidates_KxJxD, round)
        return ScoresState(state.sum_KxJ + scores_KxJ), {}

    return Algorithm("candidate_scores", init, step, (scorer.query,))


def _public_key(released_D: jax.Array, round: int) -> jax.Array:
    """A key that follows from a release: whoever sees that may compute it."""
    words = np.asarray(released_D, np.float32).view(np.uint32)
    digest = hashlib.sha256(f"noise of every score {round} ".encode() + words.tobytes()).digest()
    return key_from_words(np.frombuffer(digest[:16], np.uint32).tolist())


def _with_means(clients: Population) -> Population:
    """Every client with the mean of its normalised embeddings, its only example."""
    means_CxD = mean_embeddings(_embeddings(clients), clients.offsets)
    return clients.with_examples(
        {"mean_embedding": means_CxD}, np.arange(len(clients) + 1, dtype=np.int64)
    )


def _with_embeddings(clients: Population) -> Population:
    return clients.with_columns({"embedding": _embeddings(clients)})


def _embeddings(clients: Population) -> np.ndarray:
    embedding_NxD = clients.columns.get("embedding")
    if not isinstance(embedding_NxD, np.ndarray) or embedding_NxD.ndim != 2:
        raise InputError("the population needs a column 'embedding' of numbers [examples, d]")
    if embedding_NxD.dtype.kind != "f":
        raise InputError(f"column 'embedding' must hold floats, found {embedding_NxD.dtype}")
    return embedding_NxD


def _check(plan: Plan) -> None:
    if plan.unit != "client":
        raise InputError(
            f"scores protect each client: the plan's unit must be 'client', found {plan.unit!r}"
        )
    if plan.sampling == "cyclic":
        raise InputError(
            "the plan of scores must sample cohorts by Poisson or fixed-size participation, "
            "because every release draws a new cohort, found cyclic"
        )
    if plan.adaptive_clip is not None:
        raise InputError("the plan of scores must not clip adaptively: scores have one clip norm")
