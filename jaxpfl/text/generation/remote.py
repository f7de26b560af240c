"""A language model behind an OpenAI-compatible address, such as a server of vLLM or llama.cpp.

THE SERVER'S OWNER SEES EVERY PROMPT and its time: a prompt may hold public text, and text that
follows from releases, alone. Private evolution sends public texts, and texts of the server that
noisy votes have selected. Clients' texts are embedded here and never sent.

A key for the server is read from the environment variable JAXPFL_API_KEY. It is sent to the address
alone, since redirects are not followed, and stands in no message and no file.
"""

import http.client
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.progress import track
from jaxpfl.text.cut import MESSAGES, Cut
from jaxpfl.text.generation import bounded_http
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import Generated, Writer
from jaxpfl.text.tokenisers.base import Tokeniser

API_KEY = "JAXPFL_API_KEY"

# Servers answer requests that come together as one batch, and queue the others.
_AT_ONCE, _SHOWN = 16, 200
# Statuses by which a server refuses one prompt, perhaps with a text that is none; by others, all.
_OF_PROMPT = (200, 400, 413, 422, 451, 500)
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
# Bytes and seconds of one answer, and seconds of all attempts at one text together.
_MOST_BYTES, _TIMEOUT_S, _DEADLINE_S = 1 << 22, 600.0, 1200.0


class Refused(InputError):
    """The server refused all prompts of a call."""


@dataclass(frozen=True)
class RemoteModel(Writer):
    """A model that writes texts and cannot be tuned; it reads prompts as they are.

    Attributes:
      api: the address before /completions.
      model: the server's name of the model.
      tokeniser: counts tokens here; it need not be the server's, which counts `max_new_tokens`.
    """

    api: str
    model: str
    tokeniser: Tokeniser = field(repr=False)
    cut: Cut = MESSAGES

    def write(
        self, prompts: Sequence[str], key: jax.Array, *, decoding: Decoding, progress: bool = False
    ) -> Generated:
        """Asks for one text for each prompt, by at most 16 requests at once.

        A seed follows from the key, but no server promises the same text for it. An empty prompt is
        not sent; its text is empty. No connection, an answer that takes ten minutes and status 429
        or 5xx are met by up to five further attempts within twenty minutes, which end in an
        `InputError`, as other statuses do at once. A prompt that is refused (status 400, 413, 422,
        451; 500 in all attempts; an answer of more than 4 MiB, or without a text) has an empty text
        and is counted; `Refused` is raised if all of them are.
        """
        seeds_P = np.asarray(jax.random.bits(key, (len(prompts),))) >> 1
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = pool.map(self._text, prompts, seeds_P.tolist(), [decoding] * len(prompts))
            counted = track(prompts, "asking the server", progress=progress)
            rows = [answer for _, answer in zip(counted, answers, strict=True)]
        refusals = [reason for *_, reason in rows if reason]
        if refusals and len(refusals) == sum(map(bool, prompts)):
            raise Refused(refusals[0])
        ended_Px1 = np.array([ended for _, ended, _ in rows], bool)[:, None]
        return Generated([[text] for text, *_ in rows], ended_Px1, len(refusals))

    def _text(self, prompt: str, seed: int, decoding: Decoding) -> tuple[str, bool, str]:
        """The text, whether it ended by itself, and why there is none: "" if there is one."""
        if not prompt:
            return "", False, ""
        # A newline is removed, because the standard library's message on it would show the key.
        secret = "".join(os.environ.get(API_KEY, "").split())
        outcome = f"characters in {API_KEY} or the address that HTTP cannot send"
        # One prompt and one text a request: servers answer several in different forms.
        request = {"model": self.model, "prompt": prompt, "max_tokens": decoding.max_new_tokens}
        request |= {"temperature": decoding.temperature, "top_p": decoding.top_p, "seed": seed}
        body = json.dumps(request | {"stop": list(decoding.stop) or None}).encode()
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {secret}"} if secret else {}
        status = 0
        url, deadline = f"{self.api.rstrip('/')}/completions", time.monotonic() + _DEADLINE_S
        for pause_s in (*_PAUSES_S, 0.0):
            seconds = min(_TIMEOUT_S, deadline - time.monotonic())
            if seconds <= 0:
                break
            limits: dict[str, Any] = {"most_bytes": _MOST_BYTES, "seconds": seconds}
            status = 0
            try:
                status, content = bounded_http.post(url, body, headers, **limits)
                outcome = f"status {status}: {_shown(content.decode('utf-8', 'replace'), secret)}"
                match files.parse_json(content) if status == 200 else None:
                    case {"choices": [{"text": str(text), **more}]}:
                        return text, more.get("finish_reason") == "stop", ""
                if status != 429 and status < 500:
                    break
            except bounded_http.TooLong:
                status, outcome = 200, f"more than {_MOST_BYTES} bytes"
                break
            except (OSError, http.client.HTTPException) as error:
                outcome = f"{type(error).__name__}: {_shown(str(error), secret)}"
            except ValueError:
                break  # no JSON, or nothing was sent
            time.sleep(pause_s)
        problem = (
            f"generator.api: {self.api}/completions must answer with JSON that has one text in "
            f"choices[0].text for model {self.model!r}, found {outcome}"
        )
        if status not in _OF_PROMPT:
            raise InputError(problem)
        return "", False, problem


def _shown(text: str, secret: str) -> str:
    """A server's answer, quoted and cut, without the key, which it may repeat."""
    return repr(text.replace(secret or "\0", "***")[:_SHOWN])
