"""Writes synthetic corpora: the public models of a study, and the methods that tune them.

No client's data is read here. A step receives the clients' scores as a release, or reads the ones
that an earlier attempt has stored, so a corpus can be continued without the clients.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.fred import PrivateMoments
from jaxpfl.algorithms.one_look import MomentRewards
from jaxpfl.algorithms.popri import Written, popri, prompts_of, respond, synthesise, with_adapters
from jaxpfl.algorithms.private_evolution import Evolved, Vary, private_evolution, selected_texts
from jaxpfl.algorithms.stored_rounds import Hooks, PublicDraws, ignore
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.public_models import PublicModels, data_mesh
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.engine.releases import Releases, missing
from jaxpfl.experiments.systems.synthetic_text.config import EVOLVING, SyntheticTextConfig
from jaxpfl.experiments.systems.synthetic_text.look import NEAREST, Look, fred_plan
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Params
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import Embedder, embedder
from jaxpfl.text.embed.base import as_texts
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.variation import Continue, mask_and_fill
from jaxpfl.text.preference.responses import prompt_room
from jaxpfl.text.tokenisers.base import text_rows
from jaxpfl.text.tokenisers.fast import FastTokeniser

Ask = Callable[[Callable, Any, int], tuple[Any, Any]]
Distance = Callable[[list[str]], float]
"""The Frechet distance of texts to those of clients that are declared public."""

DISTANCES = "distances"
"""The artifact of `popri.checkpoint` "nearest": the distance of what was written with 0, 1, ...
tunings."""

# How often the generator is asked for private evolution's first texts, since some may be empty.
_ATTEMPTS = 8


# Loaded once in a process.
loaded_embedder = functools.lru_cache(maxsize=4)(embedder)
loaded_fill_model = functools.lru_cache(maxsize=1)(mask_and_fill)


def question(config: SyntheticTextConfig, plan: Plan) -> Scorer | Look:
    """What clients are asked; the method must be one in which they score texts."""
    if not config.one_look:
        return scorer(config, plan)
    clients, dimension = plan.population, loaded_embedder(config.embedder).dimension
    return Look(fred_plan(config, clients), clients, dimension)


def scorer(config: SyntheticTextConfig, plan: Plan) -> Scorer:
    """How clients score texts in each round."""
    return Scorer(plan, kind=config.score, max_texts=config.evolution.max_texts)


def check_published(config: SyntheticTextConfig, found: PublishedModel) -> None:
    """Refuses a published model that a section cannot use; its tokeniser may not be available."""
    tokeniser: Any = found.tokeniser
    if found.name == "downstream":
        start = tokeniser is not None and tokeniser.start is not None
        needed, used = config.positions["downstream"] + start, "corpus.tokens and a start token"
    else:
        found.require_decoder("which writes no texts")
        needed = config.positions["generator"]
        used = "popri.prompt_tokens, popri.new_tokens and a start token"
        try:
            if tokeniser is not None:
                prompt_room(tokeniser, config.popri.prompt_tokens)
        except InputError as error:
            raise InputError(f"popri.prompt_tokens: {error}") from None
    found.require_positions(needed, used)


@functools.lru_cache(maxsize=4)
def _public_models(corpora: tuple[tuple[str, str], ...], *settings: Any) -> PublicModels:
    """The public models of these settings; their corpora are read once in a process."""
    return PublicModels(dict(corpora), *settings)


class _LastCallCache:
    """An embedder that caches the vectors of its last call, because a round embeds its texts twice.

    The result is the same, because a vector does not depend on the other texts of a call.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._known: dict[str, np.ndarray] = {}
        self.name, self.dimension, self.column = embedder.name, embedder.dimension, embedder.column

    def __call__(self, examples: Any) -> np.ndarray:
        texts = as_texts(examples)
        if not texts or not all(text in self._known for text in texts):
            vectors = np.asarray(self._embedder(texts))
            self._known = dict(zip(texts, vectors, strict=True))
            return vectors
        return np.stack([self._known[text] for text in texts])


@dataclass(frozen=True)
class CorpusWriter:
    """The public models of a study, and how its method tunes the generator and writes texts.

    Attributes:
      progress: whether progress bars are shown on stderr.
    """

    config: SyntheticTextConfig
    progress: bool = False

    def __post_init__(self) -> None:
        evolution = self.config.evolution
        if self.config.method in EVOLVING and evolution.fill_model is not None:
            # Refuses here, before anything is charged, if the model is missing.
            loaded_fill_model(evolution.fill_model, tokens=self.config.corpus.tokens)
        # The same for the published models, of which only the small files are read.
        self._published  # noqa: B018

    @cached_property
    def public(self) -> PublicModels:
        config = self.config
        corpora = tuple((config.corpora or {}).items())
        settings = config.corpus_texts, config.vocab_size, Path(config.cache)
        return _public_models(corpora, *settings, 0, self.progress)

    @cached_property
    def generator(self) -> LanguageModel:
        return self._loaded("generator")

    @cached_property
    def downstream(self) -> LanguageModel:
        return self._loaded("downstream")

    @cached_property
    def tokeniser(self) -> FastTokeniser:
        """The downstream model's; the examples of clients and corpora are counted in its tokens."""
        published = self._published.get("downstream")
        return self.public.tokeniser if published is None else published.tokeniser

    def about(self, name: str) -> dict[str, Any]:
        """The record of a section's model: the SHA-256 of its parameters, and where it is from."""
        digest = {"sha256": self._digests[name]}
        if name not in self._published:
            return digest
        found = self._published[name]
        chat = {"chat": True} if found.tokeniser.chat is not None else {}
        return {**digest, "path": found.settings.path, "tokeniser": found.tokeniser.name, **chat}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the published models are, because a config names only where they are."""
        return {name: self.about(name) for name in self._published}

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {name: getattr(self, name).digest() for name in self.config.models}

    def _loaded(self, name: str) -> LanguageModel:
        settings = self.config.models[name]
        if isinstance(settings, PublishedModelConfig):
            return self._published[name].loaded(trained=name == "downstream")
        positions = max(settings.sequence_length, self.config.positions[name])
        return self.public.decoder(name, settings, positions)

    @cached_property
    def _published(self) -> dict[str, PublishedModel]:
        models = {}
        for name, settings in self.config.models.items():
            if not isinstance(settings, PublishedModelConfig):
                continue
            found = PublishedModel.found(settings, name, trained=name == "downstream")
            check_published(self.config, found)
            models[name] = found
        return models

    @cached_property
    def function(self) -> Embedder:
        return _LastCallCache(loaded_embedder(self.config.embedder))

    @cached_property
    def vary(self) -> Vary:
        """The function that varies texts; the new ones have the same format and length."""
        config = self.config
        evolution, tokens, popri = config.evolution, config.corpus.tokens, config.popri
        if evolution.fill_model is None:
            stop = (popri.format.stop,) if popri.format.stop else ()
            decoding, clean = Decoding(stop=stop), popri.format.response
            return Continue(self.generator, 0.5, tokens, decoding, clean)
        fill = loaded_fill_model(evolution.fill_model, tokens=tokens)

        def vary(texts: Sequence[str], key: jax.Array) -> list[str]:
            filled = [popri.format.response(text) for text in fill(texts, key)]
            # The masked language model has another tokeniser than the generator.
            cut = self.generator.shortened(filled, tokens)
            return [new or old for new, old in zip(cut, texts, strict=True)]

        return vary

    def tuned(
        self,
        directory: Path,
        releases: Releases,
        asked: Scorer | Look | None,
        distance: Distance = missing,
        on_round: Callable[[Any], None] = ignore,
    ) -> tuple[LanguageModel, list[str]]:
        """The generator as the method tuned it, and the texts that its prompts are made of.

        Args:
          directory: the run's directory, where checkpoints of a training are saved.
          releases: what an earlier attempt at the run has stored, and how clients are asked.
          asked: what clients are asked; None for a method that asks no client.
          distance: called only where the choice of POPri's round is neither stored nor simply the
            last.
          on_round: is called after each round with its `Written` or `Evolved`.
        """
        config, method, ask = self.config, self.config.method, releases.ask
        samples = self.public.texts(config.popri.samples)
        if asked is None:
            return self.generator, samples
        hooks: Hooks[Any] = Hooks(releases.load_or_compute, on_round, self.progress)
        rewards = asked
        if isinstance(asked, Look):
            released = asked.released(releases)
            if config.popri.corpus == "nearest":
                samples = self.public.texts([self._nearest(asked, released, releases)])
            rewards = MomentRewards(released, config.training.rounds)
        if method == "popri":
            return self._tuned_by_scores(samples, rewards, ask, distance, hooks)
        assert isinstance(rewards, Scorer), "private evolution asks for votes"
        texts = self._evolved(samples, rewards, ask, hooks)
        if method == "private_evolution":
            return self.generator, texts
        return self._tuned_on(texts, directory), samples

    def _nearest(self, look: Look, released: PrivateMoments, releases: Releases) -> str:
        def scored() -> dict[str, np.ndarray]:
            names = self.config.popri.samples or tuple(self.config.corpora or {})
            corpora = {name: self.public.texts([name]) for name in names}
            scores = look.nearest(released, corpora, self.function)
            return {
                "names": np.array([each.name for each in scores]),
                **{
                    kind: np.array([getattr(each, kind) for each in scores])
                    for kind in ("distance", "corrected", "low", "high", "tied")
                },
            }

        return str(releases.load_or_compute(NEAREST, scored)["names"][0])

    def texts(
        self, writer: LanguageModel, samples: list[str], number: int, part: int = 0
    ) -> list[str]:
        """Writes up to `number` texts, none of them empty; every `part` has other texts."""
        return synthesise(
            writer,
            samples,
            number,
            self.config.popri,
            seed=self.config.run.seed,
            part=part,
            progress=self.progress,
        )

    def rows(self, texts: list[str]) -> np.ndarray:
        """The downstream model's token ids of each text, see `text_rows`."""
        return text_rows(self.tokeniser, texts, self.config.corpus.tokens)

    def fitted(
        self, start: LanguageModel, texts: list[str], settings: Training, folder: Path
    ) -> Params:
        """A model's parameters after fine-tuning on texts; of a model with adapters, only these."""
        adapters, base = start.params, None
        if isinstance(start.model, Decoder) and start.model.lora is not None:
            adapters, base = adapter_trees.split(start.params)
        found = fit(
            start.model,
            adapters,
            {"tokens": self.rows(texts)},
            settings,
            seed=self.config.run.seed,
            frozen=base,
            mesh=data_mesh(settings.batch_size),
            folder=folder,
            progress=self.progress,
        )
        return found.params if base is None else adapter_trees.join(found.params, base)

    def _tuned_by_scores(
        self,
        samples: list[str],
        scorer: Scorer | MomentRewards,
        ask: Ask,
        distance: Distance,
        hooks: Hooks[Written],
    ) -> tuple[LanguageModel, list[str]]:
        """POPri: which round's adapters write the corpus, and after which prompts.

        Both choices follow from the rounds' releases and from validation clients that are declared
        public, so neither costs privacy.
        """
        settings, seed, rounds = self.config.popri, self.config.run.seed, list[Written]()

        def on_round(found: Written) -> None:
            rounds.append(found)
            hooks.on_round(found)

        algorithm = popri(
            self.generator, samples, scorer, self.function, settings,
            seed=seed, hooks=dataclasses.replace(hooks, on_round=on_round),
        )  # fmt: skip
        params_of = algorithm.params
        assert params_of is not None, "POPri tunes a model"
        writers = [
            with_adapters(self.generator, settings, params_of(state))
            for state in _all_states(algorithm, ask, self.config.training.rounds)
        ]
        writer = writers[-1]
        if settings.checkpoint == "nearest":

            def measured() -> dict[str, np.ndarray]:
                # The last adapters have written nothing yet.
                number = len(rounds) + 1
                prompts = prompts_of(
                    self.generator, samples, settings.prompts, settings, seed, number
                )
                key = PublicDraws("popri", seed).key("responses", number)
                last, _ = respond(writers[-1], prompts, settings, key, hooks.progress)
                written = [*(found.responses for found in rounds), last]
                flat = [[text for row in texts for text in row] for texts in written]
                return {"distances": np.array([distance(texts) for texts in flat])}

            distances = hooks.load_or_compute(DISTANCES, measured)["distances"]
            writer = writers[int(np.argmin(distances))]
        if settings.final_prompts == "best_responses":
            samples = best_responses(rounds[-1])
        return writer, samples

    def _evolved(
        self, samples: list[str], scorer: Scorer, ask: Ask, hooks: Hooks[Evolved]
    ) -> list[str]:
        config, evolution = self.config, self.config.evolution

        def first() -> dict[str, np.ndarray]:
            texts: list[str] = []
            # Empty texts are left out, so one attempt may give too few.
            for attempt in range(1, 1 + _ATTEMPTS):
                number = (evolution.population - len(texts)) * 5 // 4 + 8
                seed = config.run.seed + attempt
                shown = {"seed": seed, "progress": self.progress}
                texts += synthesise(self.generator, samples, number, config.popri, **shown)
                if len(texts) >= evolution.population:
                    return {"texts": np.array(texts[: evolution.population])}
            raise InputError(
                f"the generator wrote {len(texts)} texts that are not empty, expected "
                f"evolution.population = {evolution.population}: it needs more pretraining, or "
                "must be another model (section generator)"
            )

        algorithm = private_evolution(
            hooks.load_or_compute("first texts", first)["texts"].tolist(),
            self.vary,
            scorer,
            self.function,
            evolution,
            seed=config.run.seed,
            hooks=hooks,
        )
        return selected_texts(_all_states(algorithm, ask, config.training.rounds)[-1])

    def _tuned_on(self, texts: list[str], directory: Path) -> LanguageModel:
        config, start = self.config, self.generator
        key, folder = jax.random.key(config.run.seed), directory / "generator_tuning"
        model, params = lora.attach(start.model, start.params, config.popri.lora, key)
        writer = start.replaced(model, params)
        tuned = self.fitted(writer, texts, config.evolution.fine_tuning, folder)
        return writer.replaced(model, tuned)


def _all_states(algorithm: Algorithm, ask: Ask, rounds: int) -> list[Any]:
    """The algorithm's states: before the first round, and after each."""
    states = [algorithm.init(jax.random.key(0))]
    for round in range(1, rounds + 1):
        states.append(ask(algorithm.step, states[-1], round)[0])
    return states


def best_responses(written: Written) -> list[str]:
    """The response to each prompt of a round that clients scored highest, unless it is empty."""
    best = np.argmax(written.scores_KxJ, axis=1).tolist()
    texts = [row[index] for row, index in zip(written.responses, best, strict=True)]
    return [text for text in texts if text]
