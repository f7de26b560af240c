"""The study of joined words: federated language models reveal a bug of a tokeniser.

Source: Augenstein et al. 2020, section 5 and appendix B. In a share of the sentences the first two
words are joined into one, which is out of vocabulary. Two models are trained privately, and the
clients' own words are counted:

    words        on whole sentences: it shows WHERE in a sentence words are out of vocabulary
    characters   on the clients' out-of-vocabulary words only: it shows WHICH words these are
    rate         how many of the clients' words are out of vocabulary, by one release (Table 6)

Each share of the bug is a world of its own, see `systems.worlds`.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.federated_metrics import COLUMN
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.systems import worlds
from jaxpfl.experiments.systems.oov_concatenation.config import OovConcatenationConfig
from jaxpfl.experiments.systems.worlds import RATE
from jaxpfl.federated.audits.rehearsal import column
from jaxpfl.models.base import initialised, require_room
from jaxpfl.text.character.words import char_lm, log_prior, oov_words
from jaxpfl.text.metrics.oov import oov_counts
from jaxpfl.text.tokenisers.vocabulary import with_words


@dataclass(frozen=True)
class Study(worlds.Study):
    """The two models of each world, and the count of its words.

    Attributes:
      clients: the training clients without the bug, with their words; PRIVATE.
      vocabulary: a `Vocabulary`, the words of the public corpus; None for made-up clients.
      public_words: those of its words that are out of the vocabulary, as bytes; None likewise.
    """

    config: OovConcatenationConfig
    vocabulary: Any = field(default=None, repr=False)
    public_words: Any = field(default=None, repr=False)

    rates = ("oov_overall", "oov_noise")

    @property
    def most(self) -> int:
        return self.config.words.training.max_examples * self.config.words.model.sequence_length

    @cached_property
    def kinds(self) -> dict[str, worlds.Kind]:
        words, characters = self.config.words, self.config.characters
        sizes = dataclasses.asdict(characters.model)
        # Start and end of word.
        tokens = column((sizes.pop("max_bytes") + 2,), np.int32)
        if self.public_words is not None:
            # Their letter frequencies.
            sizes["output_bias_prior"] = log_prior(self.public_words)
        model, columns = words.model, description.example_columns(words.model)
        return {
            "words": worlds.Kind(words, build.build_model(model, self.vocabulary), columns),
            "characters": worlds.Kind(characters, char_lm(**sizes), {"tokens": tokens}),
        }

    @property
    def worlds(self) -> dict[str, float]:
        """The share of sentences with the bug by world, such as 0.01 of "bug_1_percent"."""
        return {f"bug_{100 * share:g}_percent": share for share in self.config.bug.probabilities}

    def examples(self, clients: Population, kind: str) -> Population:
        """The examples that a model is trained on, or that the count reads."""
        if kind == RATE:
            tokens_NxT = np.asarray(self.examples(clients, "words").columns["tokens"])
            return clients.with_columns({COLUMN: oov_counts(tokens_NxT)})
        if kind == "words":
            return self.vocabulary.encode(clients, self.config.words.model.sequence_length)
        return oov_words(clients, self.vocabulary, self.config.characters.model.max_bytes)

    def character_start(self) -> Any:
        """The initial parameters of the character model, which follow from public words."""
        settings, model = self.config.characters, self.kinds["characters"].model
        if not settings.prefinetune_epochs:
            return initialised(model, jax.random.key(self.config.run.seed))
        return fit_adam(
            model,
            {"tokens": self.public_words},
            epochs=settings.prefinetune_epochs,
            batch_size=128,
            learning_rate=0.003,
            seed=self.config.run.seed,
        )


def prepare(config: OovConcatenationConfig) -> Study:
    """Reads the clients and refuses what cannot be carried out; see `systems.base`."""
    size, longest = config.words.model.vocab_size, config.characters.model.max_bytes
    train, public, vocabulary, _ = worlds.opened(config.data, size)
    unknown = oov_words(public, vocabulary, longest).columns["tokens"]
    if not len(unknown):
        raise InputError(
            "data.public must contain words out of the vocabulary, found none: lower "
            f"words.model.vocab_size = {size}"
        )
    study = Study(config, with_words(train, vocabulary.split), vocabulary, np.asarray(unknown))
    for each in study.kinds.values():
        require_room(each.model)
    study.at_scale()
    return study
