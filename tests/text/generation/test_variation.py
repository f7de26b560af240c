"""Variations of texts by public models: what is kept, what is drawn, and by which key."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import Generated, LanguageModel, Writer
from jaxpfl.text.generation.variation import Continue, MaskAndFill, Rephrase, mask_and_fill, redraw
from tests.published_models import SIZES
from tests.refusals import refusal
from tests.text.masked_models import TINY_BERT, masked_model_folder
from tests.text.tokenisers.utf8_bytes import UTF8Bytes
from tests.trees import drawn

# Beyond the bytes and their end: mask, first, last, and a row of no token.
MASK, FIRST, LAST, VOCAB = 257, 258, 259, 261
TEXTS = ["the quick brown fox jumps", "over", "", "a lazy dog, and a small cat sleeps on"]


@pytest.fixture(scope="module")
def masked():
    config = EncoderConfig("roberta", vocab_size=VOCAB, positions=80, pad=260, **SIZES)
    model = Encoder(config, head=True)
    return model, drawn(model, 0)


def fill(masked, **settings):
    model, params = masked
    shared = {"mask_id": MASK, "first_id": FIRST, "last_id": LAST, "steps": 1}
    return MaskAndFill(model, params, UTF8Bytes(), **(shared | settings))


def places(old: str, new: str) -> np.ndarray:
    """Which characters differ; only of ASCII texts of one length."""
    assert len(old) == len(new)
    return np.array([a != b for a, b in zip(old, new, strict=True)])


class Shift:
    """Stands in for the network: predicts that every masked place is "#", surely."""

    vocab_size, config = VOCAB, EncoderConfig(positions=512)

    def __init__(self):
        self.given = []

    def hidden(self, params, tokens_BxL, mask_BxL):
        jax.debug.callback(lambda *found: self.given.append(found), tokens_BxL, mask_BxL)
        return tokens_BxL

    def logits(self, params, tokens_BxL):
        # Special ids are made the likeliest of all: they must be banned, not merely unlikely.
        logits_V = jnp.zeros(VOCAB).at[ord("#")].set(50.0).at[256:].set(200.0)
        return jnp.broadcast_to(logits_V, (*tokens_BxL.shape, VOCAB))


def test_only_masked_places_change_and_special_ids_are_never_drawn():
    """The rest of a text, its frame and its length stay; of 260 the likeliest ids are special."""
    stand_in = Shift()
    found = fill((stand_in, {}))(TEXTS, jax.random.key(0))
    jax.effects_barrier()
    ((tokens_BxL, real_BxL),) = stand_in.given
    # Shorter texts come first: the empty one is not read.
    for row, i in enumerate((1, 0, 3)):
        text, length = TEXTS[i], len(TEXTS[i])
        changed = places(text, found[i])
        given = tokens_BxL[row]
        assert (given[0], given[length + 1]) == (FIRST, LAST)
        assert real_BxL[row].sum() == length + 2
        np.testing.assert_array_equal(given[1 : length + 1] == MASK, changed)
        assert {found[i][place] for place in np.flatnonzero(changed)} == {"#"}
        assert 1 <= changed.sum() < length
    assert found[2] == ""


def test_how_many_places_are_masked():
    found = fill((Shift(), {}))(["x" * 60] * 64, jax.random.key(3))
    changed = np.mean([places("x" * 60, new).mean() for new in found])
    # Of 3,840 places the standard deviation is below 0.008.
    assert changed == pytest.approx(0.3, abs=0.04)
    # At least one of each text.
    assert fill((Shift(), {}))(["a"] * 8, jax.random.key(0)) == ["#"] * 8


def test_masks_are_filled_twice_unless_said_otherwise(masked):
    """What is masked the second time is the text that the first time gave."""
    text, key = "x" * 60, jax.random.key(3)
    found = fill((Shift(), {}), steps=2)([text] * 64, key)
    changed = np.mean([places(text, new).mean() for new in found])
    # 1 - 0.7^2; of 3,840 places the standard deviation is below 0.008.
    assert changed == pytest.approx(0.51, abs=0.04)
    assert fill(masked, steps=2)(TEXTS, key) != fill(masked)(TEXTS, key)


def test_a_variation_follows_from_its_text_its_number_and_the_key(masked):
    """Other texts in the call change nothing of it, not even where they are longer."""
    vary = fill(masked)
    key = jax.random.key(5)
    found = vary(TEXTS, key)
    assert found == vary(TEXTS, key)
    assert found != vary(TEXTS, jax.random.key(6))
    others = [TEXTS[0], "b" * 60, "", *TEXTS[3:], *["c" * 20] * 40]
    again = vary(others, key)
    assert (again[0], again[3]) == (found[0], found[3])
    # The first five tokens count, and the same text twice has two variations.
    assert len(fill(masked, tokens=5)(["abcdefgh"], key)[0]) <= 5
    twice = vary([TEXTS[3]] * 2, key)
    assert twice[0] != twice[1]


def test_a_published_model_is_read_with_its_special_tokens(tmp_path):
    """The same as when all is given by hand, with the ids that the tokeniser's file has."""
    folder = masked_model_folder(tmp_path / "bert")
    vary = mask_and_fill(folder, tokens=12)
    ids = {"[CLS]": vary.first_id, "[SEP]": vary.last_id, "[MASK]": vary.mask_id}
    stored = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"]: token["id"] for token in stored}.items() >= ids.items()
    framed = (ids["[MASK]"], ids["[CLS]"], ids["[SEP]"])
    assert vary.steps == 2
    by_hand = MaskAndFill(vary.model, vary.params, vary.tokeniser, *framed, tokens=12)
    found = vary(TEXTS, jax.random.key(1))
    assert found == by_hand(TEXTS, jax.random.key(1))
    assert found[0] != TEXTS[0] and found[2] == ""
    # Many published models' settings do not name their mask token.
    for written in ("{}", '{"mask_token": {"content": "[MASK]"}}'):
        (folder / "tokenizer_config.json").write_text(written)
        assert mask_and_fill(folder).mask_id == ids["[MASK]"]


def test_a_model_that_is_no_masked_language_model_is_refused(tmp_path):
    folder = masked_model_folder(tmp_path / "bert")
    (folder / "tokenizer_config.json").write_text('{"mask_token": "<none>"}')
    refusal(lambda: mask_and_fill(folder), "has no mask token '<none>'")
    stored = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(stored | {"post_processor": None}))
    refusal(lambda: mask_and_fill(folder), "must put one token before a text, one after")
    for name, changes, message in (
        ("short", {"positions": 32}, "at most 32 tokens at a time, expected at least 96 for texts"),
        ("causal", {"causal": True}, "found a causal encoder"),
    ):
        with pytest.raises(InputError, match=message):
            mask_and_fill(masked_model_folder(tmp_path / name, **changes))
    for golden, message in (
        (TINY_BERT, "found an encoder without that head"),
        (TINY_BERT.parent / "transformers" / "gpt2", "found a decoder"),
    ):
        with pytest.raises(InputError, match=message):
            mask_and_fill(golden)


@pytest.fixture(scope="module")
def writer():
    model = Decoder(DecoderConfig("llama", vocab_size=257, positions=128, **SIZES))
    return LanguageModel(model, drawn(model, 0), UTF8Bytes())


def test_continue_keeps_the_beginning_and_the_length(writer):
    vary = Continue(writer, kept=0.5, tokens=16, decoding=Decoding(temperature=2.0))
    texts = ["abcdefghij", "z", "", "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmm"]
    found = vary(texts, jax.random.key(0))
    assert len(found) == len(texts)
    assert found[0].startswith("abcde")
    assert found[0] != texts[0]
    # The first 16 tokens count, of which half are kept.
    assert found[3].startswith("m" * 8)
    assert not found[3].startswith("m" * 16)
    assert all(len(row) <= 16 + 2 for row in writer.tokeniser.encode(found))
    assert found == vary(texts, jax.random.key(0))
    assert found != vary(texts, jax.random.key(1))


def test_redraw_replaces_three_of_ten_tokens_by_what_follows_those_before(writer):
    alphabet = "abcdefghij" * 6

    class Knows(Decoder):
        """The next letter of the alphabet, in capitals, follows each."""

        def hidden(self, params, tokens_BxL):
            return tokens_BxL

        def logits(self, params, tokens_BxL):
            letter = jnp.where(tokens_BxL == ord("j"), ord("a"), tokens_BxL + 1)
            return 200.0 * jax.nn.one_hot(letter - 32, self.vocab_size)

    knows = LanguageModel(Knows(writer.model.config), {}, writer.tokeniser)
    found = redraw(knows, steps=1)([alphabet] * 64, jax.random.key(0))
    # The first letter has no letter before it.
    assert {text[1:].lower() for text in found} == {alphabet[1:]}
    changed = np.mean([places(alphabet, text).mean() for text in found])
    assert changed == pytest.approx(0.3, abs=0.04)
    # A text that fits the model is not refused for the padding of its row.
    short = Decoder(dataclasses.replace(writer.model.config, positions=12))
    vary = redraw(LanguageModel(short, writer.params, writer.tokeniser), tokens=9)
    found = vary(TEXTS, jax.random.key(0))
    assert found[2] == "" and found[1] != TEXTS[1]
    assert found == vary(TEXTS, jax.random.key(0)) != vary(TEXTS, jax.random.key(1))


class Answers(Writer):
    """Writes what it was given in capitals, after the prompt's last line but one."""

    tokeniser = UTF8Bytes()

    def write(self, prompts, key, *, decoding):
        self.prompts, self.decoding = list(prompts), decoding
        answers = [prompt.split("Text: ")[1].split("\n")[0].upper() for prompt in prompts]
        return Generated([[f" {text} #"] for text in answers], np.ones((len(prompts), 1), bool))


def test_rephrase_asks_for_other_words_in_drawn_styles():
    writer = Answers()
    clean = lambda text: text.partition("#")[0].strip()  # noqa: E731
    vary = Rephrase(writer, tokens=9, decoding=Decoding(3, temperature=0.5), clean=clean)
    texts = ["hello", "", "a longer text than nine"] * 20
    found = vary(texts, jax.random.key(0))
    assert found == ["HELLO", "", "A LONGER"] * 20
    assert writer.decoding == Decoding(9, temperature=0.5)
    assert all(
        f"Text: {text}\n" in asked for text, asked in zip(texts, writer.prompts, strict=True)
    )
    styles = {style for style in vary.styles for asked in writer.prompts if style in asked}
    assert styles == set(vary.styles)
    first = writer.prompts
    vary(texts, jax.random.key(0))
    assert writer.prompts == first
    vary(texts, jax.random.key(1))
    assert writer.prompts != first


def test_a_variation_that_would_be_empty_is_the_text_itself():
    class Silent(Writer):
        tokeniser = UTF8Bytes()

        def write(self, prompts, key, *, decoding):
            self.prompts, self.decoding = list(prompts), decoding
            return Generated([[""] for _ in prompts], np.ones((len(prompts), 1), bool))

    silent = Silent()
    vary = Continue(silent, kept=0.4, tokens=8, decoding=Decoding(3, stop=("\n",)))
    # Of "€€" three bytes are kept of six at 0.5, and two, no whole letter, at 0.4.
    assert vary(["a", "hello", "€€"], jax.random.key(0)) == ["a", "he", "€€"]
    assert silent.prompts == ["", "he", ""]
    assert silent.decoding == Decoding(8, stop=("\n",))
