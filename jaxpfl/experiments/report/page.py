"""A study's `report.html`: one self-contained page that sets its runs side by side."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.report.run_page import render, saved_figure

PICTURES = "pictures"

# Of the order where membership can be told outright.
_LARGEST = 20.0


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
      columns: headings.
      rows: cells as text, as many as columns.
      numbers: which columns are numbers, by index: these are set to the right.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Section:
    """Some words, then pictures, then a table.

    Attributes:
      figures: (file name, title, matplotlib figure).
      wide: whether a picture takes the whole width.
    """

    title: str
    text: str = ""
    figures: list[tuple[str, str, Any]] = field(default_factory=list)
    table: Table | None = None
    wide: bool = False


@dataclass(frozen=True)
class Page:
    """What a study shows.

    Attributes:
      title, lead: of the page; `lead` is a sentence under it.
      stamp: what is said everywhere if nothing is private, else "".
      privacy: the statement, of all releases that one world's clients take part in.
      privacy_notes: sentences below it.
      facts: (value, what it is).
      sections: in order.
      runs: names of the runs, each with a report of its own.
    """

    title: str
    lead: str
    stamp: str
    privacy: str
    privacy_notes: list[str]
    facts: list[tuple[str, str]]
    sections: list[Section]
    runs: list[str]


def no_protection(epsilon: float | None) -> list[str]:
    """What is to be said of an epsilon that promises nothing; nothing of one that does."""
    if epsilon is None or epsilon <= _LARGEST:
        return []
    return [
        "An epsilon as large as this promises nothing: these clients are too few for the models' "
        "noise. It is what the data at hand got; the figures at scale, where given, are what the "
        "same noise of the mean would cost many more clients."
    ]


def write_page(directory: Path, page: Page) -> Path:
    """Writes `pictures/*.png` and `report.html`; returns the page's path."""
    sections = [
        {
            "title": section.title,
            "text": section.text,
            "wide": section.wide,
            "table": section.table,
            "pictures": [
                saved_figure(directory / PICTURES, name, title, figure)
                for name, title, figure in section.figures
            ],
        }
        for section in page.sections
    ]
    config = directory / "config.yaml"
    html = render(
        "study.html.jinja",
        page=page,
        sections=sections,
        config=config.read_text("utf-8") if config.exists() else None,
    )
    path = directory / "report.html"
    files.write_atomically(path, html)
    return path
