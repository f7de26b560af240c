"""How many words in a row texts have in common with other texts.

Of published and clients' own texts the numbers are exact counts of private data: PRIVATE in a
deployment. Common phrases repeat, too, so they say something beside a control only.

All words are sorted by what follows them in their text, by doubling (Manber and Myers 1993, "Suffix
arrays"): the runs of 2 w words are ranked by the ranks of their two halves. A run that goes beyond
its text is ranked before all that continue it. The longest run that a text has in common with other
texts begins at neighbours of that order.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxpfl.data.columns import text_array


class CommonRuns:
    """The runs of words that several lists of texts have in common.

    Words are parted by white space, without regard to case. Time and memory are those of as many
    sorts of all words as the longest common run has binary digits.
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

        Args:
          one, other: the places of the two lists, from 0.

        Returns:
          int64 [texts of `one`].
        """
        longest_T = np.zeros(sum(self._sizes), np.int64)
        own_M, others = (
            np.flatnonzero(self._list_N[self._order_N] == place) for place in (one, other)
        )
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
