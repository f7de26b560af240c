"""One look: ONE release of the moments of all clients' embeddings, for all of POPri's rewards.

`popri.reward: moments` asks the clients once, before the first round, for the whole epsilon; see
`algorithms.one_look`. The release is FreD's query: three charges, which compose to one Gaussian
mechanism. All rounds, whatever is chosen by their texts, and the choice of the corpus that prompts
are made of (`popri.corpus: nearest`) are post-processing of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.frechet import moments as frechet_moments
from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, Score, fred, moments, score
from jaxpfl.experiments.engine.releases import Releases
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig
from jaxpfl.federated.release.query import Query
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import Embedder

MOMENTS, NEAREST = "moments", "nearest_corpus"
"""The artifacts of the release and of the choice of a corpus."""

# Of each corpus, so many texts are embedded, up to twice as many.
_CORPUS_TEXTS = 2_000


def fred_plan(config: SyntheticTextConfig, clients: int) -> FredPlan:
    """What is released of the clients: their embeddings' moments, for the epsilon of `privacy`.

    A section `simulated` gives the means the noise of that population, all of which take part.
    """
    privacy, larger = config.privacy, config.simulated
    most = config.training.max_examples
    if not privacy.private:
        return FredPlan.without_privacy(max_examples=most)
    assert privacy.epsilon is not None and privacy.delta is not None, "the config checks it"
    delta = privacy.delta if larger is None else larger.delta
    kind = privacy.noise
    plan = FredPlan.calibrated(epsilon=privacy.epsilon, delta=delta, max_examples=most, noise=kind)
    return plan if larger is None else plan.simulated_by(clients, privacy.delta, larger.population)


def joint_plan(plan: FredPlan, clients: int) -> Plan:
    """One round of all clients that costs what the query's three releases cost together."""
    everyone = Poisson(clients, clients)
    if not plan.private:
        return Plan.without_privacy(rounds=1, clip=Clip(1.0), participation=everyone)
    return Plan(
        rounds=1,
        clip=Clip(1.0),
        noise=Noise(1 / plan.mu),
        participation=everyone,
        delta=plan.delta,
        simulates=plan.simulates,
    )


@dataclass(frozen=True)
class Look:
    """The query of the moments, and what follows from its release.

    Attributes:
      plan: as `fred_plan` made it.
      clients: their number.
      dimension: of an embedding.
    """

    plan: FredPlan
    clients: int
    dimension: int

    @cached_property
    def algorithm(self) -> Algorithm:
        return fred(self.plan, units=self.clients, dimension=self.dimension)

    @property
    def queries(self) -> tuple[Query, ...]:
        return self.algorithm.queries

    def released(self, releases: Releases) -> PrivateMoments:
        """The clients' moments; asks the clients unless the release is stored."""

        def asked() -> dict[str, np.ndarray]:
            state = self.algorithm.init(jax.random.key(0))
            return moments(self.plan, releases.ask(self.algorithm.step, state, 1)[0]).arrays()

        return PrivateMoments.of_arrays(releases.load_or_compute(MOMENTS, asked), self.plan)

    def nearest(
        self, released: PrivateMoments, corpora: Mapping[str, Sequence[str]], embed: Embedder
    ) -> dict[str, np.ndarray]:
        """The public corpora by their Frechet distance from the clients, the nearest first.

        It costs nothing beyond the release. Of each corpus the same share of texts is embedded.

        Returns:
          The "names", and the other fields of their `fred.Score`s.
        """
        found = {}
        for name, texts in corpora.items():
            every = max(1, len(texts) // _CORPUS_TEXTS)
            found[name] = frechet_moments(np.asarray(embed(texts[::every])), self.plan.clip_norm)
        columns = map(np.array, zip(*score(released, found), strict=True))
        return dict(zip(("names", *Score._fields[1:]), columns, strict=True))

    def floats_per_client(self) -> tuple[int, int]:
        """How many float32 numbers a client receives and sends, in all."""
        # The count, the mean, and half of the covariance.
        return self.dimension, 1 + self.dimension + self.dimension * (self.dimension + 1) // 2
