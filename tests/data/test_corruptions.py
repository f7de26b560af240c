"""The planted bugs: who is struck, what happens to them, and what stays."""

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.data import Population, from_clients
from jaxpfl.data.columns import WORD_SEPARATOR
from jaxpfl.data.corruptions import concatenate_first_words, invert_pixels, replace_texts
from jaxpfl.errors import InputError
from tests.data.populations import SECRET

WRONG = [-0.1, 1.1, float("nan"), "0.5", True, None]


def writers(clients: int, dtype=np.uint8) -> Population:
    """Client k holds k % 3 images."""
    rng = np.random.default_rng(0)
    sizes = np.arange(clients) % 3
    images = rng.integers(0, 256, (sizes.sum(), 4, 5, 1))
    images = images.astype(np.uint8) if dtype == np.uint8 else (images / 255).astype(dtype)
    return Population(
        {"image": images, "label": np.arange(len(images), dtype=np.int32)},
        np.concatenate([[0], np.cumsum(sizes)]),
        [f"writer {k}" for k in range(clients)],
    )


def speakers(clients: int, sentences: int = 5) -> Population:
    return from_clients(
        {
            f"speaker {k}": {"words": [f"i{WORD_SEPARATOR}have{WORD_SEPARATOR}a"] * sentences}
            for k in range(clients)
        }
    )


def inverted(population: Population, probability: float, seed: int) -> np.ndarray:
    """Which images change, bool [images]."""
    after = invert_pixels(population, probability, seed).columns["image"]
    return np.any(after != population.columns["image"], axis=(1, 2, 3))


def joined(population: Population, probability: float, seed: int) -> np.ndarray:
    """Which sentences change, bool [sentences]."""
    after = concatenate_first_words(population, probability, seed).columns["words"]
    return np.array([" " in words for words in after.to_pylist()])


@pytest.mark.parametrize(("dtype", "white"), [(np.uint8, 255), (np.float32, 1), (np.float64, 1)])
def test_all_images_of_a_struck_client_are_inverted_and_no_others(dtype, white):
    population = writers(60, dtype)
    corrupted = invert_pixels(population, 0.5, seed=3)
    assert corrupted.columns["image"].dtype == dtype
    struck = 0
    for client in range(60):
        before, after = population.examples(client), corrupted.examples(client)
        changed = bool(np.any(before["image"] != after["image"]))
        struck += changed
        expected = white - before["image"] if changed else before["image"]
        np.testing.assert_array_equal(after["image"], expected.astype(dtype), strict=True)
        np.testing.assert_array_equal(after["label"], before["label"], strict=True)
    assert 0 < struck < 40
    assert corrupted.fingerprint == population.fingerprint
    assert corrupted.client_ids.equals(population.client_ids)


def test_nobody_at_0_and_everybody_at_1_and_more_as_it_rises():
    # Of three clients, the last has two images.
    population = writers(3_000)
    at = {p: inverted(population, p, seed=1)[1::3] for p in (0, 0.25, 0.5, 1.0)}
    assert not at[0].any() and at[1.0].all()
    assert np.all(at[0.5] | ~at[0.25])
    # Binomial: five standard deviations.
    assert abs(at[0.25].sum() - 250) < 5 * (1_000 * 0.25 * 0.75) ** 0.5
    other = inverted(population, 0.5, seed=2)[1::3]
    assert abs(np.mean(other == at[0.5]) - 0.5) < 0.08, "another seed strikes others"


def test_draws_of_clients_do_not_move_when_others_come_or_go():
    population = writers(200)
    # Every third client has one image.
    part = population.select(np.arange(1, 200, 3)[::-1])
    expected = inverted(population, 0.5, seed=1)[0::3][::-1]
    np.testing.assert_array_equal(inverted(part, 0.5, seed=1), expected)
    draws = joined(speakers(50), 0.5, seed=1).reshape(50, 5)
    found = joined(speakers(50).select([40, 7]), 0.5, seed=1).reshape(2, 5)
    np.testing.assert_array_equal(found, draws[[40, 7]])
    longer = joined(speakers(50, 6), 0.5, seed=1).reshape(50, 6)
    np.testing.assert_array_equal(longer[:, :5], draws)


def test_the_first_two_words_of_a_share_of_the_sentences_become_one():
    population = speakers(2_000)
    corrupted = concatenate_first_words(population, 0.1, seed=0)
    struck = joined(population, 0.1, seed=0)
    separate, together = f"i{WORD_SEPARATOR}have{WORD_SEPARATOR}a", f"i have{WORD_SEPARATOR}a"
    assert corrupted.columns["words"].to_pylist() == [together if s else separate for s in struck]
    assert abs(struck.sum() - 1_000) < 5 * (10_000 * 0.1 * 0.9) ** 0.5
    # Sentences are struck one by one, not client by client: the spread of binomial counts.
    counts = struck.reshape(2_000, 5).sum(1)
    assert abs(counts.var() - 5 * 0.1 * 0.9) < 0.1
    assert corrupted.fingerprint == population.fingerprint


def test_sentences_of_fewer_than_two_words_stay():
    sentences = ["", "hello", f"a{WORD_SEPARATOR}b", f"é{WORD_SEPARATOR}👩{WORD_SEPARATOR}c"]
    population = from_clients({"a": {"words": sentences}, "b": {"words": []}})
    for source in (population, population.select([1, 0])):
        held = concatenate_first_words(source, 1.0, seed=0).columns["words"]
        assert held.type == pa.large_string()
        assert held.to_pylist() == ["", "hello", "a b", f"é 👩{WORD_SEPARATOR}c"]
    same = concatenate_first_words(population, 0.0, seed=0).columns["words"]
    assert same.to_pylist() == sentences


def test_what_does_not_fit_is_refused_without_telling_a_value():
    """TRUST 7, 9"""
    for strike, population in ((invert_pixels, writers(3)), (concatenate_first_words, speakers(3))):
        for wrong in WRONG:
            with pytest.raises(InputError, match="probability must"):
                strike(population, wrong, seed=0)
    population = from_clients({"a": {"text": [SECRET], "image": np.full((1, 2, 2), 3.5)}})
    tall = population.with_columns({"image": np.full((1, 2, 2, 1), 3.5)})
    whole = population.with_columns({"image": np.full((1, 2, 2, 1), 3)})
    for strike, source, message in [
        (concatenate_first_words, population, "text column 'words'.*text: text, image"),
        (concatenate_first_words, population.with_columns({"words": [1]}), "text column 'words'"),
        (invert_pixels, population, r"uint8 or float images .* float64\[2, 2\]"),
        (invert_pixels, population.with_columns({"image": [SECRET]}), "found image: text"),
        (invert_pixels, whole, r"found image: int64\[2, 2, 1\]"),
        (invert_pixels, population.with_columns({"x": [1]}), "needs a column 'image'.* x"),
        (invert_pixels, tall, "in 0 .. 1"),
    ]:
        with pytest.raises(InputError, match=message) as raised:
            strike(source, 0.5, seed=0)
        assert SECRET not in str(raised.value) and "3.5" not in str(raised.value)
    with pytest.raises(InputError, match="seed must"):
        invert_pixels(writers(3), 0.5, seed=-1)


def test_of_a_struck_client_only_the_given_images_are_inverted():
    population = writers(60)
    among = population.columns["label"] % 2 == 0
    after = invert_pixels(population, 0.5, 3, among).columns["image"]
    changed = np.any(after != population.columns["image"], axis=(1, 2, 3))
    np.testing.assert_array_equal(changed, inverted(population, 0.5, 3) & among)
    with pytest.raises(InputError, match="among must be one boolean for each example"):
        invert_pixels(population, 0.5, 3, among[1:])


def test_all_texts_of_a_struck_client_are_replaced_and_it_depends_on_nobody_else():
    population = from_clients({f"c{k}": {"text": [f"own {k}"] * 20} for k in range(200)})
    planted = [f"planted {i}" for i in range(50)]

    def after(clients: Population, share: float) -> list[list[str]]:
        texts = replace_texts(clients, planted, share, seed=1).columns["text"].to_pylist()
        return [texts[i : i + 20] for i in range(0, len(texts), 20)]

    mixed = after(population, 0.3)
    struck = [texts[0].startswith("planted") for texts in mixed]
    for client, texts in enumerate(mixed):
        assert (
            all(text in planted for text in texts)
            if struck[client]
            else set(texts) == {f"own {client}"}
        )
    # Binomial: five standard deviations.
    assert abs(sum(struck) - 60) < 5 * (200 * 0.3 * 0.7) ** 0.5
    assert len({text for texts in mixed for text in texts if text in planted}) > 40
    assert after(population.select([7]), 0.3) == [mixed[7]]
    more = after(population, 0.6)
    assert all(more[k] == mixed[k] for k in range(200) if struck[k])
    assert replace_texts(population, planted, 0.0, 1).columns["text"] == population.columns["text"]
