"""The study of training bias: what do clients write that public training data lacks?

Source: Augenstein et al. 2020, Table 1 (task T6) and section 2.1, which describe it and leave it to
future work. A language model is trained on public text. Every client keeps the sentences that are
improbable by this model, and a second model is trained on these alone, privately, from the first
one's parameters. What it generates with more probability than the public model by a threshold is
what the public data lacks. How many sentences clients keep is one more release, a count.

The bias is simulated: a share of the clients writes texts of another source. Each share is a world
of its own, see `systems.worlds`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.systems import worlds
from jaxpfl.experiments.systems.training_bias.config import TrainingBiasConfig

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

    rates = ("rare_share", "rare_noise")

    @property
    def most(self) -> int:
        return self.config.training.max_examples

    @cached_property
    def model(self) -> Any:
        return build.build_model(self.config.model, self.vocabulary)

    @property
    def kinds(self) -> dict[str, worlds.Kind]:
        columns = description.example_columns(self.config.model)
        return {MODEL: worlds.Kind(self.config, self.model, columns)}

    @property
    def worlds(self) -> dict[str, float]:
        """The share of clients who write something else, by world."""
        return {f"bias_{100 * share:g}_percent": share for share in self.config.bias.shares}

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
    train, public, vocabulary, private = worlds.opened(config.data, config.model.vocab_size)
    planted = open_population(config.bias.source, public=True)
    private.refuse(planted, f"bias.source = {config.bias.source!r}")
    encoded = vocabulary.encode(public, config.model.sequence_length).columns["tokens"]
    study = Study(config, train, vocabulary, np.asarray(encoded), planted)
    if not 0 < study.held_out.sum() < len(study.held_out):
        raise InputError(
            f"data.public has {len(study.held_out)} sentences, too few to train on and to hold out"
        )
    study.at_scale()
    return study
