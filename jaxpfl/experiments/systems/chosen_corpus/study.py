"""What a config describes: the clients' one release, and the public texts to choose from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fred import FredPlan, FredState, PrivateMoments, fred, used_examples
from jaxpfl.algorithms.fred.query import by_embedding, by_label, moments
from jaxpfl.algorithms.fred.scores import visible
from jaxpfl.data import open as open_population
from jaxpfl.data.columns import concatenated, take
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.errors import InputError
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.chosen_corpus.author import Author, sized
from jaxpfl.experiments.systems.chosen_corpus.config import JUDGE, Config, LabelsConfig
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.columns import text_column
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
        privacy, config = self.config.privacy, self.config
        settings: Any = {"max_examples": config.max_examples, "shares": config.shares}
        if config.labels is None:
            settings["population"] = len(self.clients)
        else:
            # How many clients each label has is private.
            settings["labels"] = len(config.labels.names)
        if not privacy.private:
            return FredPlan.without_privacy(**settings)
        cost: Any = {"epsilon": privacy.epsilon, "delta": privacy.delta}
        return FredPlan.calibrated(**cost, **settings, noise=privacy.noise)

    @cached_property
    def embedders(self) -> dict[str, Embedder]:
        return {column: embedder(name) for column, name in self.config.embedders.items()}

    @cached_property
    def release(self) -> Algorithm:
        """The one release, of `embedded` clients."""
        dimensions = {column: function.dimension for column, function in self.embedders.items()}
        return fred(self.moments, units=len(self.clients), dimension=dimensions)

    def embedded(self, progress: bool) -> Population:
        """The clients with the embeddings that the release reads, which may take long."""
        used = used_examples(self.clients, self.moments, self.config.data.split_seed)
        # Whether any text has a label of the list is private, and no bar is shown of none.
        progress = progress and self.config.labels is None
        columns = {
            column: embed(used, function, progress=progress).columns["embedding"]
            for column, function in self.embedders.items()
        }
        if self.config.labels is not None:
            columns["label"] = used.columns["label"]
        return used.with_columns(columns)

    def released(self, state: FredState) -> dict[str, dict[str, PrivateMoments]]:
        """The clients' moments by label, "" without labels; and by the embedder's column."""
        labels = self.config.labels
        released = {name: {} for name in ([""] if labels is None else labels.names)}
        parts = by_embedding(self.moments, state)
        for column, (plan, sums) in zip(self.embedders, parts, strict=True):
            of_labels = [sums] if labels is None else by_label(sums)
            for of_label, part in zip(released.values(), of_labels, strict=True):
                of_label[column] = moments(plan, part)
        return released

    def shown(
        self, pool_DxDs: Mapping[str, np.ndarray], released: Mapping[str, dict[str, PrivateMoments]]
    ) -> dict[str, dict[str, PrivateMoments]]:
        """Of each label the embedders by which noise hides not all of its texts, and the judge.

        Labels without one are left out. Refuses clients of whom it hides all.
        """
        shown = {}
        for label, of in released.items():
            parts = {name: p for name, p in of.items() if name == JUDGE or visible(p)[0].size}
            if parts.keys() - {JUDGE}:
                shown[label] = parts
        if not shown:
            most = max(released.values(), key=lambda of: of["embedding"].moments.count)
            self.require_visible(pool_DxDs, most)
        return shown

    def require_visible(
        self,
        pool_DxDs: Mapping[str, np.ndarray],
        released: Mapping[str, PrivateMoments] | None = None,
    ) -> None:
        """Refuses clients of whom noise hides every direction by one of the choosing embedders.

        Before the release, they are taken to be spread as the pool is, and equal over labels.

        Args:
          pool_DxDs: the covariance of the pool, by the embedder's column.
          released: their moments, or those of the label with most, which were charged; None before.
        """
        for (column, pool_DxD), plan in zip(pool_DxDs.items(), self.moments.parts, strict=True):
            if column == JUDGE:
                continue
            number, dimension, name = len(self.clients), len(pool_DxD), self.embedders[column].name
            part = None if released is None else released.get(column)
            count = number / self.moments.labels if part is None else part.moments.count
            # The largest eigenvalue that noise alone would have, see `fred.scores`.
            edge = 2 * plan.noise_stds[2] / count * math.sqrt(dimension / 2)
            largest = float(np.linalg.eigvalsh(pool_DxD)[-1])
            if not largest > 0:
                problem = f"found embeddings by {name} that are all the same"
                raise InputError(f"the public texts must differ, {problem}; nothing was released")
            hidden, whose, cost = largest <= edge, "the public texts", "nothing was released"
            if part is not None:
                hidden, whose = not visible(part)[0].size, "the clients' texts"
                # What the noise hides is smaller (Benaych-Georges and Nadakuditi 2011).
                largest, cost = min(largest, edge / 2), "the release was charged"
            if hidden:
                digit = 10 ** math.floor(math.log10(number))
                needed = math.ceil(number * edge / largest / digit) * digit
                raise InputError(
                    f"no direction of {whose} stands out of the noise of {number:,} clients at "
                    f"epsilon {self.config.privacy.epsilon:g} with {name}: with about {needed:,} "
                    "clients one would; an embedder of fewer dimensions than "
                    f"{dimension}, as hashed:8, needs fewer; {cost}"
                )

    def describe(self) -> description.Description:
        config, number = self.config, len(self.clients)
        look = description.of_moments("moments", self.moments, number, config.embedders)
        models = {} if config.writer is None else {"writer": sized(config.writer)}
        sources = {f"corpora.{name}": source for name, source in config.corpora.items()}
        return replace(look, models=models, sources=sources)


def labelled(clients: Population, labels: LabelsConfig, rule: Cut) -> Population:
    """The same clients with the pieces of their texts, and the column "label", int32.

    A label is its place in the PUBLIC list; texts with another are left out. The texts of each are
    cut for themselves, so that no piece has text of two labels.
    """
    if labels.column not in clients.columns:
        columns = ", ".join(map(repr, clients.columns))
        expected = f"the column {labels.column!r} of labels: add ?columns={labels.column}"
        raise InputError(f"data.source must have {expected}, found {columns}")
    kind = np.asarray(take(clients.column(labels.column), np.arange(0))).dtype.kind
    if kind == "f" or (kind == "b" and not set(labels.names) <= {"True", "False"}):
        expected = "be named True and False" if kind == "b" else "be texts or whole numbers"
        kinds = "booleans" if kind == "b" else "numbers with fractions"
        raise InputError(f"the labels in {labels.column!r} must {expected}, found {kinds}")
    values = take(clients.column(labels.column), np.arange(clients.num_examples)).tolist()
    label_N = np.array(list(map(str, values)))
    parts = [rule.population(clients.keeping(label_N == name)) for name in labels.names]
    owner_N = np.concatenate([np.repeat(np.arange(len(part)), part.sizes()) for part in parts])
    place_N = np.repeat(np.arange(len(parts), dtype=np.int32), [p.num_examples for p in parts])
    order_N = np.argsort(owner_N, kind="stable")
    texts = take(concatenated([text_column(part) for part in parts]), order_N)
    columns = {"text": texts, "label": place_N[order_N]}
    return clients.with_examples(columns, offsets_of(np.bincount(owner_N, minlength=len(clients))))


def prepare(config: Config) -> Study:
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
        if author.published is not None:
            author.published.require_positions(author.positions, "prompts of the public texts")
    labels = config.labels
    used = rule.population(train) if labels is None else labelled(train, labels, rule)
    study = Study(config, used, corpora, pool, repeated, author)
    _ = study.release  # refuses what cannot be calibrated
    return study
