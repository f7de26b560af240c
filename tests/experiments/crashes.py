"""Processes that end before an operation that makes something durable."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.experiments import carry_out


def crashed_and_resumed(
    monkeypatch: pytest.MonkeyPatch, config: Any, out: Path, at: Collection[int]
) -> dict[str, Any]:
    """The record of a run that crashes before each of these renames, and is resumed every time."""

    class Crash(Exception):
        pass

    real = {name: getattr(os, name) for name in ("replace", "rename")}
    calls = crashes = 0

    def crashing(name: str):
        def operation(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls in at:
                raise Crash(f"before rename {calls}")
            return real[name](*arguments, **options)

        return operation

    record = None
    with monkeypatch.context() as patched:
        for name in real:
            patched.setattr(os, name, crashing(name))
        while record is None:
            try:
                if (out / "config.yaml").exists():
                    record = carry_out.resume(out, progress=False).record
                else:
                    record = carry_out.run(config, out, progress=False).record
            except Crash:
                crashes += 1
    assert crashes == len(at)
    return record
