"""Published texts beside training and held-out clients: an exact test, and its control."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.text.metrics.leakage import CONTROL, LENGTHS, LEVEL, leakage

WORDS = np.array([f"w{number}" for number in range(2_000)])


def made_up(seed, number, words=24):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, words)) for _ in range(number)]


def clients(texts, each=1):
    rows = [texts[at : at + each] for at in range(0, len(texts), each)]
    return from_clients({str(number): {"text": row} for number, row in enumerate(rows)})


def audited(texts, training, held_out):
    result = leakage({"texts": texts}, training, held_out)
    return {**result, **result["writers"]["texts"], "control": result["writers"][CONTROL]}


def test_the_clients_own_texts_fail_and_others_pass():
    texts = made_up(0, 300)
    sides = clients(texts[:100], 2), clients(texts[100:200], 2)
    result = leakage({"others": texts[200:], "own": texts[:40] + texts[200:]}, *sides)
    fails = {name: judged["fails"] for name, judged in result["writers"].items()}
    assert fails == {"others": False, "own": True, CONTROL: True}
    assert result["writers"]["own"]["by_words"]["training"][24] == 40
    assert result["verdict"] == "passes"
    assert audited(texts[:40] + texts[200:], *sides)["verdict"] == "fails"
    # Held-out clients' texts are no fault of the training.
    assert audited(texts[100:200], *sides)["verdict"] == "passes"


def test_few_copied_spans_among_many_texts_fail():
    texts = made_up(1, 1_400)
    spans = [" ".join(text.split()[5:15]) for text in texts[:12]]
    found = audited(texts[400:] + spans, clients(texts[:200]), clients(texts[200:400]))
    assert [test["fails"] for test in found["tests"]] == [True, True, False, False]
    assert found["tests"][1]["training"] == 12


def test_a_phrase_that_many_published_texts_repeat_fails_no_more_often_than_is_stated():
    """Of all splits of the clients: it counts clients, however often texts repeat them."""
    phrase = "the chair recognises the member from the north for two minutes"
    texts = [f"{text} {phrase}" if i < 6 else text for i, text in enumerate(made_up(2, 12))]
    published = [f"{text} {phrase}" for text in made_up(3, 50)]
    share = 0.0
    for say_it in range(7):
        # Two of the splits that have so many of the phrase's clients on the side of the training.
        first = {*range(say_it), *range(6, 12 - say_it)}
        for chosen in (first, {(5 if i < 6 else 17) - i for i in first}):
            sides = (clients([texts[i] for i in rows]) for rows in (chosen, {*range(12)} - chosen))
            share += math.comb(6, say_it) ** 2 / 924 / 2 * audited(published, *sides)["fails"]
    assert 0 < share <= LEVEL


def test_the_test_is_fishers_and_says_what_would_fail():
    texts = made_up(4, 220)
    found = audited(texts[:9] + texts[97:100], clients(texts[:97]), clients(texts[97:]))
    assert found["searched"] == 97 and found["clients"] == {"training": 97, "held_out": 97}
    for words, test in zip(LENGTHS, found["tests"], strict=True):
        assert test["words"] == words and test["training"] == 9

        def p(training, held_out=test["held_out"]):
            table = [[training, held_out], [97 - training, 97 - held_out]]
            return stats.fisher_exact(table, alternative="greater").pvalue  # pyright: ignore[reportAttributeAccessIssue]

        assert test["p"] == pytest.approx(p(9), rel=1e-9)
        least = next(number for number in range(98) if p(number) < LEVEL / len(LENGTHS))
        assert test["fails_from"] == least and test["fails"] == (least <= 9)


def test_whole_clients_are_compared_with_as_many_texts():
    texts = made_up(5, 130)
    found = audited(texts[100:], clients(texts[:80], 8), clients(texts[80:100], 5))
    assert found["searched"] == 20 and found["clients"] == {"training": 3, "held_out": 4}
    for side in ("training", "held_out"):
        assert sum(found["by_words"][side]) == 30
        assert sum(found["control"]["by_words"][side]) == 30


def test_both_sides_are_cut_where_one_exceeds_the_most_bytes(monkeypatch):
    texts = made_up(8, 40)
    sides = clients([text.ljust(1_000) for text in texts[:20]]), clients(texts[20:])
    for most, searched in ((5_500, 5), (10, 1)):
        monkeypatch.setattr("jaxpfl.text.metrics.leakage._MOST_BYTES", most)
        for order in (sides, sides[::-1]):
            found = audited(texts, *order)
            assert found["searched"] == searched
            assert found["clients"] == {"training": searched, "held_out": searched}


def test_texts_too_short_to_tell_pass_as_a_control():
    texts = made_up(6, 60, words=3)
    found = audited(texts[40:], clients(texts[:20]), clients(texts[20:40]))
    assert not found["control"]["fails"] and found["verdict"] == "cannot tell"


def test_the_control_has_the_form_of_the_published_texts():
    """Long messages of clients say nothing of whether an audit of short texts can tell."""
    texts = made_up(7, 60)
    short = [" ".join(text.split()[:3]) for text in texts[40:]]
    found = audited(short, clients(texts[:20]), clients(texts[20:40]))
    assert len(found["control"]["by_words"]["training"]) == 4
    assert found["verdict"] == "cannot tell"


def test_a_side_without_texts_is_refused():
    with pytest.raises(InputError, match="texts of held_out"):
        audited(["a b"], clients(["a b"]), clients([""]).keeping(np.array([False])))
    with pytest.raises(InputError, match="texts of texts"):
        audited([], clients(["a b"]), clients(["a b"]))
