"""Settings that say how tokens are chosen from a language model's probabilities."""

import re
from dataclasses import dataclass

from jaxpfl.checked import Checked, NonNegative, PositiveFraction, PositiveInt
from jaxpfl.errors import InputError

_NOT_TEXT = re.compile("[\ud800-\udfff\ufffd]")


@dataclass(frozen=True)
class Decoding(Checked):
    """Settings of text generation.

    Attributes:
      max_new_tokens: a response has at most this many tokens.
      temperature: the logits are divided by it before the softmax; at 0 the most probable token is
        always taken.
      top_p: tokens are drawn from the nucleus, the fewest most probable tokens that together have
        this probability (Holtzman et al. 2020); 1 turns this off.
      stop: a response ends before the first of these texts, see `jaxpfl.text.generation.stop`.
    """

    max_new_tokens: PositiveInt = 64
    temperature: NonNegative = 1.0
    top_p: PositiveFraction = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.stop, str):
            raise InputError("stop must be a list of texts, found one text")
        for i, text in enumerate(self.stop):
            if not isinstance(text, str) or not text or _NOT_TEXT.search(text):
                raise InputError(
                    f"stop[{i}] must be a text of at least one character, without U+FFFD or lone "
                    f"surrogates, found {text!r}"
                )
        object.__setattr__(self, "stop", tuple(self.stop))
