"""Reads every number that a run shows, and finds what it is of.

A score needs the name of its data set, an epsilon whose it is; what is neither must be a setting or
a count that is listed here. Whatever else is found is a fault, so that a new number needs a label.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

SCOPES = (
    "this run", "on its ledger", "this point alone", "if nothing else is released",
    "on their ledgers", "deployment", "clients send nothing", "all releases on",
    "is part of the privacy stated above",
)  # fmt: skip
SCORES = re.compile(
    r"perplexity|accuracy|loss|recall|largest|standard error|gap closed|distance|FreD|interval|"
    "bias|inverted|classifier score|points over|OOV|words with a space",
    re.I,
)
SETTINGS = re.compile(
    r"(^| )(rounds?|runs?|points?|seed|case|rank|clients per round.*|noise multiplier.*|"
    r"clip norm.*|begun|duration|took|date|command|.*model|after round|vocabulary|"
    r"rounds for each GAN|matching clients in a round \(expected\)|of clients have the bug)$",
    re.I,
)
NUMBER = re.compile(r"\d")
# Columns of words and texts that a model drew, in which a digit measures nothing.
DRAWN = re.compile(r"text|best of round \d+|bug in [\d.]+ %")
# Lines of a terminal whose numbers are of no data.
COUNTS = re.compile(
    r"report: |caution: (.* points? end|In \d+ of \d+ rounds )|unigram: word freq|ledger: |chart: "
)


@dataclass
class Block:
    """A table, the facts or a paragraph of a page, with the headings and texts before it."""

    context: str
    rows: list[list[str]] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    """The tables, facts and statements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Block] = []
        self.facts: list[tuple[str, str]] = []
        self.statements: list[str] = []
        self._open: list[str] = []
        self._text, self._heading, self._said = "", "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        if tag == "table":
            self.tables.append(Block(f"{self._heading} {self._said}"))
        elif tag == "tr" and self.tables:
            self.tables[-1].rows.append([])
        if tag in ("td", "th", "h2", "p", "b") or "statement" in kind or tag == "span":
            self._open.append(tag)
            if tag != "span" or "stamp" not in kind:
                self._text = "" if tag not in ("span", "p") or not self._in_cell() else self._text

    def _in_cell(self) -> bool:
        return any(tag in ("td", "th") for tag in self._open[:-1])

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        text = " ".join(self._text.split())
        if not self._open or tag != self._open[-1]:
            return
        self._open.pop()
        if any(each in ("td", "th") for each in self._open):
            return
        if tag == "h2":
            self._heading, self._said = text, ""
        elif tag == "p":
            self._said = text
            self.statements.append(text)
        elif tag == "div":
            self.statements.append(text)
        elif tag == "td":
            self.tables[-1].rows[-1].append(text)
        elif tag == "th":
            self.tables[-1].headings.append(text)
        elif tag == "b":
            self.facts.append((text, ""))
        elif tag == "span" and self.facts and not self.facts[-1][1]:
            self.facts[-1] = (self.facts[-1][0], text)
        self._text = ""


def of_page(html: str, data_sets: Sequence[str]) -> list[str]:
    """The faults of a page."""
    reader = _Reader()
    reader.feed(html)
    assert reader.facts or reader.tables
    faults = [
        f"fact {value!r} {what!r}"
        for value, what in reader.facts
        if not _labelled(what, what, data_sets)
    ]
    for table in reader.tables:
        for row in table.rows:
            for place, cell in enumerate(row):
                heading = table.headings[place] if place < len(table.headings) else ""
                if not NUMBER.search(_without(cell, data_sets)) or (place == 0 and not heading):
                    continue
                if DRAWN.fullmatch(heading):
                    continue
                context = " ".join([heading, table.context, *row])
                if not _labelled(heading or row[0], context, data_sets, cell):
                    faults.append(f"{cell!r} under {heading!r}, in {table.context!r}")
    faults += [
        f"statement {text!r}"
        for text in reader.statements
        if re.search(r"epsilon = [\d.]", text) and not _any(SCOPES, text)
    ]
    return faults


def of_lines(lines: Iterable[str], data_sets: Sequence[str]) -> list[str]:
    """The faults of what stands on a terminal: a line, or the one above a table, has the name."""
    faults, above = [], ""
    for line in lines:
        if not line.strip():
            above = ""
        if line.endswith(":") or (not above and _any(data_sets, line)):
            above = line
        rest = _without(line, data_sets)
        if not NUMBER.search(rest) or COUNTS.match(line):
            continue
        if "epsilon" in line:
            if not _any(SCOPES, line):
                faults.append(line)
        elif not _any(data_sets, f"{line} {above}"):
            faults.append(line)
    return faults


def of_record(record: Mapping[str, Any]) -> list[str]:
    """The faults of a `result.json`: a number that nothing beside it says what it is of."""
    faults = []
    for path, value in _numbers(record):
        last = path[-1]
        if path[:2] == ("metrics", "evaluation"):
            named = bool(record.get("evaluated_on"))
        elif path[0] == "table":
            named = bool(record.get("tested_on"))
        elif path[0] == "epsilons":
            named = last in ("this run", "everything on its ledger")
        elif path == ("metrics", "epsilon"):
            named = value == record["epsilons"]["this run"]
        else:
            # Counts, and what the run released of itself.
            named = path in {("rounds",), ("seconds",)} | {
                ("metrics", name) for name in ("round", "clip_norm", "update_norm")
            }
        if not named:
            faults.append(f"{'.'.join(map(str, path))} = {value}")
    return faults


def _numbers(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, float]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _numbers(each, (*path, name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _numbers(each, (*path, number))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _labelled(what: str, context: str, data_sets: Sequence[str], cell: str = "") -> bool:
    if "epsilon" in what or "epsilon =" in cell or "privacy" in what:
        return _any(SCOPES, f"{what} {cell}")
    if SCORES.search(what.split(" on ")[0]):
        return _any(data_sets, context)
    return bool(SETTINGS.search(what)) or _any(data_sets, what) or "scored on" in what


def _any(names: Iterable[str], text: str) -> bool:
    return any(name in text for name in names)


def _without(text: str, names: Sequence[str]) -> str:
    for name in names:
        text = text.replace(name, "")
    return text
