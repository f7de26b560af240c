"""Variations: texts that a decoder makes from given ones, for private evolution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jax import Array

from jaxpfl.checks import open_fraction, positive_int
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel


@dataclass(frozen=True)
class Continue:
    """Keeps the first tokens of a text, which a decoder continues.

    Attributes:
      kept: the share of a text's tokens that stay, rounded down.
      tokens: the largest number of tokens of a variation.
      decoding: settings of the new tokens; its `max_new_tokens` is ignored.
      clean: applied to each variation before it is cut to `tokens`, such as `FewShot.response`.
    """

    writer: LanguageModel
    kept: float = 0.5
    tokens: int = 64
    decoding: Decoding = field(default_factory=Decoding)
    clean: Callable[[str], str] = str.strip

    def __post_init__(self) -> None:
        open_fraction("kept", self.kept)
        positive_int("tokens", self.tokens)

    def __call__(self, texts: Sequence[str], key: Array) -> list[str]:
        """One variation of each text; a text whose variation would be empty stays as it is."""
        tokeniser = self.writer.tokeniser
        rows = [row[: self.tokens] for row in tokeniser.encode(texts)]
        starts = [
            tokeniser.decode(row[: int(self.kept * len(row))]).rstrip("\ufffd") for row in rows
        ]
        decoding = replace(self.decoding, max_new_tokens=self.tokens)
        # A beginning is continued, also by a model that answers messages.
        written = self.writer.without_chat().write(starts, key, decoding=decoding)
        joined = [self.clean(start + end) for start, (end,) in zip(starts, written, strict=True)]
        cut = self.writer.shortened(joined, self.tokens)
        return [new or old for new, old in zip(cut, texts, strict=True)]
