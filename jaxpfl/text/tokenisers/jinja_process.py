"""The program of the process that fills in a chat template; `bounded_jinja` starts it.

A template is a program, and none that computes without end can be told from the others beforehand.
So it runs here, in Jinja's sandbox, in a process that takes no more memory than `BYTES` (on Linux)
and that the kernel ends once an answer has cost `SECONDS` of computing. The first line of the input
is the template as JSON, each other line an object of variables; each line of the output is an
object with the "text", or, in the last line, with the "error".

It is run as a file, and imports nothing of this library, so that it starts at once.
"""

import contextlib
import functools
import json
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.sandbox

SECONDS = 1.0
BYTES = 2**30
CHARACTERS = 2**24
"""The most that a template may write for one chat."""


def main() -> None:
    """Answers until the input ends, or an answer is an error."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    # macOS knows this limit, and refuses it.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, hard))
    source = json.loads(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        # When it is over, its signal ends the process, whatever the process is doing.
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
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0][:1000]}"}
    if len(text) > CHARACTERS:
        return {"error": f"it writes more than {CHARACTERS:,} characters"}
    return {"text": text}


@functools.lru_cache(maxsize=1)
def _template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
