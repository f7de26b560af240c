"""Processes that end before an operation that makes something durable."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def durable_operations_that_crash(
    monkeypatch: pytest.MonkeyPatch, at: Collection[int]
) -> Iterator[type[Exception]]:
    """Raises the yielded exception instead of these renames, counted from 1."""

    class Crash(Exception):
        pass

    real = {name: getattr(os, name) for name in ("replace", "rename")}
    calls = 0

    def crashing(name: str):
        def operation(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls in at:
                raise Crash(f"before rename {calls}")
            return real[name](*arguments, **options)

        return operation

    with monkeypatch.context() as patched:
        for name in real:
            patched.setattr(os, name, crashing(name))
        yield Crash
