"""What does not fit is refused: each call in one sentence with these words, and without a value."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.models import PAD
from jaxpfl.models.decoder import lora
from jaxpfl.text import Vocabulary, oov_rates, sample_tokens, unigram_baseline
from jaxpfl.text.character.words import encode_words
from jaxpfl.text.columns import text_column
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import embed, embedder
from jaxpfl.text.embed.hashed import HashedNgrams
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.few_shot import POPRI, FewShot
from jaxpfl.text.generation.language_model import LanguageModel, prompt_ids
from jaxpfl.text.generation.sampling import sample
from jaxpfl.text.preference.groups import Groups, groups_of
from jaxpfl.text.preference.losses import log_probabilities
from jaxpfl.text.preference.optimisation import PreferenceSettings, tune
from jaxpfl.text.tokenisers.base import check_fits
from tests.text.embed.test_base import CLIENTS, Lengths
from tests.text.generation import test_sentences as recurrent
from tests.text.generation.test_language_model import BYTES, SMALL, Few, generated
from tests.text.generation.test_sampling import GPT2, PROMPTS, Ids, key
from tests.text.preference.test_optimisation import _groups, _model, _pairs

NUMBERS = from_clients({"ada": {"x": np.zeros(2, np.float32)}}, name="here")
ROW = np.array([[1, 2]], np.int32)


@dataclass
class Endless(Few):
    end_of_text: int | None = None


def sampled(prompts: Any = PROMPTS, **changed: Any) -> Any:
    prompts = np.asarray(prompts, np.int32)
    return sample(GPT2, {}, prompts, key(), **{"decoding": Decoding(5), **changed})


def tuned(groups: Groups | None = None, *settings: Any, bare: bool = False, **more: Any) -> Any:
    model, params = lora.detach(*_model()) if bare else _model()
    return tune(model, params, groups or _pairs(), *settings, seed=0, **more)


def mesh_of(name: str) -> Mesh:
    return jax.make_mesh((2,), (name,), axis_types=(AxisType.Auto,))


REFUSED: list[tuple[Callable[[], object], str]] = [
    # TRUST 7: a missing column is named before anything runs.
    (lambda: text_column(NUMBERS), "'here' must have a column 'text', found columns 'x'"),
    (lambda: text_column(NUMBERS, "x"), "'here' must have a column 'x' .* found float32"),
    (lambda: Vocabulary.from_public(NUMBERS, 6), "column 'text'"),
    (lambda: Cut.parse("sentences").population(NUMBERS), "column 'text'"),
    (lambda: embed(NUMBERS, Lengths()), "must have a column 'text', found columns 'x'"),
    (lambda: embed(from_clients({"a": {"text": [1]}}), Lengths()), "a column 'text' of text"),
    (
        lambda: embed(from_clients(CLIENTS), Lengths(width=3)),
        r"returned shape \(6, 3\), expected \(6, 2\)",
    ),
    # TRUST 10: the nearest name of an embedder.
    (lambda: embedder("hashd"), "did you mean 'hashed'?"),
    (lambda: embedder("minilm6"), "did you mean 'minilm'?"),
    (lambda: embedder("sentence-transformer:x"), "did you mean 'sentence-transformers'?"),
    (lambda: embedder("encoder"), "expected hashed, hashed:DIMENSION"),
    *(
        (lambda name=name: embedder(name), "unknown embedder")
        for name in ("encoder:", "hashed:", "")
    ),
    (lambda: embedder("hashed:many"), "must be a whole number"),
    (lambda: embedder("hashed:0"), "at least 1"),
    (lambda: embedder(None), "found NoneType"),
    (lambda: HashedNgrams(8)(["secret", 7]), "text 1 must be a string, found int"),
    (lambda: HashedNgrams(8)("secret"), "found one string"),
    *(
        (lambda wrong=wrong: HashedNgrams(wrong), "dimension must be")
        for wrong in (0, 2.0, True, "8")
    ),
    (lambda: encode_words(["fine", ""], 4), "a word is empty"),
    *(
        (lambda word=word: encode_words(["fine", word], 4), "a word holds a control character, exp")
        for word in ("a\0b", "a\x1fb", "\n")
    ),
    (lambda: BYTES.encode("abc"), "a list of texts"),
    (lambda: BYTES.decode([257]), r"0 \.\. 256, found 257"),
    (lambda: check_fits(BYTES, 256), "utf8-bytes has token ids up to 256.*vocab_size is 256"),
    *(
        (lambda rule=rule: Cut.parse(rule), f"with N above 0, found '{rule}'")
        for rule in ("", "words", "words:0", "words:-1", "words:2.5", "words:", "messages:3", "w:3")
    ),
    (lambda: Cut.without_model("tokens:8"), "downstream model, found 'tokens:8'"),
    *(
        (lambda size=size: Vocabulary.from_texts(["a"], size, source="here"), "size")
        for size in (4, 0, 10.0, True)
    ),
    (lambda: POPRI.prompts(["a", "b"], 1, seed=0, round=0), "3 different samples, found 2"),
    (lambda: FewShot(heading="{name}"), "may hold {number} and no other field"),
    (lambda: FewShot(shots=0), "shots must be at least 1"),
    (lambda: Decoding(max_new_tokens=0), "max_new_tokens"),
    (lambda: Decoding(temperature=-1), "temperature"),
    (lambda: Decoding(temperature=float("nan")), "temperature"),
    (lambda: Decoding(top_p=0), "top_p"),
    (lambda: Decoding(top_p=1.5), "top_p"),
    (lambda: Decoding(stop=("",)), r"stop\[0\]"),
    *(
        (lambda bad=bad: Decoding(5, stop=bad), "stop")
        for bad in (["a", "\ufffd"], ["\ud800"], [1], "stop")
    ),
    (lambda: sampled([[1, 2], [PAD, PAD]]), "prompt 1 must have 1 to 60 tokens, .* found 0"),
    (lambda: sampled([[1] * 61]), "prompt 0 .* with which 5 new ones fit, found 61"),
    (lambda: sampled(responses=0), "responses"),
    (lambda: sampled(decoding=Decoding(5, stop=("a",))), "stop .* tokeniser"),
    (lambda: sampled(tokeniser=Ids(38)), "ids up to 37.*vocab_size is 37"),
    (lambda: LanguageModel(SMALL, {}, BYTES), "utf8-bytes .* 256.* 9"),
    (lambda: generated(mesh=mesh_of("model")), "the mesh must have an axis 'data'"),
    (lambda: prompt_ids(Endless(), ["a", ""]), "prompt 1 is empty"),
    *(
        (
            lambda wrong=wrong: sample_tokens(
                recurrent.MODEL, {}, recurrent.KEY, [0], temperature=wrong
            ),
            "temperature",
        )
        for wrong in (0, -1.0, float("nan"), "1")
    ),
    *(
        (
            lambda train=train, other=other: unigram_baseline(
                np.array(train), np.array(other), vocab_size=10
            ),
            "tokens",
        )
        for train, other in (
            ([[0.0, 0.0]], [[1, 1]]),
            ([[1, 10]], [[1, 2]]),
            ([[1, -2]], [[1, 2]]),
            ([[1, 2]], [[1, -1]]),
            ([1, 2], [[1, 2]]),
        )
    ),
    (lambda: oov_rates(np.zeros(3, np.int32)), "two-dimensional array of integers"),
    (lambda: oov_rates(np.zeros((2, 3))), "two-dimensional array of integers"),
    (lambda: groups_of([], []), "at least one group"),
    (
        lambda: groups_of([ROW[0]], [[ROW[0]]], prompt_tokens=4, total_tokens=4),
        "total_tokens must be above prompt_tokens",
    ),
    (
        lambda: log_probabilities(*_model(), Groups(ROW, np.ones((1, 2, 24), np.int32))),
        "group 0 has 26 tokens .* at most 24",
    ),
    (lambda: tuned(None, PreferenceSettings(loss="grpo")), "'grpo' needs .* advantages"),
    (lambda: tuned(_groups()), "'dpo' needs pairs, .* found 4"),
    (lambda: tuned(bare=True), "no adapters to tune"),
    (lambda: tuned(mesh=mesh_of("clients")), "axis 'data'"),
    (lambda: PreferenceSettings(tau=0.0), "tau must be positive"),
    (lambda: PreferenceSettings(loss="kto"), "loss must be one of 'dpo', 'ipo', 'grpo'"),
    (lambda: PreferenceSettings(clip_ratio=0.0), "clip_ratio must"),
    (lambda: PreferenceSettings(dtype="float16"), "dtype must be one of"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence_without_a_value(call, words):
    with pytest.raises(InputError, match=words) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message and "secret" not in message
    assert not re.search("[\0-\x1f]", message)
