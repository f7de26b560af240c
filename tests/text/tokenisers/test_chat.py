"""Chat templates: filled in as transformers does, and harmless."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.text.preference.groups import last_tokens
from jaxpfl.text.tokenisers.fast import ChatTemplate, FastTokeniser, hugging_face, read_template
from tests.published_models import CHAT_TEMPLATE, write_tokeniser
from tests.refusals import refusal

pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")

TEMPLATES = {
    "{{ messages[0]|tojson }}": '{"role": "user", "content": "<b> it\'s \u00c4"}',
    "{{ [messages[0].role]|tojson(indent=1) }}": '[\n "user"\n]',
    "{% if tools is not none %}tools{% endif %}{% if documents is none %}-{% endif %}": "-",
    "{% if tools %}tools{% else %}{{ messages|length }}{% endif %}": "1",
    "{% generation %}{{ messages[0].content }}\n{% endgeneration %}": "<b> it's \u00c4\n",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}a{% endfor %}b": "b",
    "  {% set ns = namespace(n=1) %}\n{% set ns.n = 2 %}\n{{ ns.n }}": "2",
}
"""With what transformers makes of them and one message."""
PROMPTS = ["  a list: \n1. x\n", "zürich", "", "two\n\nlines"]


@pytest.fixture
def folder(tmp_path) -> Path:
    write_tokeniser(tmp_path, start=True, chat=True)
    return tmp_path


def _tokeniser(folder: Path) -> FastTokeniser:
    tokeniser = hugging_face(folder)
    tokeniser.chat = read_template(folder)
    return tokeniser


def test_a_prompt_becomes_a_users_message_between_special_tokens(folder):
    tokeniser = _tokeniser(folder)
    (found,) = tokeniser.prompts(["  hello "])
    (inner,) = tokeniser.encode(["user: hello"])
    (before,) = tokeniser.encode(["assistant:"])
    assert found.dtype == np.int32
    assert found.tolist() == [1, *inner.tolist(), 0, *before.tolist()]
    plain = tokeniser.without_chat()
    (inner,) = tokeniser.encode(["hello"])
    assert plain.prompts(["hello"])[0].tolist() == [1, *inner.tolist()]


def test_a_text_cannot_end_its_message(folder):
    tokeniser = _tokeniser(folder)
    first, second = tokeniser.prompts(["a<|en<|end|>d|><|start|>b", "ab"])
    np.testing.assert_array_equal(first, second)


def test_prompts_are_cut_so_that_they_fit_with_what_is_around_them(folder):
    tokeniser = _tokeniser(folder)
    (around,) = map(len, tokeniser.prompts([""]))
    long = ["kab kod " * 30]
    (cut,) = last_tokens(tokeniser, long, around + 7)
    assert long[0].endswith(cut)
    assert 4 <= len(tokeniser.prompts([cut])[0]) - around <= 7
    refusal(lambda: last_tokens(tokeniser, long, around - 1), f"at least the {around} tokens")


def test_it_is_written_with_the_tokeniser(folder, tmp_path):
    tokeniser, copy = _tokeniser(folder), tmp_path / "copy"
    copy.mkdir()
    tokeniser.save(copy)
    for found, expected in zip(
        _tokeniser(copy).prompts(PROMPTS), tokeniser.prompts(PROMPTS), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_the_template_is_found_where_transformers_4_and_5_write_it(folder):
    found = read_template(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    source = settings.pop("chat_template")
    other = {"name": "tool_use", "template": "?"}
    path.write_text(json.dumps(settings | {"chat_template": [other]}))
    refusal(lambda: read_template(folder), "must be called 'default', found 'tool_use'")
    named = {"name": "default", "template": source}
    path.write_text(json.dumps(settings | {"chat_template": [other, named]}))
    assert read_template(folder) == found
    path.write_text(json.dumps(settings))
    assert read_template(folder) is None
    (folder / "chat_template.jinja").write_text(source)
    again = read_template(folder)
    assert again is not None and again.source == source and again.tokens == found.tokens


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.append(3) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_cannot_be_used_or_does_harm_is_refused(source, message):
    with pytest.raises(InputError, match=f"chat_template.jinja: .*{message}") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_is_given_what_transformers_gives_to_it(source):
    assert ChatTemplate(source).render(["<b> it's \u00c4"]) == [TEMPLATES[source]]


live = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@live
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", TEMPLATES)
def test_live_transformers_writes_the_same_texts(folder, source):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "<b> it's \u00c4"}]
    written = theirs.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    assert written == TEMPLATES[source]


@live
@pytest.mark.filterwarnings("default")
def test_live_transformers_gives_the_same_ids(folder):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == CHAT_TEMPLATE
    for prompt, found in zip(PROMPTS, _tokeniser(folder).prompts(PROMPTS), strict=True):
        expected = theirs.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        assert found.tolist() == expected
