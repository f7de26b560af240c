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

import hashlib
import json
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl import checks
from jaxpfl.data.cohort import Cohort, CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.data.prefetch import prefetch
from jaxpfl.errors import InputError
from jaxpfl.federated.environment import environment
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.private_sum import private_sum
from jaxpfl.federated.scores import (
    Centring,
    LinearScores,
    NearestVotes,
    mean_embeddings,
    score_space,
    unit_rows,
)
from jaxpfl.privacy.keys import bound_to, key_to_words, round_keys, training_root
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

LABEL = "candidate_scores"

Kind = Literal["cosine", "zscore", "per_prompt", "nn_histogram"]
Noise = Literal["projected", "every_score"]

_CENTRING: dict[str, Centring] = {"cosine": "none", "zscore": "all", "per_prompt": "prompt"}


class _Release(NamedTuple):
    """The secrets that one release follows from.

    Attributes:
      cohort_seed: of the sampler and of large clients' subsets.
      noise_key: of this release alone.
    """

    cohort_seed: int
    noise_key: jax.Array


class CandidateScores:
    """Scores by the clients of one population, released round by round under one plan.

    Args:
      clients: with the column "embedding", float [examples, d], e.g. of `text.embed.embed`.
      plan: makes the cohorts, the noise and the events; its clip norm is S, constant, and its unit
        the client.
      ledger: of these clients; charged with `plan.round_event()` before each release.
      noise_key: of `privacy.keys.noise_root()`, kept private and used for nothing else.
      kind: of score, see the head of this file.
      noise: "projected", or "every_score" for the published noise. A histogram has no directions
        to leave out, so there both are the same.
      max_texts: the most texts that a client votes with in a round, a fresh uniform subset of a
        larger client's; only of nn_histogram.
      run: names the releases in the ledger.
      mesh: devices; default all.

    Raises:
      InputError: no such column; plan or ledger are of another population, unit or kind.
    """

    def __init__(
        self,
        clients: Population,
        plan: Plan,
        *,
        ledger: Ledger,
        noise_key: jax.Array,
        kind: Kind = "per_prompt",
        noise: Noise = "projected",
        max_texts: int = 64,
        run: str = LABEL,
        mesh: Mesh | None = None,
    ) -> None:
        checks.one_of("kind", kind, (*_CENTRING, "nn_histogram"))
        checks.one_of("noise", noise, ("projected", "every_score"))
        self.kind: Kind = kind
        self.noise: Noise = noise
        self.max_texts = checks.positive_int("max_texts", max_texts)
        self.plan, self.ledger, self.run = plan, ledger, run
        self._noise_key = noise_key
        self._mesh = client_mesh() if mesh is None else mesh
        embedding_NxD = _embeddings(clients)
        self.dimension: int = embedding_NxD.shape[1]
        _check(clients, plan, ledger)
        if kind == "nn_histogram":
            columns, offsets = {"embedding": embedding_NxD}, clients.offsets
        else:
            means_CxD = mean_embeddings(embedding_NxD, clients.offsets)
            columns, offsets = {"mean_embedding": means_CxD}, np.arange(len(clients) + 1)
        self._held = Population(columns, offsets, clients.client_ids)
        digest = hashlib.sha256(clients.fingerprint.encode())
        # As they are added up: another library may round the means otherwise.
        for held in columns.values():
            digest.update(np.ascontiguousarray(held).data)
        digest.update(offsets.astype("<i8").data)
        self._clients_hash = digest.hexdigest()

    def release(self, candidates_KxJxD: Any, *, round: int) -> np.ndarray:
        """Charges the ledger and releases the noisy sum of scores, float32 [prompts, responses].

        Candidates, round, all that the releaser was made with, and devices, processor and versions
        of JAX decide the cohort and the noise: the same release again is the same to the bit and
        costs nothing more. Whatever differs, cohort and noise are independent and the release is
        charged. So each of several sets of candidates released in one round costs a round: what
        all have cost says the ledger (`Ledger.spent`), and the plan's `epsilon()` and
        `statement()`, which count every round once, are then too low.

        Args:
          candidates_KxJxD: the candidates' embeddings, float [prompts, responses, d], of any
            length; a zero one has cosine 0 with everything. PUBLIC.
          round: from 1 to the plan's rounds.

        Raises:
          InputError: candidates of another shape, not finite, or fewer than two to be ranked; a
            round beyond the plan's.
          BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
        """
        candidates = self._candidates(candidates_KxJxD)
        if not 1 <= checks.positive_int("round", round) <= self.plan.rounds:
            raise InputError(
                f"round must lie in 1 .. {self.plan.rounds}, the plan's, found {round}"
            )
        prompts, responses, _ = candidates.shape
        if self.kind == "nn_histogram":
            rows_MxD = unit_rows(jnp.asarray(candidates)).reshape(prompts * responses, -1)
            secrets = self._charge(candidates, rows_MxD, round)
            votes_M = self._sum(NearestVotes(), rows_MxD, len(rows_MxD), secrets, round)
            return votes_M.reshape(prompts, responses)
        # Dispatched before the candidates are hashed: both take their time.
        space = score_space(candidates, _CENTRING[self.kind])
        secrets = self._charge(candidates, space.factor_DxD, round)
        scores = LinearScores(None if self.kind == "cosine" else self.plan.clip_norm)
        sum_D = self._sum(scores, space.factor_DxD, self.dimension, secrets, round)
        scores_KxJ = space.scores(jnp.asarray(sum_D))
        if self.noise == "every_score" and self.plan.private:
            std = jnp.float32(self.plan.value_noise_std(self.plan.clip_norm))
            # Rounds have the small numbers.
            key = jax.random.fold_in(secrets.noise_key, jnp.uint32(2**32 - 1))
            scores_KxJ += space.noise_outside(key, std)
        return np.asarray(scores_KxJ)

    def floats_per_client(self, prompts: int, responses: int) -> tuple[int, int]:
        """Returns how many float32 numbers a client receives and sends in a round.

        For the linear kinds it is L, half of a square, and its coordinates: neither grows with the
        candidates.
        """
        dimension = self.dimension
        if self.kind == "nn_histogram":
            return prompts * responses * dimension, prompts * responses
        return dimension * (dimension + 1) // 2, dimension

    def _charge(self, candidates: np.ndarray, broadcast: jax.Array, round: int) -> _Release:
        plan = self.plan.to_dict()
        # Elsewhere it rounds otherwise: with one noise, two releases would tell the difference.
        where = [[device.device_kind for device in self._mesh.devices.flat], environment()]
        settings = [self.run, round, self.kind, self.noise, self.max_texts, plan, where]
        digest = hashlib.sha256(json.dumps([*settings, self._clients_hash]).encode())
        digest.update(json.dumps(candidates.shape).encode())
        digest.update(np.ascontiguousarray(candidates).data)
        # As clients get it: another program may have rounded it otherwise.
        digest.update(np.ascontiguousarray(broadcast).data)
        noise_key = bound_to(self._noise_key, digest.digest())
        # With the secret key in them, these tell nothing of the data, unlike hashes of it alone.
        words = key_to_words(noise_key)
        name = hashlib.sha256(f"charge {words}".encode()).hexdigest()[:12]
        seed = int.from_bytes(hashlib.sha256(f"cohort {words}".encode()).digest()[:16], "big")
        run = f"{self.run} {name}"
        self.ledger.charge(self.plan.round_event(), LABEL, run=run, round=round)
        return _Release(seed, noise_key)

    def _sum(
        self, client_fn: Any, broadcast: jax.Array, entries: int, secrets: _Release, round: int
    ) -> np.ndarray:
        """The cohort through the door: the noisy sum [entries]."""
        by_text = self.kind == "nn_histogram"
        most, chunk = (self.max_texts, 4) if by_text else (1, 64)
        spec = CohortSpec(
            batch_size=min(8, most),
            max_examples=most,
            clients_per_bucket=4 * chunk * self._mesh.size,
        )
        like = jax.ShapeDtypeStruct((entries,), jnp.float32)
        door = private_sum(client_fn, self.plan, like, mesh=self._mesh, chunk=chunk)
        seed = secrets.cohort_seed
        chosen = self.plan.sample(seed, round)
        cohort = Cohort(self._held, chosen, spec, seed=seed, round=round, shards=door.shards)
        keys = round_keys(training_root(seed), secrets.noise_key, round)
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        broadcast = jax.device_put(broadcast, everywhere)
        with prefetch(cohort) as buckets:
            total, _ = door(broadcast, buckets, door.init(), keys)
        return np.asarray(total)

    def _candidates(self, candidates_KxJxD: Any) -> np.ndarray:
        """The candidates as float32 [prompts, responses, d]."""
        found = np.asarray(candidates_KxJxD)
        if found.dtype.kind != "f" or found.ndim != 3 or found.shape[2] != self.dimension:
            raise InputError(
                "candidates must be float [prompts, responses, "
                f"{self.dimension}] like the clients' embeddings, found {found.dtype} "
                f"{list(found.shape)}"
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


def _embeddings(clients: Population) -> np.ndarray:
    embedding_NxD = clients.columns.get("embedding")
    if not isinstance(embedding_NxD, np.ndarray) or embedding_NxD.ndim != 2:
        raise InputError("the population needs a column 'embedding' of numbers [examples, d]")
    if embedding_NxD.dtype.kind != "f":
        raise InputError(f"column 'embedding' must hold floats, found {embedding_NxD.dtype}")
    return embedding_NxD


def _check(clients: Population, plan: Plan, ledger: Ledger) -> None:
    if plan.population != len(clients):
        raise InputError(
            f"the plan is for a population of {plan.population} clients, the data has another "
            "number"
        )
    if plan.unit != "client" or ledger.unit != "client":
        raise InputError(
            f"scores protect each client, the plan each {plan.unit} and the ledger each "
            f"{ledger.unit}"
        )
    if plan.sampling == "epochs":
        raise InputError(
            "scores draw a new cohort for every release, which the rounds of an epoch do not "
            "allow: make a plan with sampling = 'poisson' or 'fixed', found 'epochs'"
        )
    if plan.adaptive_clip is not None:
        raise InputError("scores have one clip norm: make a plan without adaptive_clip")
    if ledger.population != clients.fingerprint:
        raise InputError("the ledger is of another population than the clients who score")
