"""Settings that say how tokens are chosen from a language model's probabilities."""

from dataclasses import dataclass

from jaxpfl.checked import Checked, NonNegative, PositiveFraction, PositiveInt
from jaxpfl.text.generation.stop import check_stop


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

    Raises:
      InputError: a setting is out of its range; the message names it.
    """

    max_new_tokens: PositiveInt = 64
    temperature: NonNegative = 1.0
    top_p: PositiveFraction = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "stop", check_stop(self.stop))
