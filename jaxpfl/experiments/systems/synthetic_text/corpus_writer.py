"""Writes synthetic corpora: the public models of a study, and the methods that tune them.

No client's data is read here. A step receives the clients' scores as a release, or reads the ones
that an earlier attempt has stored, so a corpus can be continued without the clients.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.one_look import MomentRewards
from jaxpfl.algorithms.popri import Written, popri, prompts_of, respond, synthesise, with_adapters
from jaxpfl.algorithms.private_evolution import Vary, private_evolution, selected_texts
from jaxpfl.algorithms.stored_rounds import Hooks, PublicDraws
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.public_models import PublicModels, data_mesh
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.engine.phases import Phases, missing
from jaxpfl.experiments.records.artifacts import Artifacts
from jaxpfl.experiments.systems import ARTIFACTS
from jaxpfl.experiments.systems.synthetic_text import look, shared_generator
from jaxpfl.experiments.systems.synthetic_text.config import (
    EVOLVING,
    PopriConfig,
    SyntheticTextConfig,
)
from jaxpfl.federated.hosts.shared_rounds import SharedRounds
from jaxpfl.federated.mesh import grid, several, splits_model
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Params
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import Embedder, embedder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.remote import RemoteModel
from jaxpfl.text.generation.variation import Continue, mask_and_fill
from jaxpfl.text.preference.groups import prompt_room
from jaxpfl.text.preference.optimisation import tune
from jaxpfl.text.tokenisers.base import text_rows
from jaxpfl.text.tokenisers.fast import FastTokeniser

Distance = Callable[[list[str]], float]
"""The Frechet distance of texts to those of clients that are declared public."""

TRIED = "tried_settings"
"""The artifact of `popri.tune`: the distances of each choice's texts, and the chosen one."""

DISTANCES = "distances"
"""The artifact of `popri.checkpoint` "nearest" and "judged": the distances of what was written with
0, 1, ... tunings, and the chosen number of them."""

# How often the generator is asked for a number of texts, since some may be empty.
_ATTEMPTS = 16


# Loaded once in a process.
loaded_embedder = lru_cache(maxsize=4)(embedder)
loaded_fill_model = lru_cache(maxsize=1)(mask_and_fill)


def question(config: SyntheticTextConfig, plan: Plan) -> Scorer | look.Look:
    """What clients are asked; the method must be one in which they score texts."""
    if not config.one_look:
        return scorer(config, plan)
    parts = look.parts_of(config, look.fred_plan(config, plan.population))
    plans = {column: each for column, (each, _) in parts.items()}
    embedders = {column: loaded_embedder(name) for column, (_, name) in parts.items()}
    return look.Look(plans, embedders, plan.population)


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
        with named("popri.prompt_tokens"):
            if tokeniser is not None:
                prompt_room(tokeniser, config.popri.prompt_tokens)
    found.require_positions(needed, used)


@lru_cache(maxsize=4)
def _public_models(corpora: tuple[tuple[str, str], ...], *settings: Any) -> PublicModels:
    """Of these settings, whose corpora are read once in a process."""
    return PublicModels(dict(corpora), *settings)


class Author(NamedTuple):
    """A generator, the public texts that its prompts are made of, and how it writes."""

    model: Any
    samples: list[str]
    settings: PopriConfig


@dataclass(frozen=True)
class CorpusWriter:
    """The public models of a study, and how its method tunes the generator and writes texts.

    Attributes:
      progress: whether progress bars are shown on stderr.
      others: in process 0, the other processes of the run, if there are any.
    """

    config: SyntheticTextConfig
    progress: bool = False
    others: SharedRounds | None = None

    def __post_init__(self) -> None:
        evolution = self.config.evolution
        if self.config.method in EVOLVING and evolution.fill_model is not None:
            # Refuses here, before anything is charged, if the model is missing.
            loaded_fill_model(evolution.fill_model, tokens=self.config.corpus.tokens)
        # The same for devices and published models, whose small files alone are read.
        _ = self._sharing, self._published

    @cached_property
    def public(self) -> PublicModels:
        config, corpora = self.config, tuple((self.config.corpora or {}).items())
        settings = config.corpus_texts, config.vocab_size, files.user_path(config.cache)
        return _public_models(corpora, *settings, 0, self.progress)

    @cached_property
    def generator(self) -> Any:
        """A `LanguageModel`, or a `RemoteModel` for a method that does not tune it."""
        if (remote := self.config.remote) is not None:
            return RemoteModel(remote.api, remote.model, self.tokeniser)
        loaded = partial(self._loaded, "generator")
        if self.others is None or self.config.method != "popri":
            return loaded()
        return shared_generator.load(self.others, loaded)

    @cached_property
    def downstream(self) -> LanguageModel:
        return self._loaded("downstream")

    @cached_property
    def tokeniser(self) -> FastTokeniser:
        """The downstream model's; the examples of clients and corpora are counted in its tokens."""
        published = self._published.get("downstream")
        return self.public.tokeniser if published is None else published.tokeniser

    @cached_property
    def about(self) -> dict[str, dict[str, Any]]:
        """By section, the SHA-256 of a model's parameters and, if it is published, which it is."""
        found = {name: {"sha256": getattr(self, name).digest()} for name in self.config.models}
        if (remote := self.config.remote) is not None:
            found["generator"] = {**vars(remote), "tokeniser": self.tokeniser.name}
        for name, model in self._published.items():
            found[name] |= {"path": model.settings.path, "tokeniser": model.tokeniser.name}
        return found

    @property
    def start(self) -> str | None:
        """Identifies the published models that the run starts from; None without any."""
        return " ".join(self.about[name]["sha256"] for name in self._published) or None

    def stored(self, directory: Path) -> Artifacts:
        """The artifacts of a method that asks no client, which belong to its config and models."""
        text = json.dumps([files.jsonable(dataclasses.asdict(self.config)), self.start])
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Artifacts(directory / ARTIFACTS, run=digest[:12])

    def _loaded(self, name: str) -> LanguageModel:
        settings, mesh = self.config.models[name], self._sharing if name == "generator" else None
        parts = mesh if mesh is not None and splits_model(mesh) else None
        if isinstance(settings, PublishedModelConfig):
            found = self._published[name].loaded(trained=name == "downstream", mesh=parts)
        else:
            positions = max(settings.sequence_length, self.config.positions[name])
            found = self.public.decoder(name, settings, positions)
        return found if mesh is None else shared_generator.spread(found, mesh)

    @cached_property
    def _sharing(self) -> Mesh | None:
        """The devices of the generator; None for this process's, each with a copy of its own."""
        number = self.config.training.model_devices
        if self.config.method == "popri" and several():
            return grid(jax.devices(), "data", number)
        return data_mesh(model=number) if number > 1 else None

    @cached_property
    def _published(self) -> dict[str, PublishedModel]:
        models = {}
        for name, settings in self.config.models.items():
            if isinstance(settings, PublishedModelConfig):
                found = PublishedModel.of(settings, name, trained=name == "downstream")
                check_published(self.config, found)
                models[name] = found
        return models

    @property
    def function(self) -> Embedder:
        return loaded_embedder(self.config.embedder)

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
        phases: Phases,
        asked: Scorer | look.Look | None,
        distance: Distance = missing,
        on_round: Callable[[Any], None] = lambda found: None,
    ) -> Author:
        """The generator as the method tuned it, and how it writes.

        Args:
          asked: what clients are asked; None for a method that asks no client.
          distance: called only where POPri's round is neither stored nor simply the last.
          on_round: is called after each round with its `Written` or `Evolved`.
        """
        config = self.config
        if asked is not None and config.method not in EVOLVING:
            return self._tuned_by_scores(asked, phases, distance, on_round)
        samples = self.public.texts(config.popri.samples)
        untuned = Author(self.generator, samples, config.popri)
        if asked is None:
            return untuned
        assert isinstance(asked, Scorer), "private evolution asks for votes"
        texts = self._evolved(untuned, asked, phases, on_round)
        if config.method == "private_evolution":
            return untuned._replace(samples=texts)
        start, key = self.generator, jax.random.key(config.run.seed)
        model, params = lora.attach(start.model, start.params, config.popri.lora, key)
        folder, settings = directory / "generator_tuning", config.evolution.fine_tuning
        tuned = self.fitted(start.replaced(model, params), texts, settings, folder)
        return untuned._replace(model=start.replaced(model, tuned))

    def texts(self, author: Author, number: int, part: int = 0, later: int = 0) -> list[str]:
        """Up to `number` texts, none of them empty; other ones by `part` and, of a later seed."""
        shown = {"seed": self.config.run.seed + later, "part": part, "progress": self.progress}
        return synthesise(author.model, author.samples, number, author.settings, **shown)

    def rows(self, texts: list[str]) -> np.ndarray:
        """See `text_rows`, for the downstream model."""
        return text_rows(self.tokeniser, texts, self.config.corpus.tokens)

    def fitted(
        self, start: LanguageModel, texts: list[str], settings: Training, folder: Path
    ) -> Params:
        """A model's parameters after fine-tuning on texts; of a model with adapters, only these."""
        trained, base = start.params, None
        if isinstance(start.model, Decoder) and start.model.lora is not None:
            trained, base = adapter_trees.split(start.params)
        found = fit(
            start.model,
            trained,
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
        asked: Scorer | look.Look,
        phases: Phases,
        distance: Distance,
        on_round: Callable[[Any], None],
    ) -> Author:
        """POPri: which round's adapters write the corpus, and after which prompts.

        All choices follow from releases and from clients that are declared public: they are free.
        """
        settings, seed, rounds = self.config.popri, self.config.run.seed, list[Written]()
        rewards: Scorer | MomentRewards
        if isinstance(asked, look.Look):
            released = asked.released(phases)
            if settings.corpus == "nearest":
                names = settings.samples or tuple(self.config.corpora or {})
                corpora = {name: self.public.texts([name]) for name in names}
                scored = partial(asked.nearest, released[look.EMBEDDING], corpora)
                nearest = phases.load_or_compute(look.NEAREST, scored)["names"][0]
                settings = replace(settings, samples=(str(nearest),))
            if settings.tune is not None:
                settings = self._chosen(settings.tune.choices(settings), asked, phases)
            rewards = MomentRewards(released[look.EMBEDDING], self.config.training.rounds)
        else:
            rewards = asked
        samples = self.public.texts(settings.samples)

        def counted(found: Written) -> None:
            rounds.append(found)
            on_round(found)

        hooks = Hooks(phases.load_or_compute, counted, self.progress)
        shared = isinstance(self.generator, shared_generator.SharedModel)
        algorithm = popri(
            self.generator,
            samples,
            rewards,
            self.function,
            settings,
            seed=seed,
            hooks=hooks,
            tune=self.generator.tune if shared else tune,
        )
        params_of = algorithm.params
        assert params_of is not None, "POPri tunes a model"
        writers = [
            with_adapters(self.generator, settings, params_of(state))
            for state in _all_states(algorithm, phases, rewards.rounds)
        ]

        def measured() -> dict[str, np.ndarray]:
            # The last adapters have written nothing yet.
            number = len(rounds) + 1
            prompts = prompts_of(self.generator, samples, settings.prompts, settings, seed, number)
            key = PublicDraws("popri", seed).key("responses", number)
            last, _ = respond(writers[-1], prompts, settings, key, self.progress)
            written = [list(chain(*texts)) for texts in (*(r.responses for r in rounds), last)]
            if settings.checkpoint == "judged":
                assert isinstance(asked, look.Look), "the config checks it"
                return asked.judged(asked.released(phases), written, settings.least_words)
            distances = np.array([distance(texts) for texts in written])
            return {"distances": distances, "chosen": np.array(distances.argmin())}

        chosen = -1
        if settings.checkpoint != "last":
            chosen = int(phases.load_or_compute(DISTANCES, measured)["chosen"])
        best = settings.final_prompts == "best_responses"
        return Author(writers[chosen], best_responses(rounds[-1]) if best else samples, settings)

    def _chosen(
        self, choices: Sequence[PopriConfig], asked: look.Look, phases: Phases
    ) -> PopriConfig:
        """The settings with which the untuned generator's texts are nearest to the clients."""
        # The last adapters are judged by what the round after the last writes.
        seed, number = self.config.run.seed, self.config.training.rounds + 2
        key = PublicDraws("popri", seed).key("responses", number)

        def written(each: PopriConfig) -> dict[str, np.ndarray]:
            samples = self.public.texts(each.samples)
            prompts = prompts_of(self.generator, samples, each.prompts, each, seed, number)
            texts, _ = respond(self.generator, prompts, each, key, self.progress)
            return {"texts": np.array(texts)}

        def judged() -> dict[str, np.ndarray]:
            stored = [
                phases.load_or_compute(f"tried_{index}", partial(written, each))["texts"]
                for index, each in enumerate(choices)
            ]
            texts = [each.reshape(-1).tolist() for each in stored]
            return asked.judged(asked.released(phases), texts, choices[0].least_words)

        return choices[int(phases.load_or_compute(TRIED, judged)["chosen"])]

    def _evolved(
        self, untuned: Author, scorer: Scorer, phases: Phases, on_round: Callable[[Any], None]
    ) -> list[str]:
        evolution = self.config.evolution

        def first() -> dict[str, np.ndarray]:
            def written(number: int, attempt: int) -> list[str]:
                return self.texts(untuned, number, later=attempt)

            return {"texts": np.array(enough(written, evolution.population))}

        algorithm = private_evolution(
            phases.load_or_compute("first texts", first)["texts"].tolist(),
            self.vary,
            scorer,
            self.function,
            evolution,
            seed=self.config.run.seed,
            hooks=Hooks(phases.load_or_compute, on_round, self.progress),
        )
        return selected_texts(_all_states(algorithm, phases, scorer.rounds)[-1])


def enough(
    written: Callable[[int, int], list[str]], number: int, texts: Sequence[str] = ()
) -> list[str]:
    """The first of these `texts` and of those `written(how many, attempt)`: `number` in all."""
    found = list(texts[:number])
    for attempt in range(1, 1 + _ATTEMPTS):
        if lacking := number - len(found):
            found += written(lacking * 5 // 4 + 8, attempt)[:lacking]
    if len(found) == number:
        return found
    raise InputError(
        f"the generator wrote {len(found)} texts that are not empty, expected {number}: it needs "
        "more pretraining, or must be another model (section generator)"
    )


def _all_states(algorithm: Algorithm, phases: Phases, rounds: int) -> list[Any]:
    """The algorithm's states: before the first round, and after each."""
    states = [algorithm.init(jax.random.key(0))]
    for round in range(1, rounds + 1):
        states.append(phases.step(algorithm.step, states[-1], round)[0])
    return states


def best_responses(written: Written) -> list[str]:
    """The response to each prompt of a round that clients scored highest, unless it is empty."""
    best = np.argmax(written.scores_KxJ, axis=1).tolist()
    texts = [row[index] for row, index in zip(written.responses, best, strict=True)]
    return [text for text in texts if text]
