"""Processes that end in the middle of a run, and files that are damaged."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.experiments import carry_out


class Stop(BaseException):
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


def crashed_and_resumed(config: Any, out: Path, at: Collection[int]) -> dict[str, Any]:
    """The record of a run that is ended before one of its renames, and resumed, again and again.

    Args:
      at: how many renames each attempt comes to.
    """
    for call in at:
        with stopped(os, "rename", call):
            if (out / "config.yaml").exists():
                carry_out.resume(out, progress=False)
            else:
                carry_out.run(config, out, progress=False)
    return carry_out.resume(out, progress=False).record


def damages(
    folder: Path, every: int | None = None
) -> Iterator[tuple[str, Path, Callable[[Path], Any]]]:
    """What may happen to a file: a flipped bit, at its ends and middle or in every n-th byte."""

    def flip(position: int, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(bytes(content))

    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        places = {0, size // 2, size - 1} if every is None else range(0, size, every)
        for place in places if size else ():
            yield f"flip {place} of {path.name}", path, partial(flip, place)
        yield f"truncate {path.name}", path, lambda p: p.write_bytes(p.read_bytes()[:-1] or b"x")
        yield f"remove {path.name}", path, Path.unlink
