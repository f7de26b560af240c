"""Finds the published models that a config names, checks them before a charge, and loads them."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from jaxpfl.text.tokenisers.fast import ChatTemplate, FastTokeniser, hugging_face, read_template

# Published embedding tables are padded to a multiple of 128 or a little further, by less than 2 %.
# A tokeniser that leaves more of the model's ids unused is another model's.
_MOST_UNUSED = 0.05


@dataclass(frozen=True)
class PublishedModel:
    """A published model before its weights are read, of a config section's `name`.

    An encoder's head is read with its weights. The tokeniser's name ends with a hash of all that it
    is made of.
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
        tokeniser, expected = hugging_face(folder), model.vocab_size
        if not (1 - _MOST_UNUSED) * expected <= tokeniser.vocab_size <= expected:
            ids = f"{tokeniser.vocab_size} token ids, expected the {expected} of config.json"
            other = "(vocab_size), or a few less: it is another model's"
            raise InputError(f"{name}: the tokeniser of {folder} has {ids} {other}")
        published = cls(name, settings, folder, model, tokeniser)
        tokeniser.chat = published.chat
        identity = files.sha256_file(with_tokenizer(folder) / TOKENIZER)
        identity += repr((tokeniser.start, tokeniser.end_of_text, tokeniser.ends))
        if tokeniser.chat is not None:
            identity += repr((tokeniser.chat.source, tokeniser.chat.tokens))
        label = Path(settings.path.partition("@")[0]).name or folder.resolve().name
        tokeniser.name = f"{label} {hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        return published

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The template by which prompts become messages; None leaves prompts as they are."""
        use_chat = getattr(self.settings, "chat", False)
        template = None if use_chat is False else read_template(self.folder)
        if use_chat and template is None:
            where = f"for {self.settings.path!r}, which has no chat template"
            raise InputError(f"{self.name}.chat must be absent or false {where}, found true")
        return template

    def require_decoder(self, because: str) -> None:
        """Refuses an encoder; `because` says what it cannot do."""
        if not isinstance(self.model, Decoder):
            kind = f"a {self.model.name}, {because}"
            raise InputError(f"{self._where} must hold a decoder, found {kind}")

    def require_positions(self, tokens: int, of: str) -> None:
        """Refuses a model that cannot read `tokens` tokens, the size of what `of` names."""
        if tokens > (positions := self.model.config.positions):
            expected = f"at least {tokens}, for {of}"
            raise InputError(f"{self._where} has {positions} positions, expected {expected}")

    @property
    def _where(self) -> str:
        return f"{self.name}.path = {self.settings.path!r}"

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
            head = "a language-model head: it predicts no next token"
            raise InputError(f"{self._where} holds a {model.name} without {head}")
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
        where = f"{name}.path = {settings.path!r} holds a {model.name} encoder"
        expected = f"a decoder, or is_decoder: true in section {name} (BERT and RoBERTa)"
        raise InputError(f"{where}, expected {expected}: it predicts no next token")
    for option, default in (("dtype", "float32"), ("int8", False), ("adapters", None)):
        if (value := getattr(settings, option)) != default:
            kind = f"a {model.name}, which is no decoder"
            raise InputError(f"{name}.{option} must be absent for {kind}, found {value!r}")
    return model
