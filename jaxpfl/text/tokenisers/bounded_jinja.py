"""Jinja templates of strangers, filled in by a process whose time and memory are bounded.

The limits are those of `jinja_process`; every call starts such a process.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers import jinja_process


def fill_in(source: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that a template writes, one for each set of variables.

    Args:
      source: the template.
      variables: by name, in JSON's types.

    Raises:
      InputError: the template is broken, raises an error, or exceeds a limit; the message is half
        a sentence, which says what is wrong with it.
    """
    lines = [json.dumps(each).encode() + b"\n" for each in (source, *variables)]
    paths = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        # The program's own folder is none of the places where modules are looked for.
        [sys.executable, "-P", str(Path(jinja_process.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
        # Ctrl-C in a terminal is for this process.
        process_group=0,
    ) as child:
        try:
            written, _ = child.communicate(b"".join(lines))
        finally:
            # Of an interrupt, too.
            child.kill()
            child.wait()
    # What follows the last end of a line is an answer that was cut off.
    answers = [json.loads(line) for line in written.split(b"\n")[:-1]]
    for answer in answers:
        if "error" in answer:
            raise InputError(answer["error"])
    if len(answers) < len(variables):
        if child.returncode == -signal.SIGPROF:
            raise InputError(f"it computes for more than {jinja_process.SECONDS:g} s")
        raise InputError(f"the process that fills it in ended with status {child.returncode}")
    return [answer["text"] for answer in answers]
