"""One public rule that cuts texts into examples, alike for clients, public corpora and generators.

    messages       texts as their source gives them
    sentences      the sentences of every text, see `data.readers.plain_text`
    words:N        runs of N words, one after another
    tokens:N       runs of N tokens of the downstream model, as in LargeFedBench (Hou et al. 2025,
                   POPri, section 4: 64 tokens of a speech or an abstract)
    documents:N    the first N words alone

Texts that are cut otherwise differ by their form alone, and every distance between them, and every
model that is trained on them, shows it.

The last three join the texts of a client, or of a document of a public corpus, in their order;
every run of white space, newlines among it, becomes one space, and words are what spaces separate.
The last run is the rest, which may be shorter: without it a client of few words would have no
example. No piece is empty, and none holds text of two clients. Nothing is random.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

from jaxpfl.data.columns import concatenated, text_array
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.data.readers.plain_text import pieces
from jaxpfl.errors import InputError
from jaxpfl.text.columns import text_column
from jaxpfl.text.tokenisers.base import Tokeniser

# Clients whose texts are in memory at a time.
_BLOCK = 1_024
_RULE = re.compile("(messages|sentences)|(words|tokens|documents):([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Cut:
    """A rule by which texts are cut; `str` gives it as configs and commands name it.

    Attributes:
      unit: "messages", "sentences", "words", "tokens" or "documents".
      size: the most words or tokens of a piece, where texts are joined; else 0.
      tokeniser: counts the tokens of "tokens".
    """

    unit: str = "messages"
    size: int = 0
    tokeniser: Tokeniser | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, rule: str, tokeniser: Tokeniser | None = None) -> Self:
        """The rule of such a string; `InputError` for any other."""
        if (match := _RULE.fullmatch(rule)) is None:
            rules = "messages, sentences, words:N, documents:N or, in synthetic text, tokens:N"
            raise InputError(f"a rule of a cut must be {rules}, with N above 0, found {rule!r}")
        whole, joined, size = match.groups()
        return cls(whole or joined, int(size or 0), tokeniser)

    @classmethod
    def without_model(cls, rule: str) -> Self:
        """`parse` for where no downstream model counts tokens; refuses the rule "tokens:N"."""
        if (cut := cls.parse(rule)).unit == "tokens":
            raise InputError(f"tokens need a downstream model, found {rule!r}: choose words:N")
        return cut

    def __str__(self) -> str:
        return f"{self.unit}:{self.size}" if self.size else self.unit

    def pieces(self, clients: Iterable[Sequence[str]]) -> list[list[str]]:
        """The pieces of the texts of each client, or document, in their order."""
        if self.unit == "messages":
            return [list(texts) for texts in clients]
        if self.unit == "sentences":
            return [
                [piece for text in texts for piece in pieces(text.split("\n"), "sentences")]
                for texts in clients
            ]
        words = [" ".join(texts).split() for texts in clients]
        if self.unit != "tokens":
            most = 1 if self.unit == "documents" else None
            return [[" ".join(run) for run in islice(self._runs(row), most)] for row in words]
        assert self.tokeniser is not None, "tokens are cut by a tokeniser"
        decode = self.tokeniser.decode
        rows = self.tokeniser.encode([" ".join(row) for row in words])
        # Of a character that was cut in two no part is left.
        cut = ([decode(run).strip("\ufffd").strip() for run in self._runs(row)] for row in rows)
        return [list(filter(None, of_client)) for of_client in cut]

    def _runs(self, row: Any) -> Iterator[Any]:
        return (row[start : start + self.size] for start in range(0, len(row), self.size))

    def joined(self, population: Population) -> Population:
        """The same clients with all their words in one text, where the rule joins; else itself."""
        return Cut("words", sys.maxsize).population(population) if self.size else population

    def first(self, texts: Sequence[str]) -> list[str]:
        """The first piece of every text, each a document of its own; "" of one without any."""
        return [(*cut, "")[0] for cut in self.pieces([text] for text in texts)]

    def population(self, population: Population) -> Population:
        """The same clients, whose examples are the pieces of their texts, with no other column.

        "messages" returns the population itself, whatever its columns, and so is one without
        examples. The fingerprint does not change, because pieces are as private as the text.
        """
        if self.unit == "messages" or not population.num_examples:
            return population
        column, offsets = text_column(population), population.offsets
        parts, sizes = [], list[int]()
        for start in range(0, len(population), _BLOCK):
            bounds = offsets[start : start + _BLOCK + 1]
            texts = column.slice(int(bounds[0]), int(bounds[-1] - bounds[0])).to_pylist()
            ends = (bounds - bounds[0]).tolist()
            cut = self.pieces(texts[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True))
            parts.append(text_array([piece for of_client in cut for piece in of_client]))
            sizes += map(len, cut)
        return population.with_examples({"text": concatenated(parts)}, offsets_of(sizes))


MESSAGES = Cut()
"""The rule that changes no text."""
