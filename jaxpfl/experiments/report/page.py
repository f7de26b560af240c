"""`report.html`: one self-contained page, made from a run's public files."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.records.lines import attempts as attempts_of
from jaxpfl.experiments.records.numbers import number, percent
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.simulated import SIMULATED

REPORT = "report.html"

# At an epsilon this large, membership can hardly be hidden.
_LARGEST = 20.0


@dataclass(frozen=True)
class Cell:
    """A table cell with more than text.

    Attributes:
      link: path of another page, relative to this one.
      paragraphs: below the text.
      note: below the paragraphs, in small print.
      stamps: after the text, in red.
    """

    text: str = ""
    link: str = ""
    paragraphs: Sequence[str] = ()
    note: str = ""
    stamps: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A table of texts and `Cell`s.

    Attributes:
      columns: headings; empty for a table without headings.
      numbers: indices of the columns that are aligned to the right.
      ours: index of the highlighted row, or None.
      style: a class of `page.css`.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    numbers: tuple[int, ...] = ()
    ours: int | None = None
    style: str = ""


def text_lines(table: Table) -> list[str]:
    """The headings and rows of a table as aligned text, for a terminal."""
    rows = [table.columns, *([_text(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in table.numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _text(cell: Any) -> str:
    if not isinstance(cell, Cell):
        return str(cell)
    return " ".join([cell.text, *(f"({stamp})" for stamp in cell.stamps)])


@dataclass(frozen=True)
class Section:
    """A text, then pictures, then a table.

    Attributes:
      title: heading; "" continues the previous section.
      figures: (file name, title, matplotlib figure).
      wide: whether a picture takes the full width.
      stamps: after the title, in red.
    """

    title: str
    text: str = ""
    figures: list[tuple[str, str, Any]] = field(default_factory=list)
    table: Table | None = None
    wide: bool = False
    stamps: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
      lead: a sentence below the title.
      stamp: the warning on a page that is not private, else "".
      privacy: the statement on all releases of one world; "" for a page that no statement covers,
        which shows `warning` instead.
      privacy_notes: sentences below the statement.
      cautions: warnings of what the results may be mistaken for, below the statement.
      facts: (value, what it is).
      runs: names of the runs in `runs/`, each with its own report.
      simulation: whether the results are those of a simulation, not of a deployment.
      warning: a sentence above the statement.
      details: (summary, text) at the end, after the config.
      pictures: folder of the figures.
      name: the page's file name.
      further: pages that are written to the same directory.
    """

    title: str
    lead: str
    stamp: str
    privacy: str
    privacy_notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    cautions: Sequence[str] = ()
    runs: Sequence[str] = ()
    simulation: bool = False
    warning: str = ""
    details: Sequence[tuple[str, str]] = ()
    pictures: str = "pictures"
    name: str = REPORT
    further: "Sequence[Page]" = ()

    @property
    def marks(self) -> list[str]:
        """The warnings in the banner and after the title."""
        found = ["SIMULATION"] if self.simulation else []
        if self.stamp.startswith(SIMULATED):
            return [*found, SIMULATED]
        return [*found, "NOT PRIVATE"] if self.stamp else found


def page_lines(page: Page) -> list[str]:
    """A page's tables with columns, its cautions and its statement, for a terminal."""
    lines = [": ".join([*page.marks, page.title]), ""]
    if not page.privacy:
        lines += [page.name, page.warning, *page.privacy_notes, ""]
    for section in page.sections:
        if section.table is None or section.table.style or not section.table.columns:
            continue
        heading = ". ".join(filter(None, [section.title, section.text])).rstrip(".:")
        cells = [cell for row in section.table.rows for cell in row if isinstance(cell, Cell)]
        notes = [f"{cell.text}: {cell.note}" for cell in cells if cell.note]
        lines += [f"{heading}:", *text_lines(section.table), *notes, ""]
    lines += [f"caution: {each}" for each in page.cautions]
    if page.privacy:
        lines.append(f"privacy of this run: {page.privacy}")
    for further in page.further:
        lines += ["", *page_lines(further)]
    return lines


def no_protection(epsilon: float | None) -> list[str]:
    """A warning about an epsilon that is too large to protect anyone; [] for a smaller one."""
    if epsilon is None or epsilon <= _LARGEST:
        return []
    return [
        "An epsilon as large as this promises nothing, because there are too few clients for the "
        "noise. The figures at scale, where given, are the epsilon of many more clients with the "
        "same noise of the mean."
    ]


def write_page(directory: Path, page: Page) -> Path:
    """Writes the page, and its pictures as PNG files, to a directory; returns the page's path."""
    from markupsafe import Markup

    pictures = directory / page.pictures
    sections = [
        (section, [_saved_figure(pictures, *figure) for figure in section.figures])
        for section in page.sections
    ]
    config = directory / "config.yaml"
    details = list(page.details)
    attempts = attempts_of(directory) if page.name == REPORT else []
    if config.exists() and page.name == REPORT:
        details.insert(0, ("config.yaml, resolved", config.read_text("utf-8")))
    folder = "jaxpfl.experiments.report"
    style = Markup(package_files(folder).joinpath("page.css").read_text("utf-8"))
    path = directory / page.name
    certified = page.name == REPORT and (directory / CERTIFICATE).exists()
    html = files.template(folder, "page.html.jinja").render(
        style=style,
        page=page,
        sections=sections,
        details=details,
        attempts=attempts,
        certificate=CERTIFICATE if certified else "",
    )
    files.write_atomically(path, html.lstrip())
    for further in page.further:
        write_page(directory, further)
    return path


def _saved_figure(directory: Path, name: str, title: str, figure: Any) -> dict[str, str]:
    """Writes a figure as `name`.png; returns its title and data URI."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    directory.mkdir(exist_ok=True)
    files.write_atomically(directory / f"{name}.png", buffer.getvalue())
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"title": title, "uri": uri}


_KNOWN = {"model", "private", "frequencies", "count", "loss", "perplexity", "accuracy"}


def accuracy_title(language: bool) -> str:
    """The title of the share of targets that a model predicts."""
    return "next-token accuracy" if language else "accuracy"


def compared_models(table: Sequence[Mapping[str, Any]], tested_on: str, language: bool) -> Section:
    """The table of a page, of rows with "model", "private" and scores.

    Word frequencies have "frequencies", the data that they were counted on.
    """
    metric = "perplexity" if language else "loss"
    # Metrics of models of one's own, under whatever names.
    own = [
        name
        for name, value in table[0].items()
        if name not in _KNOWN and isinstance(value, int | float)
    ]
    scored = any("accuracy" in row for row in table)
    rows = [
        (
            Cell(
                row["model"],
                note=f"word frequencies of {row['frequencies']}" if "frequencies" in row else "",
                stamps=[] if row["private"] else ["NOT PRIVATE"],
            ),
            number(row[metric]) if metric in row else "",
            *([percent(row.get("accuracy"))] if scored else []),
            *(number(row[name]) if name in row else "" for name in own),
        )
        for row in table
    ]
    columns = ("model", metric, *([accuracy_title(language)] if scored else []), *own)
    ours = [row["model"] for row in table].index(OURS)
    numbers = tuple(range(1, len(columns)))
    return Section(f"Compared on {tested_on}", table=Table(columns, rows, numbers, ours))
