"""Reads every number that a run shows, and finds what it is of.

A score needs the name of its data set, an epsilon whose it is; what is neither must be a setting or
a count that is listed here. Whatever else is found is a fault, so that a new number needs a label.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import unescape
from typing import Any

SCOPES = (
    "this run", "on its ledger", "this point alone", "if nothing else is released",
    "on their ledgers", "deployment", "clients send nothing", "all releases on",
    "is part of the privacy stated above",
)  # fmt: skip
SCORES = re.compile(
    r"perplexity|accuracy|loss|recall|largest|standard error|of the way|distance|FreD|interval|"
    "bias|inverted|classifier score|points over|OOV|words with a space|labelled images|excess|"
    "rare sentences|drawn: ",
    re.I,
)
SETTINGS = re.compile(
    r"(^| )(rounds?|runs?|points?|uploads|seed|case|rank|layer|clients per round.*|"
    r"noise multiplier.*|clip norm.*|begun|duration|took|date|command|.*model|after round|"
    r"vocabulary|rounds for each GAN|(matching )?clients in a round \(expected\)|drawn sentences|"
    r"of clients have the bug(, where \w+ is \w+)?)$",
    re.I,
)
NUMBER = re.compile(r"\d")
# Columns of words and texts that a model drew, in which a digit measures nothing.
DRAWN = re.compile(r"text|best of round \d+|(bug in|bias of) [\d.]+ %")
# Lines of a terminal whose numbers are of no data.
COUNTS = re.compile(
    r"report: |caution: (.* points? end|In \d+ of \d+ rounds )|unigram: word freq|ledger: |chart: "
)


def _texts(tag: str, html: str) -> list[str]:
    """What stands in the elements of a tag, without the tags in it."""
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    return [" ".join(unescape(re.sub(r"<[^>]*>", " ", each)).split()) for each in found]


def _tables(html: str) -> list[tuple[str, list[list[str]], list[str]]]:
    """The tables of a page: the heading and the text before it, its rows and its headings."""
    tables, heading, said = [], "", ""
    for element in re.findall(r"<(?:h2|p|table)\b.*?</(?:h2|p|table)>", html, re.DOTALL):
        if element.startswith("<h2"):
            (heading,), said = _texts("h2", element), ""
        elif element.startswith("<p"):
            said = " ".join(_texts("p", element))
        else:
            rows = [_texts("td", row) for row in re.findall(r"<tr.*?</tr>", element, re.DOTALL)]
            tables.append((f"{heading} {said}", rows, _texts("th", element)))
    return tables


def of_page(html: str, data_sets: Sequence[str]) -> list[str]:
    """The faults of a page."""
    facts, tables = re.findall(r"<b>(.*?)</b><span>(.*?)</span>", html), _tables(html)
    assert facts or tables
    faults = [
        f"fact {value!r} {what!r}"
        for value, what in ((value, unescape(what)) for value, what in facts)
        if not _labelled(what, what, data_sets)
    ]
    for said, rows, headings in tables:
        for row in rows:
            for place, cell in enumerate(row):
                heading = headings[place] if place < len(headings) else ""
                if not NUMBER.search(_without(cell, data_sets)) or (place == 0 and not heading):
                    continue
                if DRAWN.fullmatch(heading):
                    continue
                context = " ".join([heading, said, *row])
                if not _labelled(heading or row[0], context, data_sets, cell):
                    faults.append(f"{cell!r} under {heading!r}, in {said!r}")
    faults += [
        f"statement {text!r}"
        for text in [*_texts("p", html), *_texts("div", html)]
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
