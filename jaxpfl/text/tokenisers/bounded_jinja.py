"""Jinja templates of strangers, filled in by a process whose time and memory are bounded.

The limits are those of `jinja_process`. One such process serves all templates of this one; it is
started with the first, and again after a template has made the kernel end it.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers import jinja_process


def fill_in(source: str, variables: Mapping[str, Any]) -> str:
    """What a template writes.

    Args:
      source: the template.
      variables: by name, in JSON's types.

    Raises:
      InputError: the template is broken, raises an error, or exceeds a limit; the message is half
        a sentence, which says what is wrong with it.
    """
    return _process.fill_in(source, variables)


class _Process:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def fill_in(self, source: str, variables: Mapping[str, Any]) -> str:
        request = json.dumps({"source": source, "variables": variables}).encode() + b"\n"
        with self._lock:
            child = self._running()
            assert child.stdin is not None and child.stdout is not None
            try:
                try:
                    child.stdin.write(request)
                    child.stdin.flush()
                    line = child.stdout.readline()
                except BrokenPipeError:
                    line = b""
                if not line.endswith(b"\n"):
                    raise InputError(_why_ended(child.wait()))
            except BaseException:
                # What it still writes would be taken for the answer to the next request.
                self.end()
                raise
        answer = json.loads(line)
        if "error" in answer:
            raise InputError(answer["error"])
        return answer["text"]

    def end(self) -> None:
        """Ends the process, if this one has started it."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.communicate()

    def _running(self) -> "subprocess.Popen[bytes]":
        # A fork of this process must not write into its pipes.
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            self.end()
            paths = os.pathsep.join(filter(None, sys.path))
            self._child = subprocess.Popen(
                # The program's own folder is none of the places where modules are looked for.
                [sys.executable, "-P", str(Path(jinja_process.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                # Ctrl-C in a terminal is for this process.
                process_group=0,
            )
            self._owner = os.getpid()
        return self._child


def _why_ended(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it computes for more than {jinja_process.SECONDS:g} s"
    return f"the process that fills it in ended with status {status}"


_process = _Process()
atexit.register(_process.end)
