"""Whether published texts repeat the clients that they were made from more than other clients.

Phrases that everybody uses repeat, too. So training clients are compared with held-out ones: who
was trained on was drawn at random, so that published texts which owe the training clients nothing
have words in common with both sides alike. A client has a run of n words if one of its texts and a
published one have n words in a row in common. The texts FAIL if for one of `LENGTHS` so many more
training than held-out clients have such a run that chance does it with a probability below
`LEVEL`, for all lengths together (Fisher's exact test of one side, Bonferroni).

The test counts clients and not published texts, which are not independent: many may repeat one
phrase. It is exact if training clients were drawn at random, whatever their texts are. It cannot
see a single client's text among many. What would have failed is told beside the result, and the
training clients' own texts, cut to the words of the published ones and published as a control, show
whether the audit can tell anything.

All numbers are exact counts of private data: PRIVATE.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from scipy import stats

from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.text.columns import text_column

LENGTHS = (5, 8, 13, 20)
"""Words in a row."""
LEVEL = 0.01
SIDES = ("training", "held_out")
CONTROL = "clients' own (control)"
# The most texts of each side that are searched, and of the published ones that are judged.
_MOST_TEXTS = 100_000
# The most bytes of each side's texts: the texts of a client may be joined to one.
_MOST_BYTES = 2**27


class CommonRuns:
    """The runs of words that several lists of texts have in common.

    Words are parted by white space, without regard to case. They are sorted by what follows them in
    their text, by doubling (Manber and Myers 1993, "Suffix arrays"): the runs of 2 w words are
    ranked by the ranks of their two halves. A run that goes beyond its text is ranked before all
    that continue it. The longest run that a text has in common with other texts begins at
    neighbours of that order. Time and memory are those of as many sorts of all words as the longest
    common run has binary digits.
    """

    def __init__(self, lists: Sequence[Sequence[str]]) -> None:
        words = [text.lower().split() for texts in lists for text in texts]
        length_T = np.fromiter(map(len, words), np.int64, len(words))
        self._sizes = [len(texts) for texts in lists]
        self._text_N = np.repeat(np.arange(len(words)), length_T)
        self._end_N = np.repeat(length_T.cumsum(), length_T)
        self._list_N = np.repeat(np.arange(len(lists)), self._sizes)[self._text_N]
        self._ranks = self._ranked(list(itertools.chain.from_iterable(words)))
        self._order_N = np.argsort(self._ranks[-1], kind="stable")

    def longest(self, one: int, other: int) -> np.ndarray:
        """The most words in a row of each text of a list that a text of another list has, too.

        `one` and `other` are the places of the two lists, from 0; the result is int64 [texts].
        """
        longest_T = np.zeros(sum(self._sizes), np.int64)
        list_N = self._list_N[self._order_N]
        own_M, others = np.flatnonzero(list_N == one), np.flatnonzero(list_N == other)
        start_M, after_M = self._order_N[own_M], np.searchsorted(others, own_M)
        if len(others):
            for near_M in (np.maximum(after_M - 1, 0), np.minimum(after_M, len(others) - 1)):
                common_M = self._common(start_M, self._order_N[others[near_M]])
                np.maximum.at(longest_T, self._text_N[start_M], common_M)
        return np.split(longest_T, np.cumsum(self._sizes)[:-1])[one]

    def _ranked(self, words: list[str]) -> list[np.ndarray]:
        """The ranks of the runs of 1, 2, 4 ... words from each word: int32 [words] each.

        They end where no two lists have a run of so many words in common.
        """
        rank_N = text_array(words).dictionary_encode().indices.to_numpy(zero_copy_only=False)
        ranks, at_N, width = [rank_N.astype(np.int32)], np.arange(len(words)), 1
        while True:
            whole = np.flatnonzero(at_N + width <= self._end_N)
            rank_W, list_W = ranks[-1][whole], self._list_N[whole]
            one_of_them = np.zeros(len(words), np.int64)
            one_of_them[rank_W] = list_W
            if np.array_equal(one_of_them[rank_W], list_W):
                return ranks
            second_N = np.zeros(len(words), np.int64)
            goes_on = np.flatnonzero(at_N + width < self._end_N)
            second_N[goes_on] = ranks[-1][goes_on + width] + 1
            pair_N = ranks[-1] * np.int64(len(words) + 1) + second_N
            ranks.append(np.unique(pair_N, return_inverse=True)[1].astype(np.int32))
            width *= 2

    def _common(self, one_M: np.ndarray, other_M: np.ndarray) -> np.ndarray:
        """The number of words that two texts begin with alike, read from two words on."""
        common_M, last = np.zeros(len(one_M), np.int64), len(self._end_N) - 1
        least_M = np.minimum(self._end_N[one_M] - one_M, self._end_N[other_M] - other_M)
        for power in reversed(range(len(self._ranks))):
            one, other = np.minimum(one_M + common_M, last), np.minimum(other_M + common_M, last)
            same_M = self._ranks[power][one] == self._ranks[power][other]
            common_M += np.where(same_M & (common_M + 2**power <= least_M), 2**power, 0)
        return common_M


def leakage(
    published: Mapping[str, Sequence[str]],
    training: Population,
    held_out: Population,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """What texts have in common with training and with held-out clients, as plain data; PRIVATE.

    Both sides have as many texts: whole clients in a random order, of which the last may be cut.
    A run of words does not go beyond a text. Where published texts were cut from joined ones, give
    the clients' joined, and not cut again (`Cut.joined`): what repeats them may lie across a cut.

    Args:
      published: texts by the name of their writer; the verdict is of the first, and the `CONTROL`
        has as many.

    Returns:
      "searched" texts of each side, "clients" of each side that have these; "verdict", "fails",
      "cannot tell" or "passes"; and "writers", with for each name and for `CONTROL`: "by_words" for
      each side the number of texts by the longest run, from 0 words on; "tests" for each of
      `LENGTHS`: the clients of each side with such a run, "p", and "fails_from", the least number
      of training clients that would fail; "fails".
    """
    draw = np.random.default_rng(seed)
    columns = {"training": text_column(training), "held_out": text_column(held_out)}
    for name, texts in {**published, **columns}.items():
        if not len(texts):
            raise InputError(f"an audit of texts needs texts of {name}, found none")
    searched = min(*map(len, columns.values()), _MOST_TEXTS)
    drawn = [_drawn(side, searched, draw) for side in (training, held_out)]
    for column, (row_N, _) in zip(columns.values(), drawn, strict=True):
        size_N = pc.call_function("binary_length", [column]).to_numpy()[row_N]
        fit = np.searchsorted(np.cumsum(size_N), _MOST_BYTES, "right")
        searched = min(searched, max(1, int(fit)))
    drawn = [(row_N[:searched], client_N[:searched]) for row_N, client_N in drawn]
    lists: list[list[str]] = [
        column.take(row_N).to_pylist()
        for column, (row_N, _) in zip(columns.values(), drawn, strict=True)
    ]
    writers = {
        name: [texts[int(i)] for i in draw.permutation(len(texts))[:_MOST_TEXTS]]
        for name, texts in published.items()
    }
    first = next(iter(writers))
    writers[CONTROL] = _as_long(lists[0], writers[first], draw)
    runs, owners = CommonRuns([*lists, *writers.values()]), [client_N for _, client_N in drawn]
    judged = {name: _judged(runs, place, owners) for place, name in enumerate(writers, start=2)}
    verdict = "passes" if judged[CONTROL]["fails"] else "cannot tell"
    return {
        "searched": searched,
        "clients": {
            name: int(client_N[-1]) + 1 for name, client_N in zip(SIDES, owners, strict=True)
        },
        "verdict": "fails" if judged[first]["fails"] else verdict,
        "writers": judged,
    }


def _as_long(
    texts: Sequence[str], published: Sequence[str], draw: np.random.Generator
) -> list[str]:
    """Runs of words of the texts, as many and as long as the published ones, if texts suffice."""
    runs = []
    for row, like in zip(
        np.resize(draw.permutation(len(texts)), len(published)), published, strict=True
    ):
        words, most = texts[int(row)].split(), len(like.split())
        start = draw.integers(max(len(words) - most, 0) + 1)
        runs.append(" ".join(words[start : start + most]))
    return runs


def _drawn(
    population: Population, number: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of so many texts, and for each the place of its client in a random order."""
    sizes, starts = population.sizes(), population.offsets
    order = draw.permutation(np.flatnonzero(sizes))
    order = order[: np.searchsorted(np.cumsum(sizes[order]), number) + 1]
    row_N = np.concatenate([np.arange(*starts[i : i + 2]) for i in order])
    return row_N[:number], np.repeat(np.arange(len(order)), sizes[order])[:number]


def _judged(runs: CommonRuns, place: int, owners: list[np.ndarray]) -> dict[str, Any]:
    """What the texts of a place in `runs` have in common with the clients of both sides."""
    by_words, by_side = {}, []
    for number, (side, client_N) in enumerate(zip(SIDES, owners, strict=True)):
        by_words[side] = np.bincount(runs.longest(place, number)).tolist()
        longest = np.zeros(client_N[-1] + 1, np.int64)
        np.maximum.at(longest, client_N, runs.longest(number, place))
        by_side.append(longest)
    tests = [_tested(words, *(longest >= words for longest in by_side)) for words in LENGTHS]
    return {"by_words": by_words, "tests": tests, "fails": any(test["fails"] for test in tests)}


def _tested(words: int, training: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    """Fisher's exact test of which clients, bool [clients] of each side, have a run of words."""
    clients, others = len(training), int(held_out.sum())

    def chance(number: int) -> float:
        """The probability of so many training clients or more, if chance chose who trains."""
        both = len(training) + len(held_out)
        return float(stats.hypergeom.sf(number - 1, both, number + others, clients))

    def fails(number: int) -> bool:
        return chance(number) < LEVEL / len(LENGTHS)

    number = int(training.sum())
    least = bisect.bisect_left(range(clients + 1), True, key=fails)
    return {
        "words": words,
        "training": number,
        "held_out": others,
        "p": chance(number),
        "fails": fails(number),
        "fails_from": least if least <= clients else None,
    }
