"""The study of training bias: what do clients write that public training data lacks?

Source: Augenstein et al. 2020, Table 1 (task T6) and section 2.1, which describe it and leave it to
future work. A language model is trained on public text. Every client keeps the sentences that are
improbable by this model, and a second model is trained on these alone, privately, from the first
one's parameters. What it generates with more probability than the public model by a threshold is
what the public data lacks. How many sentences clients keep is one more release, a count.

The bias is simulated: a share of the clients writes texts of another source. Each share is a WORLD
of its own, in which the same clients have another history, with a ledger of its own.

    vocabulary.json              the words
    artifacts/                   the public model, its threshold, the generated sentences
    runs/, worlds/               see `systems.worlds`
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.federated_sums import COLUMN, federated_sums, plan_of_everyone
from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.systems import worlds
from jaxpfl.experiments.systems.training_bias.config import TrainingBiasConfig
from jaxpfl.experiments.systems.worlds import RATE
from jaxpfl.federated.audits.rehearsal import column, rehearse
from jaxpfl.privacy.plan import Plan

MODEL = "model"


@dataclass(frozen=True)
class Study(worlds.Study):
    """The private model and the count of each world.

    Attributes:
      clients: the training clients without the bias, with their texts; PRIVATE.
      vocabulary: None for made-up clients, and so are the others.
      public: token ids of the PUBLIC corpus, int32 [sentences, length + 1].
      planted: the PUBLIC texts that some clients write, a population.
    """

    config: TrainingBiasConfig
    vocabulary: Any = field(default=None, repr=False)
    public: Any = field(default=None, repr=False)
    planted: Any = field(default=None, repr=False)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plans of the private model and of the count, which are the same in every world."""
        privacy, training, number = self.config.privacy, self.config.training, len(self.clients)
        # No client counts more sentences than that.
        most = training.max_examples
        rate = plan_of_everyone(number, most, self.config.rate_epsilon, privacy.delta)
        return {MODEL: description.cached_plan(privacy, training, number), RATE: rate}

    @cached_property
    def model(self) -> Any:
        return build.build_model(self.config.model, self.vocabulary)

    @property
    def worlds(self) -> dict[str, float]:
        """The share of clients who write something else, by world."""
        return {f"bias_{100 * share:g}_percent": share for share in self.config.bias.shares}

    def algorithm(self, kind: str, start: Any = None) -> Algorithm:
        """Trains the model from `start`, or counts the sentences."""
        training = self.config.training
        if kind == RATE:
            return federated_sums(self.plans[RATE], length=2, max_examples=training.max_examples)
        return build.build_algorithm(self.model, training, self.plans[MODEL], start)

    def describe(self) -> description.Description:
        with description.tracing("a round of the model"):
            shapes = description.shapes_of(self.model)
            models = {MODEL: description.Sized.of(self.model.name, shapes)}
            columns = {
                MODEL: description.example_columns(self.config.model),
                RATE: {COLUMN: column((2,), np.float32)},
            }
            rounds = {
                kind: rehearse(partial(self.algorithm, kind), columns[kind]) for kind in columns
            }
        together = self.together(self.config.privacy.delta)
        return description.Description(
            models, rounds, super().describe().releases, together=together
        )

    @cached_property
    def held_out(self) -> np.ndarray:
        """Which public sentences do not train the public model, bool [sentences]."""
        generator = np.random.Generator(np.random.Philox(key=self.config.run.seed))
        return generator.random(len(self.public)) < self.config.public_model.valid

    def public_params(self) -> Any:
        """The parameters of the public model."""
        settings = self.config.public_model
        return fit_adam(
            self.model,
            {"tokens": self.public[~self.held_out]},
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            seed=self.config.run.seed,
        )


def prepare(config: TrainingBiasConfig) -> Study:
    """Reads the clients and refuses what cannot be carried out; see `systems.base`."""
    parts = build.split_clients(build.read_clients(config.data), config.data)
    assert config.data.public is not None
    private = PrivateContent(parts["train"])
    public = build.open_public(config.data.public, parts["public"], private, "data.public")
    planted = open_population(config.bias.source, public=True)
    private.refuse(planted, f"bias.source = {config.bias.source!r}")
    vocabulary = build.public_vocabulary(
        config.data.vocabulary or public, parts["public"], private, config.model.vocab_size
    )
    encoded = vocabulary.encode(public, config.model.sequence_length).columns["tokens"]
    study = Study(config, parts["train"], vocabulary, np.asarray(encoded), planted)
    if not 0 < study.held_out.sum() < len(study.held_out):
        raise InputError(
            f"data.public has {len(study.held_out)} sentences, too few to train on and to hold out"
        )
    study.at_scale()
    return study
