"""Processes that end in the middle of a run."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.experiments import carry_out


class Stop(Exception):
    pass


@contextmanager
def stopped(
    owner: Any,
    name: str,
    call: int = 1,
    *,
    after: bool = False,
    when: Callable[..., bool] = lambda *_, **__: True,
) -> Iterator[None]:
    """What is inside ends in, or after, the call of `owner.name` that is counted; from 1.

    Args:
      when: which calls count, by their arguments.
    """
    real, calls = getattr(owner, name), 0

    def stopping(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += (counts := when(*arguments, **options))
        stop = counts and calls == call
        if stop and not after:
            raise Stop
        found = real(*arguments, **options)
        if stop:
            raise Stop
        return found

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stop):
        patched.setattr(owner, name, stopping)
        yield


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
