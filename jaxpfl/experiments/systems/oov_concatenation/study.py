"""The study of joined words: federated language models reveal a bug of a tokeniser.

Source: Augenstein et al. 2020, section 5 and appendix B. In a share of the sentences the first two
words are joined into one, which is out of vocabulary. Two models are trained privately, and the
clients' own words are counted:

    words        on whole sentences: it shows WHERE in a sentence words are out of vocabulary
    characters   on the clients' out-of-vocabulary words only: it shows WHICH words these are
    rate         how many of the clients' words are out of vocabulary, by one release (Table 6)

Each share of the bug is a WORLD of its own, in which the same clients have another history. The
three releases of a world are charged to one ledger; the page also states the cost of all worlds.

    vocabulary.json              the words of the public corpus
    artifacts/                   initial parameters of the character model; the generated text
    runs/, worlds/               see `systems.worlds`
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.federated_sums import COLUMN, federated_sums, plan_of_everyone
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.systems import worlds
from jaxpfl.experiments.systems.oov_concatenation.config import OovConcatenationConfig
from jaxpfl.experiments.systems.worlds import RATE
from jaxpfl.federated.audits.rehearsal import column, rehearse
from jaxpfl.models.base import initialised, require_room
from jaxpfl.privacy.plan import Plan
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

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plans of both models and of the count, which are the same in every world."""
        both = {"words": self.config.words, "characters": self.config.characters}
        number = len(self.clients)
        plans = {
            kind: description.cached_plan(s.privacy, s.training, number) for kind, s in both.items()
        }
        words = self.config.words
        # No client counts more words than that.
        most = words.training.max_examples * words.model.sequence_length
        rate = plan_of_everyone(number, most, words.rate_epsilon, words.privacy.delta)
        return {**plans, RATE: rate}

    @cached_property
    def models(self) -> dict[str, Any]:
        sizes = dataclasses.asdict(self.config.characters.model)
        sizes.pop("max_bytes")
        if self.public_words is not None:
            # Their letter frequencies.
            sizes["output_bias_prior"] = log_prior(self.public_words)
        words = build.build_model(self.config.words.model, self.vocabulary)
        return {"words": words, "characters": char_lm(**sizes)}

    @property
    def worlds(self) -> dict[str, float]:
        """The share of sentences with the bug by world, such as 0.01 of "bug_1_percent"."""
        return {f"bug_{100 * share:g}_percent": share for share in self.config.bug.probabilities}

    def algorithm(self, kind: str, start: Any = None) -> Algorithm:
        """Trains a model, with `start` as in `algorithms.fed_avg`, or counts the words."""
        if kind == RATE:
            most = self.config.words.training.max_examples
            return federated_sums(self.plans[RATE], length=2, max_examples=most)
        training = getattr(self.config, kind).training
        return build.build_algorithm(self.models[kind], training, self.plans[kind], start)

    def describe(self) -> description.Description:
        words, characters = self.config.words.model, self.config.characters.model
        columns = {
            "words": description.example_columns(words),
            # Start and end of word.
            "characters": {"tokens": column((characters.max_bytes + 2,), np.int32)},
        }
        models, rounds = {}, {}
        for kind, model in self.models.items():
            with description.tracing(f"a round of {kind}"):
                models[kind] = description.Sized.of(model.name, description.shapes_of(model))
                rounds[kind] = rehearse(partial(self.algorithm, kind), columns[kind])
        counts = {COLUMN: column((2,), np.float32)}
        rounds[RATE] = rehearse(partial(self.algorithm, RATE), counts)
        releases, together = (
            super().describe().releases,
            self.together(self.config.words.privacy.delta),
        )
        return description.Description(models, rounds, releases, together=together)

    def examples(self, kind: str, clients: Population) -> Population:
        """The examples that a model is trained on, or that the count reads."""
        if kind == RATE:
            tokens_NxT = np.asarray(self.examples("words", clients).columns["tokens"])
            return clients.with_columns({COLUMN: oov_counts(tokens_NxT)})
        if kind == "words":
            return self.vocabulary.encode(clients, self.config.words.model.sequence_length)
        return oov_words(clients, self.vocabulary, self.config.characters.model.max_bytes)

    def character_start(self) -> Any:
        """The initial parameters of the character model, which follow from public words."""
        settings, model = self.config.characters, self.models["characters"]
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
    parts = build.split_clients(build.read_clients(config.data), config.data)
    assert config.data.public is not None
    private = PrivateContent(parts["train"])
    public = build.open_public(config.data.public, parts["public"], private, "data.public")
    size, longest = config.words.model.vocab_size, config.characters.model.max_bytes
    vocabulary = build.public_vocabulary(
        config.data.vocabulary or public, parts["public"], private, size
    )
    unknown = oov_words(public, vocabulary, longest).columns["tokens"]
    if not len(unknown):
        raise InputError(
            "data.public must contain words out of the vocabulary, found none: lower "
            f"words.model.vocab_size = {size}"
        )
    train = with_words(parts["train"], vocabulary.split)
    study = Study(config, train, vocabulary, np.asarray(unknown))
    for model in study.models.values():
        require_room(model)
    study.at_scale()
    return study
