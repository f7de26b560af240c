"""What clients are asked: for scores of texts in each round, or once, of all.

One look (`algorithms.one_look`) asks all clients once, by FreD's query: three charges that are one
Gaussian mechanism. A judge has a share of it, for another embedding: tuning goes on to raise the
reward when texts no longer improve, so the reward's own cannot say when.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.frechet import moments as frechet_moments
from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, Score, fred, score
from jaxpfl.algorithms.fred.query import by_embedding, moments
from jaxpfl.algorithms.steering import PublicStates, steering, with_differences
from jaxpfl.data.population import Population
from jaxpfl.experiments.central.text_pool import choose_from
from jaxpfl.experiments.config.sections import WRITTEN
from jaxpfl.experiments.engine.phases import Phases
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.report.chosen import record_of
from jaxpfl.experiments.systems.synthetic_text.config import EMBEDDING, JUDGE, Config
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels, loaded_embedder
from jaxpfl.federated.release.query import Query
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import Embedder
from jaxpfl.text.embed.encoder import HiddenStates

# Of each corpus, and for the public states, so many texts are embedded, up to twice as many; and to
# choose single ones from.
_CORPUS_TEXTS, _POOL_TEXTS = 2_000, 20_000


class Question(NamedTuple):
    """What clients are asked.

    `of` makes the releases; a `Scorer` asks in each round, also for votes. The `queries` read the
    columns of the `embedders`, or one that `prepare` makes of clients with their texts. `floats`
    are the float32 numbers that a client receives and sends, in a round or of a look in all.
    """

    of: "Scorer | Look | SteeringRelease"
    queries: tuple[Query, ...]
    embedders: Mapping[str, Embedder]
    floats: tuple[int, int]
    prepare: Callable[..., Population] | None = None


@dataclass(frozen=True)
class Look:
    """The queries of the moments of so many clients, and what follows from their release.

    The `plan` has a share of each column, and `names` the embedder of each.
    """

    plan: FredPlan
    names: Mapping[str, str]
    clients: int

    @cached_property
    def embedders(self) -> Mapping[str, Embedder]:
        return {column: loaded_embedder(name) for column, name in self.names.items()}

    @cached_property
    def algorithm(self) -> Algorithm:
        dimensions = {column: embedder.dimension for column, embedder in self.embedders.items()}
        algorithm = fred(self.plan, units=self.clients, dimension=dimensions)
        return algorithm._replace(name="one look")

    def released(self, phases: Phases) -> dict[str, PrivateMoments]:
        """The clients' moments by column; asks the clients unless the release is stored."""

        def asked() -> dict[str, np.ndarray]:
            state, arrays = self.algorithm.init(jax.random.key(0)), {}
            after, _ = phases.step(self.algorithm.step, state, 1)
            for column, (plan, of) in zip(self.names, by_embedding(self.plan, after), strict=True):
                of_column = moments(plan, of).arrays()
                arrays |= {f"{column}.{name}": array for name, array in of_column.items()}
            return arrays

        arrays, released = phases.load_or_compute("moments", asked), {}
        for column, plan in zip(self.names, self.plan.parts, strict=True):
            start = f"{column}."
            own = {key.removeprefix(start): a for key, a in arrays.items() if key.startswith(start)}
            released[column] = PrivateMoments.of_arrays(own, plan)
        return released

    def judged(
        self,
        released: Mapping[str, PrivateMoments],
        written: Sequence[Sequence[str]],
        least_words: int,
    ) -> dict[str, np.ndarray]:
        """The "distances" of several lists of texts from the clients, without the noise's bias.

        By the second judge or, where there is none, by the embedder that the rewards see; costs
        nothing. Texts of fewer words do not count; a list without others is as far as texts can
        be. "chosen" is the number of the nearest list.
        """
        judge = JUDGE if JUDGE in self.names else EMBEDDING
        embed, target, moments = self.embedders[judge], released[judge], {}
        clip_norm = target.plan.clip_norm
        for number, texts in enumerate(written):
            if long := [text for text in texts if len(text.split()) >= least_words]:
                moments[str(number)] = frechet_moments(np.asarray(embed(long)), clip_norm)
        nearest = {int(scored.name): scored.corrected for scored in score(target, moments)}
        distances = [nearest.get(number, 4 * clip_norm**2) for number in range(len(written))]
        # Under much noise several distances are zero: `score` orders them by what lies below.
        return {"distances": np.array(distances), "chosen": np.array(next(iter(nearest), 0))}

    def nearest(
        self, released: PrivateMoments, corpora: Mapping[str, Sequence[str]]
    ) -> dict[str, np.ndarray]:
        """Public corpora by Frechet distance from the clients, the nearest first, at no cost.

        Returns the "names", and the other fields of their `fred.Score`s.
        """
        moments, embed = {}, self.embedders[EMBEDDING]
        for name, texts in corpora.items():
            vectors = np.asarray(embed(thinned(texts, _CORPUS_TEXTS)))
            moments[name] = frechet_moments(vectors, released.plan.clip_norm)
        columns = map(np.array, zip(*score(released, moments), strict=True))
        return dict(zip(("names", *Score._fields[1:]), columns, strict=True))

    def chosen(
        self,
        released: PrivateMoments,
        pool: Mapping[str, Sequence[str]],
        number: int,
        written: Sequence[str] = (),
    ) -> Artifact:
        """So many single texts of a pool of corpora, at no cost, and the record of the choice.

        Of those that a model has `written` after looking at the release, new ones join the pool.
        """
        embed, public = self.embedders[EMBEDDING], set(chain.from_iterable(pool.values()))
        if new := [text for text in dict.fromkeys(written) if text not in public]:
            pool = {**pool, WRITTEN: new}
        texts = list(chain.from_iterable(pool.values()))
        sources = np.repeat(list(pool), list(map(len, pool.values())))
        embeddings = {name: np.asarray(embed(of_corpus)) for name, of_corpus in pool.items()}
        choice = choose_from(released, embeddings, number, written=WRITTEN if new else "")
        drawn = np.array([texts[row] for row in choice.rows_M])
        arrays = {"texts": drawn, "sources": sources[choice.rows_M]}
        return Artifact(record_of(choice, texts.__getitem__), arrays)


@dataclass(frozen=True)
class SteeringRelease:
    """The one query of all clients for differences of hidden states, and the vectors of it."""

    models: StudyModels
    plan: Plan

    @cached_property
    def states(self) -> HiddenStates:
        """The states of the untuned generator, in the chosen layers."""
        config, generator = self.models.config, self.models.generator
        layers = config.steering.numbers(generator.model.config.layers)
        return HiddenStates(generator, layers, config.corpus.tokens)

    @cached_property
    def public(self) -> PublicStates:
        """Of the texts that prompts are made of."""
        texts = self.models.samples(self.models.config.popri.samples)
        states_NxD = self.states(thinned(texts, _CORPUS_TEXTS))
        return PublicStates.of(states_NxD, len(self.states.layers))

    @cached_property
    def algorithm(self) -> Algorithm:
        return steering(self.plan, self.states.dimension)

    def prepare(self, clients: Population, *, progress: bool = False) -> Population:
        return with_differences(clients, self.states, self.public, progress=progress)

    def released(self, phases: Phases) -> Mapping[str, np.ndarray]:
        """See `PublicStates.vectors`; asks the clients unless the release is stored."""

        def asked() -> dict[str, np.ndarray]:
            sum_D, _ = phases.step(self.algorithm.step, self.algorithm.init(jax.random.key(0)), 1)
            noise_std = self.plan.value_noise_std(self.plan.clip_norm)
            return self.public.vectors(np.asarray(sum_D), noise_std)

        return phases.load_or_compute("steering", asked)


def thinned(texts: Sequence[str], most: int = _POOL_TEXTS) -> Sequence[str]:
    """Every k-th text, so that `most` are left, up to twice as many."""
    return texts[:: max(1, len(texts) // most)]


def question_of(models: StudyModels, plan: Plan) -> Question:
    """What clients are asked in a method whose texts follow from their answers."""
    config = models.config
    if config.method == "steered":
        release = SteeringRelease(models, plan)
        dimension = release.states.dimension
        floats = dimension, dimension + 1
        return Question(release, release.algorithm.queries, {}, floats, release.prepare)
    if config.one_look:
        look = Look(fred_plan(config, plan.population), config.embedders, plan.population)
        sizes = [embedder.dimension for embedder in look.embedders.values()]
        # The count, and of each the mean and half of the covariance.
        floats = sum(sizes), 1 + sum(size + size * (size + 1) // 2 for size in sizes)
        return Question(look, look.algorithm.queries, look.embedders, floats)
    embedder = loaded_embedder(config.embedder)
    scorer = Scorer(plan, kind=config.client_score, max_texts=config.evolution.max_texts)
    floats = scorer.floats_per_client(*config.candidates, embedder.dimension)
    return Question(scorer, scorer.queries, {EMBEDDING: embedder}, floats)


def fred_plan(config: Config, clients: int) -> FredPlan:
    """What is released of the clients: their embeddings' moments, for the epsilon of `privacy`.

    One release of all clients costs the same, see `Study.plan`.
    A section `simulated` gives the means the noise of that population, all of which take part.
    """
    privacy, larger = config.privacy, config.simulated
    share = config.popri.judge_share
    settings: Any = {"max_examples": config.training.max_examples}
    settings["shares"] = (1 - share, share) if JUDGE in config.embedders else (1.0,)
    if not privacy.private:
        return FredPlan.without_privacy(**settings)
    assert privacy.epsilon is not None and privacy.delta is not None, "the config checks it"
    delta = privacy.delta if larger is None else larger.delta
    cost: Any = {"epsilon": privacy.epsilon, "delta": delta}
    plan = FredPlan.calibrated(**cost, **settings, noise=privacy.noise)
    return plan if larger is None else plan.simulated_by(clients, privacy.delta, larger.population)
