"""Mutants of a valid file: the kinds of damage that readers are known to take badly.

A mutant is a function of its number and the target's name, so that a fault can be repeated by both.
"""

import json
import random
import re
from typing import Any

# What has broken readers: ends of ranges, numbers that no type holds, half of a surrogate pair.
# fmt: off
_BYTES = (
    b"\0", b"\xff", b"\x80", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 8,
    (2**62).to_bytes(8, "little"), b"\n", b"\r\n", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":",
    b"-1", b"0", b"1e999", b"9" * 20, b"9" * 400, b"9" * 5_000, b"NaN", b"Infinity", b"null",
    b"true", b"7", b"{}", b"[]", b'""', b'"\\ud800"', b"\xed\xa0\x80", b"\xef\xbb\xbf",
    b"a" * 3_000, b"[" * 3_000, b'{"a":' * 1_500, b"- " * 500, b"&a *a", b"!!bool x",
    b"2020-13-45", b"../x",
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**9, 10**30, 10**400,
    0.5, 1e308, -0.0, float("nan"), float("inf"), "", "a", "\0", "\ud800", "../x", "7", "a" * 300,
    [], {}, [None], [[]], {"": {}}, [0] * 50, [1, 2, 3], ["a"], {"a": 1}, [-1], [2**40, 2**40],
)
# fmt: on
_NUMBER = re.compile(rb"\d+")
_NUMBERS = (b"0", b"-1", b"1", b"4294967296", b"9" * 19, b"9" * 400, b"1e400", b"1.5")


def mutant(seed: bytes, name: str, number: int) -> bytes:
    """Mutant `number` of the content of a file; number 0 is the file itself."""
    if not number:
        return seed
    chance = random.Random(f"{name} {number}")
    if chance.random() < 0.5:
        changed = _restructured(seed, chance)
        if changed is not None:
            return changed
    content = seed
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        content = chance.choice(_STEPS)(content, chance)
    return content


def _place(content: bytes, chance: random.Random) -> int:
    return chance.randrange(len(content) + 1)


def _flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _truncated(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.choice((0, 1, len(content) - 1, _place(content, chance)))]


def _spliced(content: bytes, chance: random.Random) -> bytes:
    """The beginning of the file, and another piece of it as its end."""
    return content[: _place(content, chance)] + content[_place(content, chance) :]


def _repeated(content: bytes, chance: random.Random) -> bytes:
    begin = _place(content, chance)
    piece = content[begin : begin + chance.choice((1, 8, 64, 512))]
    return content[:begin] + piece * chance.choice((2, 3, 50)) + content[begin:]


def _inserted(content: bytes, chance: random.Random) -> bytes:
    begin = _place(content, chance)
    end = begin + chance.choice((0, 0, 1, 4, 8))
    return content[:begin] + chance.choice(_BYTES) + content[end:]


def _renumbered(content: bytes, chance: random.Random) -> bytes:
    """Another number in the place of one that is written in digits."""
    found = list(_NUMBER.finditer(content[: 2**16]))
    if not found:
        return _inserted(content, chance)
    at = chance.choice(found)
    return content[: at.start()] + chance.choice(_NUMBERS) + content[at.end() :]


_STEPS = (_flipped, _truncated, _spliced, _repeated, _inserted, _renumbered)


def _restructured(seed: bytes, chance: random.Random) -> bytes | None:
    """JSON, or lines of JSON, with another value somewhere; None for what is neither."""
    lines = seed.splitlines(keepends=True)
    if not lines or seed[:1] not in (b"{", b"["):
        return None
    try:
        value, number = json.loads(seed), -1
    except ValueError:
        number = chance.randrange(len(lines))
        try:
            value = json.loads(lines[number])
        except ValueError:
            return None
    for _ in range(chance.choice((1, 1, 2, 4))):
        value = _changed(value, chance)
    content = json.dumps(value).encode()
    before, after = lines[: max(number, 0)], lines[number + 1 :] if number >= 0 else []
    return b"".join([*before, content, b"\n", *after])


def _changed(value: Any, chance: random.Random) -> Any:
    """One change at a random place: as deep as chance leads."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(_VALUES)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = chance.choice(keys)
    changed = value.copy()
    kind = chance.random()
    if kind < 0.15:
        del changed[key]
    elif kind < 0.25 and isinstance(changed, dict):
        changed[chance.choice(("", "a", "\ud800", "type", "shape"))] = changed.pop(key)
    elif kind < 0.3 and isinstance(changed, list):
        changed.append(changed[key])
    else:
        changed[key] = _changed(value[key], chance)
    return changed
