"""Checks that each measured figure of README and docs follows from a stored row.

    python tools/figures.py                 each fault as `page:line: sentence`; exit status 1
    python tools/figures.py README.md       of these pages alone
    python tools/figures.py --list          each figure, what the rows say, and how many they are
    python tools/figures.py --words         the words of each page, without comments

A figure is a number with a unit (%, times, x, s, ms, seconds, minutes, hours, MB, GB, "a second",
"/s"), with an error (`6 ± 6`) or after the word "perplexity" or "accuracy". In a table it is also
each number with a decimal point, and each number in a column whose head has a unit; columns of
epsilon and delta are settings. Code and places in papers ("Table 3") are not looked at, and neither
are tables that a program writes between `<!-- NAME: written by COMMAND -->` and `<!-- /NAME -->`:
that program has a test.

After a paragraph, list or table with figures stands a comment, which says of each where it is from:

    <!-- rows
    PyTorch 7.1 to 9.9: word_lm what="PyTorch loop" clients/s min max
    3.1 times: smollm2 what=bf16 tokens/s / smollm2 what=torch tokens/s
    74 %: one_look arm=steered gap mean * 100
    | POPri | ...: popri_table method=popri metrics.accuracy mean * 100 ; metrics.perplexity mean
    30 %: setting
    -->

Left of the colon is text of the paragraph, which must stand there once;
with ` ...` at its end, it goes to the end of the line. Its last numbers are those that are checked.
On the right: a file of benchmarks/results; filters `key=value`, where `*` matches anything and `|`
parts alternatives; dots lead into objects and lists; a field; what is made of the rows: nothing
where there is one, else
min, max, mean, median, sd (of a sample), se (sd / √n), sum, count, or last. `+ - * /` with a number
or with another selection follow, from left to right. Rows are paired as in
`FILE a=1 FIELD each - FILE a=2 FIELD each = mean se`. After ` ; ` comes the next number's; without
a file and filters, it is of the same rows. For what is not measured here, one of the words of
`UNMEASURED`.
"""

import argparse
import fnmatch
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a number may be that has a unit and no row.
UNMEASURED = {
    "setting": "chosen: a config, a test's demand, a limit of the program",
    "definition": "true by arithmetic or by what a word means",
    "derived": "computed from a plan by the accountant, or by a command that the page names",
    "published": "of somebody else's page or paper, which the paragraph names",
}

_NUMBER = r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?: million\b)?"
# Not a part of a word, a version or a longer number.
_ALONE = rf"(?<![\w.,^-]){_NUMBER}(?:(?=(?:x|s|ms|MB|GB)\b)|(?!\w|[.,]\d))"
_UNIT = (
    r"(?:\s?(?:%|×|x\b|MB\b|GB\b|TB\b|ms\b|s\b)"
    r"|\s(?:times\b|seconds?\b|minutes?\b|hours?\b|percent\b|points\b|\w+/s\b|(?:\w+\s)?a\ssecond\b))"
)
_JOINED = r"(?:\s?(?:,|to|and|or|for|against|beside|of|±|/|–)\s?)"
_CHAIN = rf"(?<![\w.,/^-]){_NUMBER}(?:\s?(?:%|s|ms|MB|GB))?(?:{_JOINED}{_NUMBER}(?:\s?%)?)*?{_UNIT}"
_PROSE = [
    re.compile(_CHAIN),
    re.compile(rf"(?<![\w.,/^-]){_NUMBER} ± {_NUMBER}"),
    re.compile(
        rf"(?:[Pp]erplexity|[Aa]ccuracy)(?: of| is| was)? ({_NUMBER}(?:{_JOINED}{_NUMBER})*)"
    ),
]
_HEAD_UNIT = re.compile(r"%|×|\b(?:s|ms|MB|GB|times|seconds|minutes|ratio)\b|/s\b|a second")
_SETTING_HEAD = re.compile(r"epsilon|delta", re.I)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_WRITTEN = re.compile(r"<!-- (\w+): written by .*?-->.*?<!-- (?:/|end of )\1 -->", re.S)
_CITED = r"(?:Table|Figure|Section|Algorithm|Theorem|Proposition|Lemma|Appendix|Definition|§)s? ?"
_UNSEEN = re.compile(
    rf"```.*?```|`[^`\n]+`|\]\([^)\n]*\)|https?://\S+|{_CITED}[A-Z]?\.?\d[\d.]*", re.S
)
_REDUCE: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "sd": statistics.stdev,
    "se": lambda values: statistics.stdev(values) / math.sqrt(len(values)),
    "sum": sum,
    "count": len,
    "last": lambda values: values[-1],
}
_OPERATE: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


class Fault(Exception):
    """A sentence that says what does not fit."""


class Claim(NamedTuple):
    """A line of a comment: where it is, the text with the figures, and what they follow from."""

    page: Path
    line: int
    shown: str
    source: str


class Block(NamedTuple):
    """A paragraph, list or table: its first line, its text, and the claims of its comment."""

    line: int
    text: str
    claims: list[Claim]


def faults(page: Path) -> Iterator[str]:
    """Yields `page:line: sentence` for each figure that has no row, or another value there."""
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    for block in _blocks(page):
        covered: list[tuple[int, int]] = []
        for claim in block.claims:
            try:
                covered += _checked(claim, block)
            except Fault as fault:
                yield f"{name}:{claim.line}: {claim.shown!r} {fault}"
        for start, end in sorted(set(_figures(block.text))):
            if not any(begin <= start and end <= stop for begin, stop in covered):
                line = block.line + block.text.count("\n", 0, start)
                around = " ".join(block.text[max(0, start - 30) : end + 20].split())
                yield f"{name}:{line}: {block.text[start:end]!r} has no row, in '{around}'"


def claims(page: Path) -> list[Claim]:
    """All claims of a page, in order."""
    return [claim for block in _blocks(page) for claim in block.claims]


def values(source: str) -> tuple[list[float], int]:
    """Computes what a claim's right side says: its numbers, and how many rows they are from.

    Raises:
      Fault: There is no such file, row or field, or of several rows nothing is made.
    """
    try:
        words = shlex.split(source)
    except ValueError as error:
        raise Fault(f"cannot be read: {error}") from error
    found: list[float] = []
    here: list[float] = []
    number_of_rows, operator, rows = 0, "", None
    while words:
        if operator and re.fullmatch(_NUMBER, words[0]):
            more, words = [float(words[0])], words[1:]
        else:
            more, rows, words = _selected(words, rows if operator == ";" else None)
            number_of_rows += len(rows)
        if operator not in _OPERATE:
            found, here = found + here, more
        elif len(more) not in (1, len(here)):
            raise Fault(f"joins {len(here)} values and {len(more)}")
        else:
            more = more * len(here) if len(more) == 1 else more
            here = [_OPERATE[operator](a, b) for a, b in zip(here, more, strict=True)]
        if words[:1] == ["="]:
            reducers, words = _reducers(words[1:])
            here = [_REDUCE[each](here) for each in reducers]
        if words:
            operator, *words = words
            if operator not in {*_OPERATE, ";"} or not words:
                raise Fault(f"cannot be computed: what is {operator!r} in {source!r}?")
    return found + here, number_of_rows


def words(page: Path) -> int:
    """The words of a page as a reader sees it: without comments and the bars of tables."""
    text = _COMMENT.sub("", page.read_text("utf-8"))
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def _selected(
    words: list[str], before: list[dict[str, Any]] | None
) -> tuple[list[float], list[dict[str, Any]], list[str]]:
    """The values of one selection, the rows that they are from, and the words that are left.

    A selection that begins with its field is of the rows of the one before.
    """
    if before is None or (RESULTS / f"{words[0]}.jsonl").is_file():
        file, *words = words
        rows = _rows(file)
    else:
        words, rows = list(words), before
    while words and "=" in words[0]:
        key, _, wanted = words.pop(0).partition("=")
        rows = [row for row in rows if _matches(_at(row, key), wanted)]
        if not rows:
            raise Fault(f"has no row, where {key} is to be {wanted!r}")
    if not words:
        raise Fault("names no field")
    field = words.pop(0)
    found = [value for row in rows for value in _numbers(_at(row, field))]
    if not found:
        raise Fault(f"has no value: the {len(rows)} rows lack the field {field!r}")
    if words[:1] == ["each"]:
        return found, rows, words[1:]
    reducers, words = _reducers(words)
    if not reducers and len(found) > 1:
        raise Fault(f"has {len(found)} values of {field!r}: say min, max, mean, ... or last")
    return [_REDUCE[each](found) for each in reducers] or found, rows, words


def _reducers(words: list[str]) -> tuple[list[str], list[str]]:
    """The reducers that the words begin with, and the other words."""
    number = next((n for n, word in enumerate(words) if word not in _REDUCE), len(words))
    return words[:number], words[number:]


@cache
def _rows(file: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{file}.jsonl"
    if not path.is_file():
        raise Fault(f"has no row: there is no {file}.jsonl")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _at(value: Any, path: str) -> Any:
    """What a path leads to, None if nowhere; keys may have dots themselves."""
    if isinstance(value, list):
        head, _, rest = path.partition(".")
        if not re.fullmatch(r"-?\d+", head) or not -len(value) <= int(head) < len(value):
            return None
        return _at(value[int(head)], rest) if rest else value[int(head)]
    if not isinstance(value, dict):
        return None
    if path in value:
        return value[path]
    for place in (match.start() for match in re.finditer(r"\.", path)):
        if (
            path[:place] in value
            and (found := _at(value[path[:place]], path[place + 1 :])) is not None
        ):
            return found
    return None


def _matches(value: Any, wanted: str) -> bool:
    shown = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, int | float) and re.fullmatch(r"-?[\d.]+(e-?\d+)?", wanted):
        return float(wanted) == value
    # Brackets stand for themselves.
    patterns = wanted.replace("[", "[[]").split("|")
    return any(fnmatch.fnmatchcase(shown, pattern) for pattern in patterns)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield float(value)


def _checked(claim: Claim, block: Block) -> list[tuple[int, int]]:
    """The places in the block of the numbers that a claim proves."""
    if not claim.source:
        raise Fault("has no ': ' with what it follows from")
    shown = claim.shown.removesuffix(" ...")
    pattern = r"\s+".join(re.escape(word) for word in shown.split())
    pattern += "[^\n]*" if shown != claim.shown else ""
    places = list(re.finditer(rf"(?<![\w.,]){pattern}(?![\w]|[.,]\d)", block.text))
    if len(places) != 1:
        raise Fault(f"stands {len(places)} times in what is above, and must once")
    numbers = list(re.finditer(_ALONE, places[0][0])) or list(re.finditer(_NUMBER, places[0][0]))
    if claim.source in UNMEASURED:
        found = [None] * len(numbers)
    else:
        found, _ = values(claim.source)
    if not numbers or len(found) > len(numbers):
        raise Fault(f"has {len(numbers)} numbers for {len(found)} values")
    numbers = numbers[-len(found) :]
    for number, value in zip(numbers, found, strict=True):
        if value is not None and not _rounds_to(number[0], value):
            raise Fault(f"says {number[0]}, the rows say {value:.6g}")
    start = places[0].start()
    return [(start + number.start(), start + number.end()) for number in numbers]


def _rounds_to(shown: str, value: float) -> bool:
    """Whether a number as it is written is a value, rounded."""
    digits, _, million = shown.replace(",", "").replace("−", "-").partition(" ")
    _, _, decimals = digits.partition(".")
    step = 10.0 ** -len(decimals)
    if not decimals and len(digits) > 3:
        # 13,800 is of hundreds; at least two digits count.
        zeros = len(digits) - len(digits.rstrip("0"))
        step = 10.0 ** min(zeros, len(digits.lstrip("-")) - 2)
    scale = 1e6 if million else 1.0
    return abs(float(digits) - value / scale) <= step / 2 * (1 + 1e-6)


def _figures(text: str) -> Iterator[tuple[int, int]]:
    """The places of the numbers that need a row."""
    text = _UNSEEN.sub(lambda unseen: re.sub(r"[^\n]", "\x00", unseen[0]), text)
    for pattern in _PROSE:
        for chain in pattern.finditer(text):
            for number in re.finditer(_NUMBER, chain[0]):
                yield chain.start() + number.start(), chain.start() + number.end()
    if text.lstrip().startswith("|"):
        yield from _of_table(text)


def _of_table(text: str) -> Iterator[tuple[int, int]]:
    heads: list[str] = []
    place = 0
    for line in text.splitlines(keepends=True):
        column, begin = -1, place
        for cell in re.split(r"(?<!\\)\|", line):
            if not heads or not cell.strip():
                pass
            elif not _SETTING_HEAD.search(heads[column] if 0 <= column < len(heads) else ""):
                unit = 0 < column < len(heads) and _HEAD_UNIT.search(heads[column])
                for number in re.finditer(_ALONE, cell):
                    if unit or "." in number[0]:
                        yield begin + number.start(), begin + number.end()
            begin += len(cell) + 1
            column += 1
        heads = heads or [cell.strip() for cell in line.strip().strip("|").split("|")]
        place += len(line)


def _blank(hidden: re.Match[str]) -> str:
    return "\n" * hidden[0].count("\n")


def _blocks(page: Path) -> Iterator[Block]:
    """The paragraphs of a page, each with the comment that follows it."""
    text = _WRITTEN.sub(_blank, page.read_text("utf-8"))
    text = re.sub(r"^ *```.*?^ *```", _blank, text, flags=re.S | re.M)
    held: Block | None = None
    for piece in re.finditer(r"<!--.*?-->|(?:(?!<!--)[^\n]*\S[^\n]*\n?)+", text, re.S):
        line = text.count("\n", 0, piece.start()) + 1
        if not piece[0].startswith("<!--"):
            if held:
                yield held
            held = Block(line, piece[0], [])
        elif piece[0].startswith("<!-- rows"):
            held = held or Block(line, "", [])
            for offset, entry in enumerate(piece[0].removesuffix("-->").splitlines()[1:], 1):
                shown, source = _parted(entry)
                if shown.strip():
                    held.claims.append(Claim(page, line + offset, shown.strip(), source.strip()))
    if held:
        yield held


def _parted(entry: str) -> tuple[str, str]:
    """An entry's text and source: parted where a file, or a word of `UNMEASURED`, follows."""
    for colon in re.finditer(r": +([\w-]+)", entry):
        if colon[1] in UNMEASURED or (RESULTS / f"{colon[1]}.jsonl").is_file():
            return entry[: colon.start()], entry[colon.start(1) :]
    shown, _, source = entry.partition(": ")
    return shown, source


def _listed(page: Path) -> Iterator[str]:
    for claim in claims(page):
        if claim.source in UNMEASURED:
            yield f"{page.name}:{claim.line}: {claim.shown} | {claim.source}"
            continue
        found, rows = values(claim.source)
        said = ", ".join(f"{value:.6g}" for value in found)
        yield f"{page.name}:{claim.line}: {claim.shown} | {said} | {rows} rows | {claim.source}"


def main() -> int:
    """Prints what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="each figure and what the rows say")
    parser.add_argument("--words", action="store_true", help="the words of each page")
    given = parser.parse_args()
    named = [page.resolve() for page in given.pages]
    pages = named or PAGES
    if given.words:
        counted = {page: words(page) for page in pages}
        for page, number in counted.items():
            print(f"{number:6,} {page.name}")
        print(f"{sum(counted.values()):6,} in all")
        return 0
    found = [fault for page in pages for fault in faults(page)]
    if given.list:
        print("\n".join(line for page in pages for line in _listed(page)))
    print("\n".join(found) if found else f"{sum(len(claims(page)) for page in pages)} figures fit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
