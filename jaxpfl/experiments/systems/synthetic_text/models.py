"""The public models of a study: loaded, pretrained or asked behind an address, and fine-tuned.

No client's data is read here.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpfl import files
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.public_models import PublicModels, data_mesh
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.records.artifacts import Artifacts
from jaxpfl.experiments.systems import ARTIFACTS
from jaxpfl.experiments.systems.synthetic_text.config import Config
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.federated.mesh import all_devices, grid, several, shardings, splits_model
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import Embedder, embedder
from jaxpfl.text.generation.language_model import Generated, LanguageModel
from jaxpfl.text.generation.remote import RemoteModel
from jaxpfl.text.generation.variation import mask_and_fill
from jaxpfl.text.preference.groups import prompt_room
from jaxpfl.text.tokenisers.base import text_rows
from jaxpfl.text.tokenisers.fast import FastTokeniser

# Loaded once in a process.
loaded_embedder = lru_cache(maxsize=4)(embedder)
loaded_fill_model = lru_cache(maxsize=1)(mask_and_fill)


@lru_cache(maxsize=4)
def _public_models(corpora: tuple[tuple[str, str], ...], *settings: Any) -> PublicModels:
    """Of these settings, whose corpora are read once in a process."""
    return PublicModels(dict(corpora), *settings)


def check_published(config: Config, published: PublishedModel) -> None:
    """Refuses a published model that a section cannot use; its tokeniser may not be available."""
    tokeniser: Any = published.tokeniser
    if published.name == "downstream":
        start = tokeniser is not None and tokeniser.start is not None
        needed, used = config.positions["downstream"] + start, "corpus.tokens and a start token"
    else:
        published.require_decoder("which writes no texts")
        rephrases = config.evolves and config.evolution.varied_by == "rephrase"
        if published.chat is None and rephrases:
            path, advice = published.settings.path, "choose 'continue', a substitute"
            lacks = f"needs a generator that follows instructions, found {path!r} without a chat"
            raise InputError(f"evolution.variation 'rephrase' {lacks} template: {advice}")
        needed = config.positions["generator"]
        used = "popri.prompt_tokens, popri.new_tokens and a start token"
        with named("popri.prompt_tokens"):
            if tokeniser is not None:
                prompt_room(tokeniser, config.popri.prompt_tokens)
    published.require_positions(needed, used)


@dataclass(frozen=True)
class StudyModels:
    """The generator, the downstream model and the embedder of a study, loaded when first read."""

    config: Config
    progress: bool = False

    def __post_init__(self) -> None:
        evolution = self.config.evolution
        fills = self.config.evolves and evolution.varied_by == "fill"
        if fills and evolution.fill_model is not None:
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
            return _Remote(remote.api, remote.model, self.tokeniser, self.cut)
        return self._loaded("generator")

    @cached_property
    def downstream(self) -> LanguageModel:
        return self._loaded("downstream")

    @cached_property
    def tokeniser(self) -> FastTokeniser:
        """The downstream model's; the examples of clients and corpora are counted in its tokens."""
        published = self._published.get("downstream")
        return self.public.tokeniser if published is None else published.tokeniser

    @cached_property
    def cut(self) -> Cut:
        """The rule by which all texts are cut; tokens are the downstream model's."""
        cut = Cut.parse(self.config.corpus.cut)
        return dataclasses.replace(cut, tokeniser=self.tokeniser) if cut.unit == "tokens" else cut

    def samples(self, names: Sequence[str] | None = None) -> list[str]:
        """The pieces of these corpora, or of all: what prompts are made of."""
        return list(chain.from_iterable(self.cut.pieces(self.public.documents(names))))

    @property
    def embedder(self) -> Embedder:
        return loaded_embedder(self.config.embedder)

    @cached_property
    def about(self) -> dict[str, dict[str, Any]]:
        """By section, the SHA-256 of a model's parameters and, if it is published, which it is."""
        about = {name: {"sha256": getattr(self, name).digest()} for name in self.config.models}
        if (remote := self.config.remote) is not None:
            about["generator"] = {**vars(remote), "tokeniser": self.tokeniser.name}
        for name, model in self._published.items():
            about[name] |= {"path": model.settings.path, "tokeniser": model.tokeniser.name}
        return about

    @property
    def start(self) -> str | None:
        """Identifies the published models that the run starts from; None without any."""
        return " ".join(self.about[name]["sha256"] for name in self._published) or None

    def stored(self, directory: Path) -> Artifacts:
        """The artifacts of a method that asks no client, which belong to its config and models."""
        text = json.dumps([files.jsonable(dataclasses.asdict(self.config)), self.start])
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Artifacts(directory / ARTIFACTS, run=digest[:12])

    def rows(self, texts: list[str]) -> np.ndarray:
        return text_rows(self.tokeniser, texts, self.config.corpus.tokens)

    def fitted(
        self, start: LanguageModel, texts: list[str], settings: Training, folder: Path
    ) -> Params:
        """A model's parameters after fine-tuning on texts; of a model with adapters, only these."""
        trained, base = start.params, None
        if isinstance(start.model, Decoder) and start.model.lora is not None:
            trained, base = adapter_trees.split(start.params)
        rows = text_rows(start.tokeniser, texts, self.config.corpus.tokens)
        how: Any = {"mesh": data_mesh(settings.batch_size), "folder": folder}
        how |= {"seed": self.config.run.seed, "progress": self.progress}

        def fine_tuned() -> list[Any]:
            fitted = fit(start.model, trained, {"tokens": rows}, settings, frozen=base, **how)
            return jax.tree.leaves(fitted.params)

        leaves = decide(f"the training in {folder.name}", fine_tuned)
        params = jax.tree.unflatten(jax.tree.structure(trained), leaves)
        return params if base is None else adapter_trees.join(params, base)

    def _loaded(self, name: str) -> LanguageModel:
        settings, mesh = self.config.models[name], self._sharing if name == "generator" else None
        parts = mesh if mesh is not None and splits_model(mesh) else None
        if isinstance(settings, PublishedModelConfig):
            model = self._published[name].loaded(trained=name == "downstream", mesh=parts)
        else:
            positions = max(settings.sequence_length, self.config.positions[name])
            model = self.public.decoder(name, settings, positions)
        if name == "generator":
            model = dataclasses.replace(model, cut=self.cut)
        return model if mesh is None else _spread(model, mesh)

    @cached_property
    def _sharing(self) -> Mesh | None:
        """The devices of the generator; None for this process's, each with a copy of its own.

        Of several processes that tune it, all write and tune on the devices of all.
        """
        number = self.config.training.model_devices
        if self.config.method == "popri" and several():
            return grid(all_devices(), "data", number)
        return data_mesh(model=number) if number > 1 else None

    @cached_property
    def _published(self) -> dict[str, PublishedModel]:
        models = {}
        for name, settings in self.config.models.items():
            if isinstance(settings, PublishedModelConfig):
                models[name] = PublishedModel.of(settings, name, trained=name == "downstream")
                check_published(self.config, models[name])
        return models


class _Remote(RemoteModel):
    """A model that process 0 alone asks, for all processes that share the run."""

    def write(self, *prompts: Any, **options: Any) -> Generated:
        written = partial(super().write, *prompts, **options)
        return Generated(*decide("a remote model's texts", written))


def _spread(model: LanguageModel, mesh: Mesh) -> LanguageModel:
    """The model on a mesh, in parts where several devices share a copy of it.

    This process has the parameters whole, or in parts that are in their place.
    """

    def placed(leaf: jax.Array, place: Any) -> jax.Array:
        if leaf.sharding == place:
            return leaf
        return jax.make_array_from_callback(leaf.shape, place, np.asarray(leaf).__getitem__)

    places = shardings(model.model if splits_model(mesh) else None, mesh, model.params)
    return dataclasses.replace(model, params=jax.tree.map(placed, model.params, places), mesh=mesh)
