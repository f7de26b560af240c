"""A language model that continues lists of chosen public texts; what it writes joins the pool.

    pick     texts are chosen from the public corpora
    write    lists of `SHOTS` of them are continued, by one text each
    pick     texts are chosen from anew, by the same release

It reads public texts alone, and what follows from the release: all of it costs no privacy. Prompts
are never made of written texts. `algorithms.chosen_texts.choice` says what choosing again is worth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.chosen_texts import Choice
from jaxpfl.algorithms.popri import PopriSettings, synthesise
from jaxpfl.data import from_clients
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.central.adamw import DecoderModelConfig
from jaxpfl.experiments.central.public_models import PublicModels
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.published import PublishedModelConfig, RemoteGeneratorConfig
from jaxpfl.experiments.config.sections import WRITTEN
from jaxpfl.experiments.engine import description
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts
from jaxpfl.experiments.systems.chosen_corpus.config import SHOTS, WriterConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.columns import texts_of
from jaxpfl.text.cut import Cut
from jaxpfl.text.generation.few_shot import FewShot
from jaxpfl.text.generation.language_model import Writer
from jaxpfl.text.generation.remote import Refused, RemoteModel
from jaxpfl.text.tokenisers.fast import FastTokeniser

# Texts of a public corpus that a model is pretrained on, or whose tokens are counted, at most.
_PRETRAINED_ON, _COUNTED = 60_000, 2_000
# Before the release it is asked for so many texts.
_TRIED = 4
# A text has at most as many tokens as all but this share of the public ones.
_LONGER = 0.05
# Tokens of a line's heading and end.
_LINE = 4
_SECTION = "writer.generator"


@dataclass(frozen=True)
class Author:
    """The model of a config's section `writer`, and how it is asked.

    Attributes:
      sources: the public corpora, by name.
      cut: the rule by which all texts are cut, and so are those that it writes.
      pool: the public texts as they are cut.
    """

    config: WriterConfig
    sources: Mapping[str, str]
    cut: Cut
    pool: Mapping[str, Population] = field(repr=False)
    seed: int = 0

    @cached_property
    def published(self) -> PublishedModel | None:
        """The published model, of which small files are read; refuses one that is not at hand."""
        if not isinstance(self.config.generator, PublishedModelConfig):
            return None
        published = PublishedModel.of(self.config.generator, _SECTION)
        published.require_decoder("which writes no texts")
        return published

    @cached_property
    def public(self) -> PublicModels:
        config = self.config
        settings = _PRETRAINED_ON, config.vocab_size, files.user_path(config.cache)
        return PublicModels(dict(self.sources), *settings)

    @property
    def tokeniser(self) -> FastTokeniser:
        """The model's own; of one behind an address, a tokeniser that is learned from the pool."""
        return self.public.tokeniser if self.published is None else self.published.tokeniser

    @cached_property
    def settings(self) -> PopriSettings:
        texts = chain.from_iterable(islice(texts_of(c), _COUNTED) for c in self.pool.values())
        return settings_of(self.tokeniser, self.cut, list(texts))

    @property
    def positions(self) -> int:
        """The tokens of the longest prompt and its answer, with a start token."""
        return self.settings.prompt_tokens + self.settings.new_tokens + 1

    def loaded(self, progress: bool = False) -> Writer:
        """The model; one that is no published model is first pretrained on the corpora."""
        generator = self.config.generator
        if isinstance(generator, RemoteGeneratorConfig):
            return RemoteModel(generator.api, generator.model, self.tokeniser, self.cut)
        if self.published is not None:
            return replace(self.published.loaded(), cut=self.cut)
        assert isinstance(generator, DecoderModelConfig), "the others are published"
        public = replace(self.public, progress=progress)
        length = max(generator.sequence_length, self.positions)
        return replace(public.decoder("generator", generator, length), cut=self.cut)

    def described(self, writer: Any) -> str:
        """Which model writes, in a few words for others."""
        generator = self.config.generator
        if isinstance(generator, RemoteGeneratorConfig):
            return f"the model {generator.model} behind an address, whose owner saw the prompts"
        if isinstance(generator, PublishedModelConfig):
            return generator.described(writer.digest())
        return "a small model that was pretrained on the public corpora alone"

    def try_out(self, writer: Writer, store: Artifacts) -> None:
        """Refuses a model that answers no prompt of any public texts with a text."""
        samples = list(islice(chain.from_iterable(map(texts_of, self.pool.values())), _COUNTED))

        def tried() -> Artifact:
            written = self.texts(writer, samples, _TRIED, 0, False)
            if not written.arrays["texts"].size:
                problem = f"answered {_TRIED} prompts of public texts with empty texts"
                advice = "it needs more pretraining, or must be another model"
                raise InputError(f"writer.generator {problem}: {advice}; nothing was released")
            return written

        store.load_or_compute("tried writer", tried)

    def pick_again(
        self,
        writer: Writer,
        choice: Choice,
        choose: Callable[[Mapping[str, Population]], Choice],
        store: Artifacts,
        progress: bool,
    ) -> tuple[Choice, Mapping[str, Population], list[dict[str, Any]]]:
        """Writes after the first choice, and chooses anew, as often as the config says.

        Returns the last choice, its pool, and the record of each choice, the first one's first.
        """
        public, written = list(chain(*map(texts_of, self.pool.values()))), list[str]()
        made_from = {"writer": self.described(writer)}
        pool, rounds = self.pool, [_about(choice, len(public), 0)]
        for round in range(1, self.config.rounds + 1):
            samples = self.samples(choice, public)
            compute = partial(self._asked, writer, samples, round, progress)
            stored = store.load_or_compute(f"written {round}", compute, made_from)
            written += stored.arrays["texts"].tolist()
            if written:
                corpus = from_clients({WRITTEN: {"text": written}})
                pool, _ = text_pool.without_repeats({**self.pool, WRITTEN: corpus})
                choice = choose(pool)
            rounds.append(_about(choice, len(public), stored.record.get("refused", 0)))
        return choice, pool, rounds

    def _asked(
        self, writer: Writer, samples: Sequence[str], round: int, progress: bool
    ) -> Artifact:
        """The texts of a round; none if a server refuses all, which must not end a charged run."""
        try:
            return self.texts(writer, samples, self.config.texts, round, progress)
        except Refused:
            return Artifact({"refused": self.config.texts}, {"texts": np.array([], dtype=str)})

    def samples(self, choice: Choice, public: list[str]) -> list[str]:
        """Public texts, drawn by a choice's weights: what prompts are made of.

        `public` are all public texts of the pool, which are its first.
        """
        weights_N = choice.weights_N[: len(public)]
        generator = np.random.default_rng(self.seed)
        drawn = generator.choice(len(public), len(choice.rows_M), p=weights_N / weights_N.sum())
        # A prompt needs so many different ones.
        heaviest = np.argsort(-weights_N)[:SHOTS] if len(np.unique(drawn)) < SHOTS else drawn
        return [public[row] for row in np.union1d(drawn, heaviest)]

    def texts(
        self, writer: Writer, samples: Sequence[str], number: int, round: int, progress: bool
    ) -> Artifact:
        """What it writes after so many prompts of a round, cut; empty texts are left out."""
        short = writer.shortened(samples, self.settings.response_tokens)
        options: Any = {"seed": self.seed, "part": round, "progress": progress}
        written, refused = synthesise(writer, short, number, self.settings, **options)
        return Artifact({"refused": refused}, {"texts": np.array(written, dtype=str)})


def settings_of(tokeniser: FastTokeniser, cut: Cut, public: Sequence[str]) -> PopriSettings:
    """How a model is prompted: what it writes may be as long as public texts, cut by that rule."""
    lengths = [len(row) for row in tokeniser.encode(public)]
    tokens = int(np.ceil(np.quantile(lengths, 1 - _LONGER))) + _LINE
    # Pieces of joined texts go on over the ends of lines, others are items of a list.
    item, stop = ("", "") if cut.size else ("- ", "\n")
    form = FewShot(shots=SHOTS, head="", heading=item, after="\n", stop=stop)
    sizes: Any = {"prompt_tokens": SHOTS * tokens, "new_tokens": tokens, "response_tokens": tokens}
    return PopriSettings(format=form, temperature=0.9, top_p=0.95, **sizes)


def _about(choice: Choice, public: int, refused: int) -> dict[str, Any]:
    """How near a choice is, from how many written texts, and how many of these were drawn."""
    return {
        "refused": refused,
        "written": len(choice.weights_N) - public,
        "chosen": int(np.sum(choice.rows_M >= public)),
        "distance": choice.distance,
        "drawn": choice.drawn_distance,
        "judged": [*choice.judged][-1:],
    }


def sized(config: WriterConfig) -> description.Sized:
    """The model as a dry run shows it, without its weights."""
    generator = config.generator
    if isinstance(generator, RemoteGeneratorConfig):
        return description.Sized(f"{generator.model} behind {generator.api}")
    if isinstance(generator, PublishedModelConfig):
        return description.published_shapes(generator, _SECTION, trained=False)[2]
    network = generator.network(config.vocab_size, generator.sequence_length)
    about = f"{generator.architecture}, pretrained on the corpora"
    return description.Sized.of(about, description.shapes_of(Decoder(network)))
