"""POPri's responses: how they are cut and end, and the pairs and the corpus made of them."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxpfl.algorithms import PopriSettings
from jaxpfl.algorithms.popri import groups_by_score, respond, synthesise
from jaxpfl.text.cut import Cut
from jaxpfl.text.generation.few_shot import POPRI, FewShot
from jaxpfl.text.generation.language_model import Generated, Writer, prompt_ids
from jaxpfl.text.preference.groups import last_tokens
from jaxpfl.text.preference.optimisation import PreferenceSettings
from jaxpfl.text.tokenisers.base import Tokeniser
from tests.algorithms.popri_parts import FAR, NEAR, SETTINGS
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

LINES = FewShot(head="", heading="", after="\n", stop="\n")


def test_pairs_that_would_teach_nothing_are_left_out(generator):
    settings = PopriSettings(prompts=4, responses=3, rejected_rank=2, prompt_tokens=8)
    texts = np.array([["a", "b", "c"], ["a", "a", "c"], ["", "b", "c"], ["a", "", "c"]])
    scores = np.array([[3.0, 2, 1]] * 4)
    ended = np.ones(texts.shape, bool)
    pairs = groups_by_score(generator, list("wxyz"), texts, ended, scores, settings)
    # An empty response is no candidate: of the third and fourth prompt, the other two are a pair.
    assert pairs.prompt_NxP[:, 0].tolist() == [ord("w"), ord("y"), ord("z")]
    assert pairs.responses_NxGxT[0, :, 0].tolist() == [ord("a"), ord("b")]
    alike = np.array([["a", "a", "c"], ["", "", "c"], ["", "b", ""]])
    rest = (alike, ended[1:], scores[1:])
    assert groups_by_score(generator, list("xyz"), *rest, settings) is None


def test_a_response_of_too_few_words_is_no_candidate(generator):
    settings = PopriSettings(
        prompts=4, responses=3, rejected_rank=2, prompt_tokens=8, least_words=2
    )
    texts = np.array(
        [["a", "b b", "c c c"], ["a", "a", "c c"], ["a a", "b", "c c"], ["", "a", "b"]]
    )
    scores, ended = np.array([[3.0, 2, 1]] * 4), np.ones(texts.shape, bool)
    pairs = groups_by_score(generator, list("wxyz"), texts, ended, scores, settings)
    assert pairs.prompt_NxP[:, 0].tolist() == [ord("w"), ord("y")]
    written = [bytes(row[row >= 0].tolist()) for row in pairs.responses_NxGxT[:, 0]]
    assert [row.split(b"Original")[0].strip() for row in written] == [b"b b", b"a a"]


def test_grpo_takes_all_candidates_and_nothing_else(generator):
    settings = PopriSettings(
        prompts=3,
        responses=4,
        prompt_tokens=8,
        least_words=0,
        format=LINES,
        preference=PreferenceSettings(loss="grpo"),
    )
    texts = np.array([["a", "", "b b", "c"], ["a", "a", "a", "a"], ["", "", "a", ""]])
    scores = np.array([[1.0, 90, 2, 6], [1, 1, 1, 1], [3, 2, 1, 0]])
    ended = np.ones(texts.shape, bool)
    ended[0, 3] = False
    groups = groups_by_score(generator, list("xyz"), texts, ended, scores, settings)
    assert groups.prompt_NxP.tolist() == [[ord("x")]]
    rows = [bytes(row[row >= 0].tolist()) for row in groups.responses_NxGxT[0]]
    assert rows == [b"a\n", b"", b"b b\n", b"c"]
    expected = np.array([-2, 0, -1, 3]) / 7**0.5
    np.testing.assert_allclose(groups.advantage_NxG, [expected], rtol=1e-6)
    rest = texts[1:], ended[1:], scores[1:]
    assert groups_by_score(generator, list("yz"), *rest, settings) is None


class Pieces(Tokeniser):
    """Longest pieces first, one of them a line's last letter with its end."""

    name, vocab_size, end_of_text, ends, start = "pieces", 6, 5, (5,), None
    pieces = ("a", "b", "\n", "x", "b\n", "")

    def encode(self, texts):
        found = []
        for text in texts:
            row = []
            while text:
                piece = max((p for p in self.pieces if p and text.startswith(p)), key=len)
                row.append(self.pieces.index(piece))
                text = text[len(piece) :]
            found.append(np.array(row, np.int32))
        return found


def response_ids(generator, format, prompt="x", texts=("abc", "ab"), ended=(True, True), **changed):
    """The ids of rejected and chosen, the second text being the best."""
    settings = PopriSettings(
        **{"responses": 2, "rejected_rank": 2, "prompt_tokens": 8, "response_tokens": 3} | changed,
        format=format,
    )
    scores, held = np.array([[0.0, 1.0]]), np.array([list(texts)])
    pairs = groups_by_score(generator, [prompt], held, np.array([ended]), scores, settings)
    return [[i for i in row.tolist() if i >= 0] for row in pairs.responses_NxGxT[0, ::-1]]


def test_responses_end_as_they_ended_when_they_were_written(generator):
    """End-of-text only where nothing else ends them, and the stop string where it does."""
    free = FewShot(shots=1, head="", heading="", after=" ", stop="")
    for format, end in ((free, 256), (LINES, ord("\n"))):
        rejected, chosen = response_ids(generator, format, ended=(False, True), response_tokens=4)
        assert chosen == [ord("a"), ord("b"), end]
        # This one was cut, though it has fewer tokens than it may have.
        assert rejected == [ord(c) for c in "abc"]
        rejected, chosen = response_ids(generator, format, ended=(True, False), response_tokens=4)
        assert (rejected, chosen) == ([*b"abc", end], [*b"ab"])


def test_the_end_of_a_response_is_what_a_prompt_has_there(generator):
    """Everything to the end of the stop string: the space before it, but not the number after."""
    room = {"prompt_tokens": 40, "response_tokens": 64}
    for format, expected in (
        (POPRI, "ab\n\nOriginal Text Sample"),
        # A stop string that no prompt holds is what the model wrote by itself.
        (FewShot(heading="{number}:", after=" ", stop="END"), "abEND"),
        (FewShot(heading="{number}:", after=" ", stop="5:"), "ab 5:"),
    ):
        rejected, chosen = response_ids(generator, format, **room)
        assert bytes(chosen).decode() == expected
        assert bytes(rejected).decode() == expected.replace("ab", "abc")


def test_an_end_that_does_not_fit_beside_the_prompt_is_left_out(generator):
    """A heading of 22 bytes: with the prompt's 8 and the text's 2 it takes 32 of the tokens."""
    whole = "ab\n\nOriginal Text Sample"
    for tokens, expected in ((24, whole), (23, "ab")):
        sizes = {"prompt_tokens": 8, "response_tokens": tokens}
        _, chosen = response_ids(generator, POPRI, prompt="x" * 9, **sizes)
        assert bytes(chosen).decode() == expected
    # A short prompt leaves room.
    _, chosen = response_ids(generator, POPRI, prompt="x" * 7, prompt_tokens=8, response_tokens=23)
    assert bytes(chosen).decode() == whole


def test_the_end_is_tokenised_with_the_text(generator):
    """A model writes "b" and the line's end as one token: token ids made by hand."""
    other = SimpleNamespace(tokeniser=Pieces())
    texts = {"texts": ("aab", "ba"), "response_tokens": 4}
    rejected, chosen = response_ids(other, LINES, **texts)
    assert rejected == [0, 0, 4]
    assert chosen == [1, 0, 2]


class Raw(Writer):
    """Stands in for a model: it writes the responses that it is given."""

    tokeniser = UTF8Bytes()

    def __init__(self, texts, ended=None):
        self.texts, self.asked = texts, {}
        self.ended = [True] * len(texts) if ended is None else ended

    def write(self, prompts, key, *, decoding, responses=1, progress=False):
        self.asked = {"prompts": prompts, "decoding": decoding, "responses": responses}
        ended = np.array([self.ended[:responses] for _ in prompts])
        return Generated([self.texts[:responses] for _ in prompts], ended)


def test_responses_are_cut_at_the_next_heading_and_at_the_tokens_kept(generator):
    raw = Raw(["abc\n\nOriginal Text Sample 5\nxyz", f"  {'d' * 70} e", "Original Text Sample"])
    settings = PopriSettings(prompts=1, responses=3, rejected_rank=2, response_tokens=64)
    texts, ended = respond(raw, ["p", "q"], settings, jax.random.key(0))
    assert texts == [["abc", "d" * 64, ""]] * 2
    # What was cut to the tokens kept did not end there.
    assert ended.tolist() == [[True, False, True]] * 2
    raw.ended = [False, True, False]
    assert respond(raw, ["p"], settings, jax.random.key(0))[1].tolist() == [[False] * 3]
    sampling = raw.asked["decoding"]
    assert (sampling.max_new_tokens, sampling.stop) == (85, ("Original Text Sample",))
    assert raw.asked["responses"] == 3
    # And of the model itself: at most so many tokens, nothing after the line's end.
    found, _ = respond(generator, ["ab ba ab\n"] * 8, SETTINGS, jax.random.key(0))
    texts = [text for row in found for text in row]
    assert all("\n" not in text and len(text) <= 8 for text in texts)
    assert len(set(texts)) > 3


def test_prompts_keep_their_last_tokens_and_never_grow(generator):
    cut = last_tokens(generator.tokeniser, ["abcdefgh", "abc", "", "€€€"], 5)
    # Three bytes a sign: of the first two signs two bytes are left, which are no text.
    assert cut == ["defgh", "abc", "", "€"]
    assert [len(row) for row in prompt_ids(generator.tokeniser, cut)] == [5, 3, 1, 3]

    class Growing(Tokeniser):
        """Two tokens a letter, the second of which says nothing, unless the text begins with S."""

        start = None

        def encode(self, texts):
            each = [[[ord(c)] if text[0] == "S" else [ord(c), 256] for c in text] for text in texts]
            return [np.array([i for ids in row for i in ids], np.int32) for row in each]

        def decode(self, ids):
            return "".join(chr(i) for i in ids if i < 256)

    # The last five letters alone would be ten tokens.
    assert last_tokens(Growing(), ["Sabcdefgh", "Sabc"], 5) == ["gh", "Sabc"]


def test_the_corpus_has_prompts_of_its_own_and_no_empty_texts(generator):
    found, _ = synthesise(generator, NEAR + FAR, 24, SETTINGS, seed=0)
    assert found == synthesise(generator, NEAR + FAR, 24, SETTINGS, seed=0)[0]
    assert found != synthesise(generator, NEAR + FAR, 24, SETTINGS, seed=1)[0]
    assert 0 < len(found) <= 24
    assert all(found)
    raw = Raw(["\n"])
    assert synthesise(raw, NEAR, 3, SETTINGS, seed=0) == ([], 0)
    rounds = [SETTINGS.format.prompts(NEAR, 3, seed=0, round=r) for r in (1, 2, 3)]
    assert raw.asked["prompts"] not in rounds


def test_responses_are_cut_as_clients_texts_are():
    """What was cut off did not end there; a text without a piece is empty."""
    raw = Raw(["One two. Three.", "One.", "--"])
    settings = PopriSettings(prompts=1, responses=3, rejected_rank=2)
    for rule, expected, whole in (
        ("messages", ["One two. Three.", "One.", "--"], [True, True, True]),
        ("sentences", ["One two.", "One.", ""], [False, True, False]),
        ("words:2", ["One two.", "One.", "--"], [False, True, True]),
    ):
        raw.cut = Cut.parse(rule)
        texts, ended = respond(raw, ["p"], settings, jax.random.key(0))
        assert (texts, ended.tolist()) == ([expected], [whole])
