"""Few-shot prompts: a list of public texts, which a language model continues.

Source: PrE-Text (Hou et al. 2024) and POPri (Hou et al. 2025, Figure 5). A prompt is three numbered
public samples and the heading of a fourth, which the model writes up to the next heading.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.data.draws import generator_of
from jaxpfl.errors import InputError


@dataclass(frozen=True)
class FewShot(Checked):
    """The format of prompts and responses.

    Attributes:
      shots: the number of different texts in a prompt.
      head: the beginning of a prompt.
      heading: precedes each text; `{number}` counts from 1.
      after: follows each text.
      stop: a response ends where this begins; "" means only at end-of-text.
      flatten: whether every run of white space in a text, newlines among it, becomes one space: in
        the samples of prompts, and in responses, after they were cut at `stop`. The released code
        does so.
    """

    shots: PositiveInt = 3
    head: str = "List of 6 diverse original text samples:\n\n"
    heading: str = "Original Text Sample {number}\n"
    after: str = "\n\n"
    stop: str = "Original Text Sample"
    flatten: bool = True

    def check_fields(self) -> None:
        try:
            self.heading.format(number=1)
        except (IndexError, KeyError, ValueError) as error:
            expected = "heading may hold {number} and no other field"
            raise InputError(f"{expected}, found {self.heading!r}") from error

    def prompt(self, texts: Sequence[str]) -> str:
        """The prompt that consists of these texts and the heading of the next."""
        parts = [
            self.heading.format(number=number) + self._clean(text) + self.after
            for number, text in enumerate(texts, 1)
        ]
        return self.head + "".join(parts) + self.heading.format(number=len(texts) + 1).rstrip(" ")

    def prompts(self, samples: Sequence[str], number: int, *, seed: int, round: int) -> list[str]:
        """`number` prompts of a round, each of `shots` PUBLIC samples drawn without replacement.

        Prompt i of a round is a function of (samples, seed, round, i) alone, so a round can be
        computed again. Fewer samples than shots are refused.
        """
        if len(samples) < self.shots:
            raise InputError(f"a prompt needs {self.shots} different samples, found {len(samples)}")
        prompts = []
        for index in range(number):
            draws = generator_of(f"few-shot prompt {seed} {round} {index}")
            rows = draws.choice(len(samples), self.shots, replace=False)
            prompts.append(self.prompt([samples[int(row)] for row in rows]))
        return prompts

    def response(self, generated: str) -> str:
        """A response as a text: what precedes the stop string, without surrounding white space."""
        return self._clean(generated.partition(self.stop)[0] if self.stop else generated)

    def _clean(self, text: str) -> str:
        return " ".join(text.split()) if self.flatten else text.strip()


POPRI = FewShot()
"""The prompt of POPri's Figure 5, for models that follow instructions."""
