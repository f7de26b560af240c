"""Refuses a corpus that is declared public but holds the private clients' data.

One source can have many names, be read with other options, linked or copied, so the contents are
compared. For texts, these are the sets of runs of five words, which do not depend on the order of
the texts. How a source is split into examples, and where its lines end, must not matter either: the
runs within lines of one side are looked for among all runs of the other. A line is copied if all
its runs are there, at least four; one that repeats, such as a licence, counts once. For images and
tokens, they are the sets of whole examples.

Measured, in per cent of the public runs, public lines and private lines that are copied: other
corpora of chats and speeches below 1, 0, 0; a project's manual and commits 4, 2, 1; one half of a
source's clients 3, 3, 3; docstrings of packages that copy each other up to 11, 6, 6. With 5, 20 and
40 % of its texts short private messages: runs 1, 6, 15, lines 3, 12, 25. With 5 and 40 % of its
words private speeches: runs 7, 39, private lines 11, 100. So copies below a tenth may pass.
"""

import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.columns import take
from jaxpfl.data.population import Population
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import InputError

_RUN = 5
_LONG = 4  # runs of a line that is looked for as a whole
# The largest shares of runs and of lines, and of other examples, that may be copied.
_RUNS, _LINES, _EXAMPLES = 0.2, 0.1, 0.5
_WORD = re.compile(r"\w+|\0")
# Separates two texts: no run contains it.
_END = "\0"
# A larger population is compared by this many evenly spaced examples, in a few seconds.
_MOST = 400_000
_BLOCK = 65_536
# The first of these columns that both have is compared, else their first column of arrays.
_COLUMNS = ("text", "image", "tokens")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class PrivateContent:
    """The content of the clients who train, with which public corpora are compared. PRIVATE."""

    def __init__(self, clients: Population) -> None:
        self._clients = clients
        self._content = cache(lambda column: contents(clients, column))

    def refuse(self, corpus: Population, what: str) -> None:
        """Refuses a corpus, called `what`, that shares too much of its content or of theirs."""
        column = _compared(corpus, self._clients)
        if column is None:
            # Tokens and the text that they were made of have no column in common.
            if corpus.fingerprint == self._clients.fingerprint:
                raise _refused(what)
            return
        private, public = self._content(column), contents(corpus, column)
        # Only a part of a larger corpus is compared, which need not hold as much of the clients'.
        whole = corpus.num_examples <= _MOST
        if public.copied_from(private) or (whole and private.copied_from(public)):
            raise _refused(what, "too much of it, or of theirs")

    def refuse_clients(self, others: Population, what: str) -> Population:
        """The same clients without the examples that make one of them a copy of a private client.

        For other clients of the same source, such as an evaluation set, whose words may resemble
        the private clients' so much that `refuse` would refuse them. What was left out can be told
        from the number of examples, and shows who is private: it is no substitute for a split.
        `InputError`: more than half of the examples would be left out.
        """
        copied = _copied(self._clients, others)
        if copied.sum() > _EXAMPLES * len(copied):
            raise _refused(what)
        return others.keeping(~copied) if copied.any() else others


def _copied(private: Population, public: Population) -> np.ndarray:
    """Which examples of `public`, bool [examples], make a client a copy of a private one. PRIVATE.

    All of a client's, if it holds exactly the examples of a private client. Else those that it
    shares with ONE private client, and that no other private client holds, if they are half or more
    of the examples of either. Examples are compared byte for byte, in any order; numbers as
    float32. Between two thirds and a third of a chat channel's clients 0.1 % of the examples are
    such; of docstrings, which are copied between modules, 2 %.
    """
    column = _compared(public, private, alone=False)
    names = [column] if column else sorted(public.columns.keys() & private.columns.keys())
    copied = np.zeros(public.num_examples, bool)
    if not names or not private.num_examples:
        return copied
    rows, own_rows = _examples(public, names), _examples(private, names)
    distinct, own = np.unique(rows, axis=0), np.unique(own_rows, axis=0)
    sizes, own_sizes = np.bincount(distinct[:, 0]), np.bincount(own[:, 0])
    # Those with equal sets of examples: the sums of hashes modulo 2^64.
    totals, own_totals = np.zeros(len(sizes), np.int64), np.zeros(len(own_sizes), np.int64)
    np.add.at(totals, distinct[:, 0], distinct[:, 1])
    np.add.at(own_totals, own[:, 0], own[:, 1])
    copied |= np.isin(totals[rows[:, 0]], own_totals[own_sizes > 0])
    hashes, first, holders = np.unique(own[:, 1], return_index=True, return_counts=True)
    hashes, owners = hashes[holders == 1], own[first[holders == 1], 0]
    if not len(hashes):
        return copied

    def pairs(examples: np.ndarray) -> np.ndarray:
        """A number for each example, of its holder and its owner; a multiple without an owner."""
        place = np.minimum(np.searchsorted(hashes, examples[:, 1]), len(hashes) - 1)
        owner = np.where(hashes[place] == examples[:, 1], owners[place], -1)
        return examples[:, 0] * (len(private) + 1) + owner + 1

    shared, times = np.unique(pairs(distinct), return_counts=True)
    client, owned_by = np.divmod(shared, len(private) + 1)
    least = np.minimum(sizes[client], own_sizes[owned_by - 1])
    return copied | np.isin(pairs(rows), shared[(owned_by > 0) & (2 * times >= least)])


def _examples(population: Population, names: list[str]) -> np.ndarray:
    """int64 [examples, 2]: whose an example is, and its hash, valid in this process only."""
    examples = np.zeros((population.num_examples, 2), np.int64)
    examples[:, 0] = np.repeat(np.arange(len(population)), population.sizes())
    for name in names:
        column = population.columns[name]
        for start in range(0, len(examples), _BLOCK):
            block = slice(start, start + _BLOCK)
            hashes = list(map(hash, _rows(take(column, block))))
            examples[block, 1] = examples[block, 1] * 31 + hashes
    return examples


def _rows(values: Any) -> list[Any]:
    """Examples as values that can be hashed."""
    if isinstance(values, Padded | Sequences):
        ids = values.sequences if isinstance(values, Padded) else values
        return [row.tobytes() for row in ids.to_list()]
    if not isinstance(values, np.ndarray):
        return values.to_pylist()
    if values.dtype.kind == "f":
        values = values.astype(np.float32) + np.float32(0.0)  # so that -0.0 is 0.0
    return [row.tobytes() for row in values]


class Content(NamedTuple):
    """A column's content as int64 hashes, valid in this process only. PRIVATE.

    Sorted distinct `runs` of texts within lines, and `all_runs`, or both of whole examples, of
    which at `most` this share may be copied; `lines_R`, those of distinct lines of these `sizes`.
    """

    most: float
    runs: np.ndarray
    all_runs: np.ndarray
    lines_R: np.ndarray = np.zeros(0, np.int64)
    sizes: np.ndarray = np.zeros(0, np.int64)

    def copied_from(self, other: "Content") -> bool:
        """Whether the other holds more of the runs, or of the lines, than may be copied."""
        runs = np.isin(self.runs, other.all_runs, assume_unique=True)
        line_R = np.repeat(np.arange(len(self.sizes)), self.sizes)
        copied = np.bincount(line_R, np.isin(self.lines_R, other.all_runs), len(self.sizes))
        lines = copied == self.sizes
        return bool(runs.sum() > self.most * len(runs) or lines.sum() > _LINES * len(lines))


def contents(population: Population, column: str) -> Content:
    """The content of a column, or of evenly spaced examples of it. PRIVATE."""
    values = population.columns[column]
    if len(values) > _MOST:
        values = take(values, np.linspace(0, len(values) - 1, _MOST).astype(np.int64))
    if isinstance(values, np.ndarray | Padded | Sequences):
        hashes = np.unique(np.fromiter(map(hash, _rows(values)), np.int64, len(values)))
        return Content(_RUNS if column in _COLUMNS else _EXAMPLES, hashes, hashes)
    blocks, seen = [(np.zeros(0, np.int64),) * 3], set[int]()
    for start in range(0, len(values), _BLOCK):
        texts = values.slice(start, _BLOCK).to_pylist()
        lines = {hash(line): line for text in texts for line in text.split("\n")}
        new = [line for key, line in lines.items() if key not in seen]
        seen.update(lines)
        runs, sizes = _runs(new)
        blocks.append((runs, runs if new == texts else _runs(texts)[0], sizes))
    runs, all_runs, sizes = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    lines_R = runs[np.repeat(sizes >= _LONG, sizes)]
    return Content(_RUNS, np.unique(runs), np.unique(all_runs), lines_R, sizes[sizes >= _LONG])


def _runs(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all runs of five words of the texts, and how many each has; a shorter has one."""
    ended = f" {_END * _RUN} "
    words = _WORD.findall(f"{ended.join(texts)}{ended}".lower())
    hashes = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
    ends = hashes == np.uint64(hash(_END) % 2**64)
    starts = np.arange(len(words) - _RUN + 1)
    runs = np.zeros(len(starts), np.uint64)
    for place in range(_RUN):
        # A polynomial of the words' hashes modulo 2^64: the overflow is intended.
        runs = runs * _MULTIPLIER + hashes[starts + place]
    begins_text = np.concatenate([[True], ends[:-1]])[: len(starts)]
    is_run = (~ends[starts + _RUN - 1] | begins_text) & ~ends[starts]
    text = np.cumsum(ends)[starts][is_run] // _RUN
    return runs[is_run].view(np.int64), np.bincount(text, minlength=len(texts))


def _compared(corpus: Population, clients: Population, *, alone: bool = True) -> str | None:
    """The column whose content is compared; `alone`: also one of arrays, without the others."""
    shared = corpus.columns.keys() & clients.columns.keys()
    columns = corpus.columns.items() if alone else ()
    arrays = sorted(
        name for name, values in columns if isinstance(values, np.ndarray) and values.ndim > 1
    )
    return next((name for name in (*_COLUMNS, *arrays) if name in shared), None)


def _refused(what: str, share: str = "over half of it") -> InputError:
    own = "the private clients' own data, perhaps under another name"
    both = "no data can be public and private at once"
    return InputError(f"{what} holds {own}: {share}, and {both}; name another source")
