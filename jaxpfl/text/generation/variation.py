"""Variations: similar texts that public models make from given ones.

`MaskAndFill` is the variation of PrE-Text (Hou et al. 2024, "PrE-Text: Training Language Models on
Private Federated Data in the Age of LLMs", section 3): some tokens are masked, and a masked
language model, RoBERTa in the paper, draws others in their place. `Rephrase` is the variation of
Aug-PE (Xie et al. 2024, section 4): a model that follows instructions writes the text in other
words. `redraw` and `Continue` are substitutes, for a decoder that follows no instructions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpfl.checked import Checked, OpenFraction, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Params
from jaxpfl.models.checkpoints import pretrained, tokenizer_files
from jaxpfl.models.checkpoints.model_files import read_object
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel, Writer, prompt_ids
from jaxpfl.text.tokenisers.base import Tokeniser, check_fits, pad
from jaxpfl.text.tokenisers.fast import hugging_face

_ROWS, _MULTIPLE = 32, 32
_MASKED = 0.3
_MASKS = ("[MASK]", "<mask>")


@dataclass(frozen=True)
class WriterVariation(Checked):
    """What the variations of a writer have in common.

    Attributes:
      tokens: the largest number of tokens of a variation.
      decoding: settings of the new tokens; its `max_new_tokens` is ignored.
      clean: applied to each variation before it is cut to `tokens`, such as `FewShot.response`.
    """

    writer: Writer
    tokens: PositiveInt = 64
    decoding: Decoding = field(default_factory=Decoding)
    clean: Callable[[str], str] = str.strip

    def finished(self, texts: Sequence[str], written: Sequence[str]) -> list[str]:
        """What was written, cleaned and cut; a text itself in the place of an empty one."""
        cut = self.writer.pieces(list(map(self.clean, written)), self.tokens)
        return [new or old for new, old in zip(cut, texts, strict=True)]


@dataclass(frozen=True)
class Continue(WriterVariation):
    """Keeps the first tokens of a text, which the writer continues.

    Attributes:
      kept: the share of a text's tokens that stay, rounded down.
    """

    kept: OpenFraction = 0.5

    def __call__(self, texts: Sequence[str], key: Array) -> list[str]:
        """One variation of each text; a text whose variation would be empty stays as it is."""
        tokeniser = self.writer.tokeniser
        rows = [row[: self.tokens] for row in tokeniser.encode(texts)]
        heads = (row[: int(self.kept * len(row))] for row in rows)
        starts = [tokeniser.decode(head).rstrip("\ufffd") for head in heads]
        decoding = replace(self.decoding, max_new_tokens=self.tokens)
        # A model that answers messages continues the beginning, too.
        ends = self.writer.without_chat().write(starts, key, decoding=decoding).texts
        whole = [start + end for start, (end,) in zip(starts, ends, strict=True)]
        return self.finished(texts, whole)


@dataclass(frozen=True)
class Rephrase(WriterVariation):
    """Asks the writer for the same text in other words, in one of `styles` drawn at random.

    Attributes:
      request: the prompt, with {style} and {text}; a model with a chat template reads it as the
        message of a user.
    """

    request: str = (
        "Write the text below in other words, {style}. Keep its subject and about its length. "
        "Answer with the new text alone.\n\nText: {text}\n\nNew text:"
    )
    styles: tuple[str, ...] = (
        "in a formal style",
        "in a casual style",
        "as briefly as possible",
        "with more detail",
        "with another beginning",
        "with other words for its most important ones",
    )

    def __call__(self, texts: Sequence[str], key: Array) -> list[str]:
        """One variation of each text; a text whose variation would be empty stays as it is."""
        styles_key, key = jax.random.split(key)
        drawn_N = np.asarray(jax.random.randint(styles_key, (len(texts),), 0, len(self.styles)))
        prompts = [
            self.request.format(style=self.styles[index], text=text)
            for index, text in zip(drawn_N.tolist(), texts, strict=True)
        ]
        decoding = replace(self.decoding, max_new_tokens=self.tokens)
        written = self.writer.write(prompts, key, decoding=decoding).texts
        return self.finished(texts, [text for (text,) in written])


@dataclass(frozen=True)
class MaskAndFill(Checked):
    """Masks three of ten tokens at random and draws others from a masked language model.

    At least one token of each text is masked, of which `tokens` are used. A variation does so
    `steps` times: twice, as in PrE-Text's released code.

    Attributes:
      model: an encoder with a language-model head; or a decoder, see `redraw`.
      mask_id: None with a decoder.
      first_id, last_id: are around a text; None: nothing is behind it.
    """

    model: Encoder | Decoder
    params: Params = field(repr=False)
    tokeniser: Tokeniser = field(repr=False)
    mask_id: int | None
    first_id: int
    last_id: int | None
    tokens: PositiveInt = 64
    steps: PositiveInt = 2

    def check_fields(self) -> None:
        check_fits(self.tokeniser, self.model.vocab_size)

    def __call__(self, texts: Sequence[str], key: Array) -> list[str]:
        """One variation of each text, text i with `fold_in(key, i)`; an empty one stays empty."""
        last = [] if self.last_id is None else [self.last_id]
        # Ids without a text, and those that the tokeniser does not have, are never drawn.
        banned_V = np.ones(self.model.vocab_size, bool)
        banned_V[[i for i, piece in enumerate(self.tokeniser.token_bytes()) if piece]] = False
        for step in range(self.steps):
            step_key = jax.random.fold_in(key, step)
            rows = [row[: self.tokens] for row in self.tokeniser.encode(texts)]
            varied = list(texts)
            # Sorted by length, so that little is padding; every batch has `_ROWS` rows.
            order = sorted(
                (i for i in range(len(rows)) if len(rows[i])), key=lambda i: len(rows[i])
            )
            for start in range(0, len(order), _ROWS):
                chosen = order[start : start + _ROWS]
                framed = [np.array([self.first_id, *rows[i], *last], np.int32) for i in chosen]
                longest = max(map(len, framed))
                # Rows are not padded beyond the model's positions.
                width = min(_width(longest), max(longest, self.model.config.positions))
                tokens_BxL = pad(framed + [[]] * (_ROWS - len(chosen)), width)
                numbers_B = jnp.asarray(np.resize(chosen, _ROWS))
                network = self.model, self.mask_id, self.params
                drawn = _drawn(*network, tokens_BxL, step_key, numbers_B, banned_V)
                for i, row in zip(chosen, np.asarray(drawn), strict=False):
                    text = self.tokeniser.decode(row[1 : 1 + len(rows[i])]).strip()
                    varied[i] = text or texts[i]
            texts = varied
        return list(texts)


def redraw(writer: LanguageModel, tokens: int = 64, steps: int = 2) -> MaskAndFill:
    """Draws three of ten tokens anew, each as the decoder continues the tokens before it.

    A substitute where there is no masked language model: it does not read what follows a token.
    """
    ((first_id,),) = prompt_ids(writer.tokeniser.without_chat(), [""])
    network = writer.model, writer.params, writer.tokeniser
    return MaskAndFill(*network, None, int(first_id), None, tokens, steps)


def mask_and_fill(name: str | Path, *, tokens: int = 64) -> MaskAndFill:
    """`MaskAndFill` with a published masked language model of the BERT family.

    `name` is a folder or a Hugging Face hub NAME[@REVISION], see `models.checkpoints.pretrained`;
    longer texts are cut to so many `tokens`.
    """
    folder = pretrained.resolve(name)
    model, params = pretrained.load(folder)
    if not isinstance(model, Encoder) or model.causal or not model.head:
        kind = "a decoder"
        if isinstance(model, Encoder):
            kind = "a causal encoder" if model.causal else "an encoder without that head"
        expected = "a masked language model: an encoder with a language-model head"
        raise InputError(f"{name} must be {expected}, found {kind}")
    if _width(tokens + 2) > model.config.positions:
        most, least = model.config.positions, f"{_width(tokens + 2)} for texts of {tokens}"
        raise InputError(f"{name} reads at most {most} tokens at a time, expected at least {least}")
    return MaskAndFill(model, params, hugging_face(folder), *_special_ids(folder), tokens=tokens)


def _special_ids(folder: Path) -> tuple[int, int, int]:
    folder = tokenizer_files.with_tokenizer(folder)
    path = folder / tokenizer_files.TOKENIZER
    tokenizer = tokenizer_files.read_tokenizer(path)
    named = read_object(folder / tokenizer_files.SETTINGS, optional=True).get("mask_token")
    named = named.get("content") if isinstance(named, dict) else named
    masks = _MASKS if named is None else (named,)
    ids = [tokenizer.token_to_id(mask) for mask in masks if isinstance(mask, str)]
    mask = next((i for i in ids if i is not None), None)
    if mask is None:
        raise InputError(f"{path} has no mask token {' or '.join(map(repr, masks))}")
    plain, whole = tokenizer_files.framed(tokenizer, path)
    if len(whole) < 2 or whole[1:-1] != plain:
        raise InputError(f"{path} must put one token before a text, one after")
    return mask, whole[0], whole[-1]


def _width(tokens: int) -> int:
    """The length of a row of `tokens` tokens, rounded up so that few programs are compiled."""
    return -(-tokens // _MULTIPLE) * _MULTIPLE


@partial(jax.jit, static_argnums=(0, 1))
def _drawn(
    model: Encoder | Decoder,
    mask_id: int | None,
    params: Params,
    tokens_BxL: Array,
    key: Array,
    numbers_B: Array,
    banned_V: Array,
) -> Array:
    """Rows of which some tokens are drawn, row i with `fold_in(key, numbers_B[i])`.

    They are drawn from a masked language model, or from a decoder's next tokens without `mask_id`.
    The first place, of a masked model the last one too, stay; at least one other is drawn.
    """
    places_L = jnp.arange(tokens_BxL.shape[1])
    end_B = jnp.sum(tokens_BxL != PAD, axis=1) - (0 if mask_id is None else 1)
    inside_BxL = (places_L[None] > 0) & (places_L[None] < end_B[:, None])
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers_B)
    keys_Bx2 = jax.vmap(lambda k: jax.random.split(jax.random.fold_in(k, 0)))(keys_B)
    uniform_BxL = jax.vmap(lambda k: jax.random.uniform(k, places_L.shape))(keys_Bx2[:, 0])
    uniform_BxL = jnp.where(inside_BxL, uniform_BxL, jnp.inf)
    least_Bx1 = jnp.min(uniform_BxL, axis=1, keepdims=True)
    masked_BxL = inside_BxL & ((uniform_BxL < _MASKED) | (uniform_BxL == least_Bx1))
    if mask_id is None:
        # A place's token follows the place before it.
        logits_BxLxV = jnp.roll(model.logits(params, model.hidden(params, tokens_BxL)), 1, axis=1)
    else:
        given_BxL = jnp.where(masked_BxL, mask_id, jnp.maximum(tokens_BxL, 0))
        hidden_BxLxH = model.hidden(params, given_BxL, tokens_BxL != PAD)
        logits_BxLxV = model.logits(params, hidden_BxLxH)
    logits_BxLxV = jnp.where(banned_V[None, None], -jnp.inf, logits_BxLxV)
    drawn_BxL = jax.vmap(jax.random.categorical)(keys_Bx2[:, 1], logits_BxLxV).astype(jnp.int32)
    return jnp.where(masked_BxL, drawn_BxL, tokens_BxL)
