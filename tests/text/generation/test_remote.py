"""A model behind an address: what is asked, and what becomes of answers of every kind."""

import time

import jax
import pytest

from jaxpfl.errors import InputError
from jaxpfl.text.generation import remote
from jaxpfl.text.generation.decoding import Decoding
from tests.loopback import completions
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

KEY = "secret-key-7"


def written(api, prompts=("a",), **settings):
    model = remote.RemoteModel(api, "far", UTF8Bytes())
    return model.write(prompts, jax.random.key(1), decoding=Decoding(**settings))


def test_each_prompt_is_asked_once_by_what_the_settings_say(monkeypatch):
    """At most 16 at once; texts are in the order of the prompts, whichever came first."""
    monkeypatch.setenv(remote.API_KEY, f"{KEY[:5]}\n{KEY[5:]}")
    running, most = [], []

    def answer(body, number):
        running.append(number)
        most.append(len(running))
        time.sleep(0.01 * (number % 3))
        running.remove(number)
        return 200, body["prompt"] * 2

    prompts = [str(i) for i in range(40)]
    with completions(answer) as (api, asked):
        found = written(f"{api}/", ["", *prompts], max_new_tokens=9, top_p=0.5, stop=("\n",))
    assert found.texts == [[""], *([prompt * 2] for prompt in prompts)]
    assert found.ended_PxJ.tolist() == [[False], *[[True]] * 40]
    assert 1 < max(most) <= 16
    settings = {"model": "far", "max_tokens": 9, "temperature": 1.0, "top_p": 0.5, "stop": ["\n"]}
    for path, key, body in asked:
        assert (path, key) == ("/v1/completions", f"Bearer {KEY}")
        assert body == settings | {name: body[name] for name in ("prompt", "seed")}
    assert sorted(body["prompt"] for *_, body in asked) == sorted(prompts)
    assert len({body["seed"] for *_, body in asked}) == 40


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([(429, {}), (500, b"busy"), (200, None), (200, "b")], None),
        ([(503, {"error": "Loading model"})] * 6, "found status 503: .*Loading model"),
        ([(200, None)] * 6, "IncompleteRead"),
        ([(200, b"<html>")], "must answer with JSON .* 'far', found status 200: '<html>'"),
        ([(200, {"choices": [{"text": None}]})], "one text in .*0..text"),
        ([(401, {"error": f"wrong key {KEY}"})], "found status 401: .*wrong key [*]{3}"),
    ],
)
def test_what_may_pass_is_tried_again_and_the_rest_is_a_sentence(monkeypatch, answers, message):
    monkeypatch.setenv(remote.API_KEY, KEY)
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,) * 5)
    with completions(lambda _, number: answers[number - 1]) as (api, asked):
        if message is None:
            assert written(api).texts == [["b"]]
        else:
            with pytest.raises(InputError, match=message) as caught:
                written(api)
            assert f"{api}/completions" in str(caught.value) and KEY not in str(caught.value)
    assert len(asked) == len(answers)
    with pytest.raises(InputError, match="ConnectionRefusedError"):
        written(api)
    monkeypatch.setenv(remote.API_KEY, f"{KEY}\u20ac")
    with pytest.raises(InputError, match="characters in JAXPFL_API_KEY .* cannot send$"):
        written(api)


def test_a_refused_prompt_is_counted_and_a_refused_caller_is_a_sentence(monkeypatch):
    """A key that no longer holds, or a server that is gone, ends a call whatever came before."""
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,) * 5)
    odd = [(400, {}), (422, {}), (500, b""), (200, b"no JSON"), (200, {"choices": []})]
    odd += [(200, {"choices": [{"text": "\ud83d"}]}), (200, b"x" * (1 << 22))]
    for refusal in odd:
        answer = {"a": (200, "text"), "b": refusal}
        with completions(lambda body, _, answer=answer: answer[body["prompt"]]) as (api, _):
            found = written(api, ["a", "", "b"])
        assert (found.texts, found.refused) == ([["text"], [""], [""]], 1)
    for refusal in [(401, {}), (403, {}), (404, {}), (503, {}), (302, {})]:
        answer = {"a": (200, "text"), "b": refusal}
        with (
            completions(lambda body, _, answer=answer: answer[body["prompt"]]) as (api, _),
            pytest.raises(InputError, match=f"found status {refusal[0]}") as caught,
        ):
            written(api, ["a", "b"])
        assert not isinstance(caught.value, remote.Refused)
