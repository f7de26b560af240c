"""Few-shot prompts: public texts in a list, which a language model goes on with.

Source: PrE-Text (Hou et al. 2024) and POPri (Hou et al. 2025, Figure 5): three public samples,
numbered, and the heading of a fourth, which the model writes; what follows the next heading is cut
off. A small model that has not learnt to follow headings gets `DOCUMENTS`: texts with a separator
between, as it was trained on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError


@dataclass(frozen=True)
class FewShot:
    """How a prompt is made of texts, and a text of a response.

    Attributes:
      shots: texts in a prompt, all different.
      head: what a prompt begins with.
      heading: what stands before each text; `{number}` counts from 1.
      after: what stands after each text.
      stop: a response ends where this begins; "" = nowhere but at end-of-text.
    """

    shots: int = 3
    head: str = "List of 6 diverse original text samples:\n\n"
    heading: str = "Original Text Sample {number}\n"
    after: str = "\n\n"
    stop: str = "Original Text Sample"

    def __post_init__(self) -> None:
        positive_int("shots", self.shots)
        try:
            self.heading.format(number=1)
        except (IndexError, KeyError, ValueError) as error:
            raise InputError(
                f"heading may hold {{number}} and no other field, found {self.heading!r}"
            ) from error

    def prompt(self, texts: Sequence[str]) -> str:
        """The prompt of these texts, which the model continues by one more."""
        parts = [
            self.heading.format(number=number) + text.strip() + self.after
            for number, text in enumerate(texts, 1)
        ]
        return self.head + "".join(parts) + self.heading.format(number=len(texts) + 1).rstrip(" ")

    def prompts(self, samples: Sequence[str], number: int, *, seed: int, round: int) -> list[str]:
        """`number` prompts of a round, each of `shots` samples drawn without replacement.

        Prompt i of a round is a function of (samples, seed, round, i) alone, so a round can be
        computed again. The samples are PUBLIC.

        Raises:
          InputError: fewer samples than shots.
        """
        positive_int("number", number)
        if len(samples) < self.shots:
            raise InputError(
                f"a prompt is made of {self.shots} different samples, found {len(samples)} samples"
            )
        drawn = [
            _generator(seed, round, index).choice(len(samples), self.shots, replace=False)
            for index in range(number)
        ]
        return [self.prompt([samples[int(row)] for row in rows]) for rows in drawn]

    def response(self, generated: str) -> str:
        """The text in what a model wrote: before the next heading, without surrounding space."""
        text = generated.partition(self.stop)[0] if self.stop else generated
        return text.strip()


POPRI = FewShot()
"""The prompt of POPri's Figure 5, for models that follow instructions."""

DOCUMENTS = FewShot(head="", heading="", after="\n", stop="\n")
"""One text a line, for small models trained on lines."""


def _generator(seed: int, round: int, index: int) -> np.random.Generator:
    digest = hashlib.sha256(f"few-shot prompt {seed} {round} {index}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
