"""How many words in a row written texts have in common with clients' own.

The numbers are exact counts of private data: PRIVATE in a deployment, they serve in a simulation.
Common phrases repeat, too, so they say something beside those of a model that saw no client only.
"""

from collections.abc import Sequence

import numpy as np


def longest_repeats(texts: Sequence[str], originals: Sequence[str]) -> np.ndarray:
    """The most words in a row of each text that one of the originals has, too; int64 [texts].

    Words are parted by white space, without regard to case. Each n takes time and memory linear in
    the words of the texts that repeat n - 1, and time linear in those of the originals.
    """
    written = [text.lower().split() for text in texts]
    clients = [text.lower().split() for text in originals]
    longest, repeating, n = np.zeros(len(texts), np.int64), set(range(len(texts))), 0
    while repeating:
        n += 1
        where: dict[tuple[str, ...], set[int]] = {}
        for index in repeating:
            for run in _runs(written[index], n):
                where.setdefault(run, set()).add(index)
        common = {run for words in clients for run in _runs(words, n) if run in where}
        repeating = set().union(*(where[run] for run in common))
        longest[list(repeating)] = n
    return longest


def _runs(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
