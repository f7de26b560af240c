"""Words in a row that texts have in common, against a plain search for every run of words."""

import numpy as np

from jaxpfl.text.metrics.repeats import longest_repeats


def plain(text, originals):
    words = text.lower().split()
    runs = [words[i:j] for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    spaced = [f" {' '.join(each.lower().split())} " for each in originals]
    found = [len(run) for run in runs if any(f" {' '.join(run)} " in each for each in spaced)]
    return max(found, default=0)


def test_the_longest_run_is_that_of_a_plain_search():
    rng = np.random.default_rng(0)
    made = [" ".join(rng.choice(list("abC"), rng.integers(0, 9))) for _ in range(60)]
    texts, originals = made[:30], made[30:]
    found = longest_repeats(texts, originals)
    assert found.tolist() == [plain(text, originals) for text in texts]
    assert found.max() > 3


def test_a_run_lies_in_one_text_and_is_of_whole_words():
    originals = ["my code is 4711 said Ann", "Bob left", ""]
    texts = ["MY code is\n4711", "said Ann Bob left", "code is 471", "", "other words"]
    assert longest_repeats(texts, originals).tolist() == [4, 2, 2, 0, 0]
    assert longest_repeats(texts, []).tolist() == [0] * 5
    assert longest_repeats([], originals).tolist() == []
