"""Finds the published models that a config names, checks them before a charge, and loads them."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, cast

from jax.sharding import Mesh

from jaxpfl import files
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.central.public_models import data_mesh
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.models.checkpoints import adapters, hub, pretrained
from jaxpfl.models.checkpoints.tokenizer_files import TOKENIZER, with_tokenizer
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.decoder.quantise import quantise
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tokenisers.chat import ChatTemplate, read_template
from jaxpfl.text.tokenisers.fast import FastTokeniser, hugging_face

# Published embedding tables are padded to a multiple of 128 or a little further, by less than 2 %.
# A tokeniser that leaves more of the model's ids unused is another model's.
_MOST_UNUSED = 0.05


@dataclass(frozen=True)
class PublishedModel:
    """A published model before its weights are read.

    Attributes:
      name: of the config section; messages begin with it.
      model: as config.json describes it; an encoder's head is read with its weights.
      tokeniser: the model's own; its name ends with a hash of all that it is made of.
    """

    name: str
    settings: PublishedModelConfig
    folder: Path
    model: Decoder | Encoder
    tokeniser: FastTokeniser = field(repr=False)

    @classmethod
    def of(cls, settings: PublishedModelConfig, name: str, *, trained: bool = False) -> Self:
        """Finds the model of a section, whose own weights may be trained; reads its small files."""
        folder = hub.resolve(settings.path)
        model = architecture_of(settings, folder, name)
        if trained and settings.int8:
            trains = "the model is trained, and int8 weights cannot be"
            raise InputError(f"{name}.int8 must be false, found true: {trains}")
        tokeniser = _own_tokeniser(settings, folder, model.vocab_size, name)
        return cls(name, settings, folder, model, tokeniser)

    @property
    def chat(self) -> ChatTemplate | None:
        """The template by which prompts become messages; None leaves prompts as they are."""
        return _chat_template(self.settings, self.folder, self.name)

    def require_decoder(self, because: str) -> None:
        """Refuses an encoder; `because` says what it cannot do."""
        if not isinstance(self.model, Decoder):
            raise InputError(
                f"{self.name}.path = {self.settings.path!r} must hold a decoder, found a "
                f"{self.model.name}, {because}"
            )

    def require_positions(self, tokens: int, of: str) -> None:
        """Refuses a model that cannot read `tokens` tokens, the size of what `of` names."""
        positions = self.model.config.positions
        if tokens > positions:
            raise InputError(
                f"{self.name}.path = {self.settings.path!r} has {positions} positions, expected "
                f"at least {tokens}, for {of}"
            )

    def loaded(self, *, trained: bool = False, mesh: Mesh | None = None) -> LanguageModel:
        """The model with its weights, its adapters merged; an encoder is trained, never sampled."""
        settings = self.settings
        dtype = "float32" if trained else settings.dtype
        model, params = pretrained.load(self.folder, dtype=dtype, mesh=mesh)
        if isinstance(model, Decoder):
            if settings.adapters is not None:
                model, params = adapters.load(settings.adapters, model, params)
                model, params = lora.merge(model, params)
            if settings.int8:
                model, params = quantise(model, params)
            model = replace(model, compute=settings.dtype)
        elif model.head:
            model = replace(model, causal=True)
        else:
            raise InputError(
                f"{self.name}.path = {settings.path!r} holds a {model.name} without a "
                "language-model head, expected one: it predicts no next token"
            )
        return LanguageModel(cast(Decoder, model), params, self.tokeniser, mesh=data_mesh())


def architecture_of(settings: PublishedModelConfig, folder: Path, name: str) -> Decoder | Encoder:
    """The model that a folder's config.json describes, made causal if the section says so."""
    model = pretrained.read_config(folder / "config.json")
    if isinstance(model, Decoder):
        if settings.is_decoder:
            one = f"for a {model.name}, found true: it is one already"
            raise InputError(f"{name}.is_decoder must be absent {one}")
        return model
    if settings.is_decoder:
        with named(f"{name}.is_decoder"):
            model = replace(model, causal=True)
    if not model.causal:
        raise InputError(
            f"{name}.path = {settings.path!r} holds a {model.name} encoder, expected a decoder, or "
            f"is_decoder: true in section {name} (BERT and RoBERTa): it predicts no next token"
        )
    for option, default in (("dtype", "float32"), ("int8", False), ("adapters", None)):
        if (value := getattr(settings, option)) != default:
            raise InputError(
                f"{name}.{option} must be absent for a {model.name}, found {value!r}: it is for "
                "decoders only"
            )
    return model


def _own_tokeniser(
    settings: PublishedModelConfig, folder: Path, expected: int, name: str
) -> FastTokeniser:
    """A model's tokeniser, of `expected` ids; its name ends with a hash of all that it reads."""
    tokeniser = hugging_face(folder)
    if not (1 - _MOST_UNUSED) * expected <= tokeniser.vocab_size <= expected:
        raise InputError(
            f"{name}: the tokeniser of {folder} has {tokeniser.vocab_size} token ids, expected "
            f"the {expected} of config.json (vocab_size), or a few less: it is another model's "
            "tokeniser"
        )
    tokeniser.chat = _chat_template(settings, folder, name)
    identity = files.sha256_file(with_tokenizer(folder) / TOKENIZER)
    identity += repr((tokeniser.start, tokeniser.end_of_text, tokeniser.ends))
    if tokeniser.chat is not None:
        identity += repr((tokeniser.chat.source, tokeniser.chat.tokens))
    label = Path(settings.path.partition("@")[0]).name or folder.resolve().name
    tokeniser.name = f"{label} {hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return tokeniser


def _chat_template(settings: PublishedModelConfig, folder: Path, name: str) -> ChatTemplate | None:
    use_chat = getattr(settings, "chat", False)
    template = None if use_chat is False else read_template(folder)
    if use_chat and template is None:
        raise InputError(
            f"{name}.chat must be absent or false for {settings.path!r}, found true: the folder "
            "has no chat template"
        )
    return template
