"""Jinja templates of strangers, filled in by a process whose time and memory are bounded.

A template is a program, and none that computes without end can be told from the others beforehand.
So it runs in Jinja's sandbox, in a process that takes no more memory than `BYTES` (on Linux) and
that the kernel ends once an answer has cost `SECONDS` of computing. This file is the program of
that process, too: its first line of input is the template as JSON, each other line an object of
variables; each line of output is an object with the "text", or, in the last line, with the "error".
"""

import contextlib
import datetime
import functools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.sandbox
from jinja2.ext import Extension, loopcontrols

from jaxpfl.errors import InputError, summary

SECONDS = 1.0
BYTES = 2**30
CHARACTERS = 2**24
"""The most that a template may write for one chat."""
NOW = datetime.datetime(2024, 7, 26)
"""What a template takes for the present, so that equal prompts stay equal on another day: the date
that Llama's templates have by default."""


def fill_in(source: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that a template writes, one for each set of variables (of JSON's types)."""
    lines = [json.dumps(value).encode() + b"\n" for value in (source, *variables)]
    with subprocess.Popen(
        # -P: Python does not look for modules in the program's own folder.
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # Ctrl-C in a terminal reaches this process alone.
        process_group=0,
    ) as child:
        try:
            written, _ = child.communicate(b"".join(lines))
        finally:
            # After an interrupt, too.
            child.kill()
            child.wait()
    # The part after the last line end is an answer that was cut off.
    answers = [json.loads(line) for line in written.split(b"\n")[:-1]]
    for answer in answers:
        if "error" in answer:
            raise InputError(answer["error"])
    if len(answers) < len(variables):
        if child.returncode == -signal.SIGPROF:
            raise InputError(f"it computes for more than {SECONDS:g} s")
        raise InputError(f"the process that fills it in ended with status {child.returncode}")
    return [answer["text"] for answer in answers]


def _answer_all() -> None:
    """The process: answers until the input ends, or an answer is an error."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    # macOS knows this limit, and refuses it.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, hard))
    source = json.loads(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        # The timer's signal ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer = _answer(source, json.loads(line))
        written = json.dumps(answer).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()
        if "error" in answer:
            break


def _answer(source: str, variables: dict[str, Any]) -> dict[str, str]:
    try:
        text = _template(source).render(variables)
    except MemoryError:
        return {"error": f"it takes more than {BYTES >> 20:,} MiB of memory"}
    # A template may call anything that it is given with wrong arguments.
    except Exception as error:
        return {"error": summary(error)[:1000]}
    if len(text) > CHARACTERS:
        return {"error": f"it writes more than {CHARACTERS:,} characters"}
    return {"text": text}


class _Generation(Extension):
    """The tag `generation` around what a model has written, which some templates have."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=1)
def _template(source: str) -> jinja2.Template:
    """The template with what transformers gives to one."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own sorts the keys, and escapes characters of HTML.
        form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.globals |= {"raise_exception": refuse, "tools": None, "documents": None}
    environment.globals["strftime_now"] = NOW.strftime
    environment.filters["tojson"] = to_json
    return environment.from_string(source)


if __name__ == "__main__":
    _answer_all()
