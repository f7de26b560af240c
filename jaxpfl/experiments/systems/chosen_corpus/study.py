"""What a config describes: the clients' one release, and the public texts to choose from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fred import (
    FredPlan,
    FredState,
    PrivateMoments,
    by_label,
    fred,
    moments,
    used_examples,
)
from jaxpfl.algorithms.fred.scores import visible
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.chosen_corpus.author import Author, sized
from jaxpfl.experiments.systems.chosen_corpus.config import Config
from jaxpfl.experiments.systems.chosen_corpus.labels import labelled
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import Embedder, embed, embedder


@dataclass(frozen=True)
class Study(base.Study):
    """The release of `clients`, whose texts are cut by the config's rule; PRIVATE.

    Attributes:
      corpora: the public corpora by name, as they were read; none for made-up clients.
      pool: their texts as they are cut, each once.
      repeated: how many texts of the corpora were empty, or there before.
      author: the model that writes more texts, if there is one.
    """

    config: Config
    corpora: Mapping[str, Population] = field(default_factory=dict, repr=False)
    pool: Mapping[str, Population] = field(default_factory=dict, repr=False)
    repeated: int = 0
    author: Author | None = None

    @cached_property
    def plans(self) -> dict[str, Plan]:
        number = len(self.clients)
        return {f"moments {i}": plan for i, plan in enumerate(self.moments.plans(number))}

    @cached_property
    def moments(self) -> FredPlan:
        """The plan of the release."""
        privacy, number = self.config.privacy, len(self.clients)
        settings: Any = {"max_examples": self.config.max_examples, "population": number}
        if self.config.labels is not None:
            # How many clients each label has is private.
            settings |= {"population": None, "labels": len(self.config.labels.names)}
        if not privacy.private:
            return FredPlan.without_privacy(**settings)
        assert privacy.epsilon is not None and privacy.delta is not None, "the config checks it"
        cost: Any = {"epsilon": privacy.epsilon, "delta": privacy.delta}
        return FredPlan.calibrated(**cost, **settings, noise=privacy.noise)

    @cached_property
    def embedder(self) -> Embedder:
        return embedder(self.config.embedder)

    @cached_property
    def release(self) -> Algorithm:
        """The one release, of `embedded` clients."""
        return fred(self.moments, units=len(self.clients), dimension=self.embedder.dimension)

    def embedded(self, progress: bool) -> Population:
        """The clients with the embeddings that the release reads, which may take long."""
        used = used_examples(self.clients, self.moments, self.config.data.split_seed)
        # Whether any text has a label of the list is private, and no bar is shown of none.
        progress = progress and self.config.labels is None
        columns = dict(embed(used, self.embedder, progress=progress).columns)
        if self.config.labels is not None:
            columns["label"] = used.columns["label"]
        return used.with_columns(columns)

    def released(self, state: FredState) -> dict[str, PrivateMoments]:
        """The clients' moments by label; "" without labels."""
        if self.config.labels is None:
            return {"": moments(self.moments, state)}
        parts = zip(self.config.labels.names, by_label(state), strict=True)
        return {name: moments(self.moments, part) for name, part in parts}

    def shown(
        self, pool_DxD: np.ndarray, released: dict[str, PrivateMoments]
    ) -> dict[str, PrivateMoments]:
        """Those labels of whose texts noise hides not all; refuses clients of whom it hides all."""
        shown = {label: part for label, part in released.items() if visible(part)[0].size}
        if not shown:
            self.require_visible(pool_DxD, max(released.values(), key=lambda p: p.moments.count))
        return shown

    def require_visible(self, pool_DxD: np.ndarray, released: PrivateMoments | None = None) -> None:
        """Refuses clients of whom noise hides every direction.

        Before the release, they are taken to be spread as the pool is, and equal over labels.

        Args:
          pool_DxD: the covariance of the pool.
          released: their moments, or those of the label with most, which were charged; None before.
        """
        number, dimension = len(self.clients), len(pool_DxD)
        count = number / self.moments.labels if released is None else released.moments.count
        # The largest eigenvalue that noise alone would have, see `fred.scores`.
        edge = 2 * self.moments.noise_stds[2] / count * math.sqrt(dimension / 2)
        largest = float(np.linalg.eigvalsh(pool_DxD)[-1])
        if not largest > 0:
            raise InputError(
                f"the public texts must differ, found embeddings by {self.embedder.name} that are "
                "all the same; nothing was released"
            )
        hidden, whose, cost = largest <= edge, "the public texts", "nothing was released"
        if released is not None:
            hidden, whose = not visible(released)[0].size, "the clients' texts"
            # What the noise hides is smaller (Benaych-Georges and Nadakuditi 2011).
            largest, cost = min(largest, edge / 2), "the release was charged"
        if hidden:
            digit = 10 ** math.floor(math.log10(number))
            needed = math.ceil(number * edge / largest / digit) * digit
            raise InputError(
                f"no direction of {whose} stands out of the noise of {number:,} clients at epsilon "
                f"{self.config.privacy.epsilon:g} with {self.embedder.name}: with about "
                f"{needed:,} clients one would; an embedder of fewer dimensions than {dimension}, "
                f"as hashed:8, needs fewer; {cost}"
            )

    def describe(self) -> description.Description:
        number = len(self.clients)
        dimension, notes = description.embedding_size(self.config.embedder)
        rounds = {}
        if dimension is not None:
            with description.tracing("the release"):
                release = description.moments_release(self.moments, number, dimension)
            rounds = {"moments": release}
        return description.Description(
            models={} if (writer := self.config.writer) is None else {"writer": sized(writer)},
            rounds=rounds,
            releases={"moments": description.PlannedRelease.of_moments(self.moments, number)},
            sources={f"corpora.{name}": source for name, source in self.config.corpora.items()},
            notes=notes,
        )


def prepare(config: Config) -> Study:
    """Reads clients and corpora, and refuses what cannot be carried out; nothing is released."""
    clients = build.read_clients(config.data)
    train = build.split_clients(clients, config.data)["train"]
    content, rule, corpora = PrivateContent(train), Cut.without_model(config.cut), {}
    for name, source in config.corpora.items():
        corpora[name] = open_population(source, public=True)
        content.refuse(corpora[name], f"corpora.{name} = {source!r}")
    cut = {name: rule.population(corpus) for name, corpus in corpora.items()}
    pool, repeated = text_pool.without_repeats(cut)
    text_pool.require_larger(sum(c.num_examples for c in pool.values()), config.texts, "texts")
    author = None
    if config.writer is not None:
        author = Author(config.writer, config.corpora, rule, pool, config.run.seed)
        author.require()
    labels = config.labels
    used = rule.population(train) if labels is None else labelled(train, labels, rule)
    study = Study(config, used, corpora, pool, repeated, author)
    _ = study.release  # refuses what cannot be calibrated
    return study
