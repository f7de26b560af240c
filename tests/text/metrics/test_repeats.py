"""Words in a row that texts have in common, against a plain search for every run of words."""

import itertools

import numpy as np

from jaxpfl.text.metrics.leakage import CommonRuns


def plain(text, corpus):
    words = text.lower().split()
    runs = [words[i:j] for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    spaced = [f" {' '.join(each.lower().split())} " for each in corpus]
    found = [len(run) for run in runs if any(f" {' '.join(run)} " in each for each in spaced)]
    return max(found, default=0)


def test_the_longest_run_is_that_of_a_plain_search():
    rng = np.random.default_rng(0)
    made = [" ".join(rng.choice(list("abC"), rng.integers(0, 12))) for _ in range(160)]
    texts, corpora = made[:60], [made[60:90], made[90:92], [], made[92:]]
    lists = [texts, *corpora]
    runs = CommonRuns(lists)
    for one, other in itertools.permutations(range(len(lists)), 2):
        found = runs.longest(one, other).tolist()
        assert found == [plain(text, lists[other]) for text in lists[one]], (one, other)
    assert max(runs.longest(0, 4)) > 6


def test_a_whole_text_is_found_however_long_it_is():
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(list("ab"), number)) for number in (1, 2, 63, 64, 65, 1_000)]
    around = [f"before {text} after" for text in texts]
    assert CommonRuns([around, texts]).longest(1, 0).tolist() == [1, 2, 63, 64, 65, 1_000]


def test_a_run_lies_in_one_text_and_is_of_whole_words():
    corpus = ["my code is 4711 said Ann", "Bob left", ""]
    texts = ["MY code is\n4711", "said Ann Bob left", "code is 471", "", "other words"]
    assert CommonRuns([texts, corpus]).longest(0, 1).tolist() == [4, 2, 2, 0, 0]
    assert CommonRuns([texts, []]).longest(0, 1).tolist() == [0] * 5
    assert CommonRuns([[], corpus]).longest(0, 1).tolist() == []
