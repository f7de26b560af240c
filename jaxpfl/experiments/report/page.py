"""`report.html`: one self-contained page, made of a run's public files."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jaxpfl import files

REPORT = "report.html"

# Of the order where membership can be told outright.
_LARGEST = 20.0


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than a text.

    Attributes:
      link: path of another page, relative to this one.
      paragraphs: below the text.
      note: below these, small.
      stamps: behind the text, in red.
    """

    text: str = ""
    link: str = ""
    paragraphs: Sequence[str] = ()
    note: str = ""
    stamps: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
      columns: headings; none for a table without a head.
      rows: cells, as many as columns.
      numbers: which columns are numbers, by index: these are set to the right.
      ours: index of the row that stands out, or None.
      style: a class of `page.css`.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    numbers: tuple[int, ...] = ()
    ours: int | None = None
    style: str = ""


@dataclass(frozen=True)
class Section:
    """Some words, then pictures, then a table.

    Attributes:
      title: heading; with "" the section goes on with the one before.
      figures: (file name, title, matplotlib figure).
      wide: whether a picture takes the whole width.
      stamps: behind the title, in red.
    """

    title: str
    text: str = ""
    figures: list[tuple[str, str, Any]] = field(default_factory=list)
    table: Table | None = None
    wide: bool = False
    stamps: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
      title, lead: of the page; `lead` is a sentence under it.
      stamp: what is said everywhere if nothing is private, else "".
      privacy: the statement, of all releases that one world's clients take part in; "" for a page
        that no statement covers, which has a warning instead.
      privacy_notes: sentences below it.
      facts: (value, what it is).
      sections: in order.
      runs: names of the runs in `runs/`, each with a report of its own.
      simulation: whether nobody may take what is shown for a deployment's.
      warning: a sentence above the statement.
      details: (summary, text) at the end, after the config.
      pictures: folder of the figures.
      name: of the page's file.
      further: pages that are written beside this one.
    """

    title: str
    lead: str
    stamp: str
    privacy: str
    privacy_notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    runs: Sequence[str] = ()
    simulation: bool = False
    warning: str = ""
    details: Sequence[tuple[str, str]] = ()
    pictures: str = "pictures"
    name: str = REPORT
    further: "Sequence[Page]" = ()

    @property
    def marks(self) -> list[str]:
        """What stands in the banner and behind the title."""
        found = ["SIMULATION"] if self.simulation else []
        return [*found, "NOT PRIVATE"] if self.stamp else found


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
    """Writes the page and its pictures, as PNG files, into a directory; returns the page's path."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    sections = [
        {
            "title": section.title,
            "text": section.text,
            "wide": section.wide,
            "table": section.table,
            "stamps": section.stamps,
            "pictures": [
                _saved_figure(directory / page.pictures, name, title, figure)
                for name, title, figure in section.figures
            ],
        }
        for section in page.sections
    ]
    config = directory / "config.yaml"
    details = list(page.details)
    if config.exists() and page.name == REPORT:
        details.insert(0, ("config.yaml, resolved", config.read_text("utf-8")))
    folder = package_files("jaxpfl.experiments.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(folder.joinpath("page.html.jinja").read_text("utf-8"))
    style = Markup(folder.joinpath("page.css").read_text("utf-8"))
    path = directory / page.name
    html = template.render(style=style, page=page, sections=sections, details=details)
    files.write_atomically(path, html.lstrip())
    for further in page.further:
        write_page(directory, further)
    return path


def _saved_figure(directory: Path, name: str, title: str, figure: Any) -> dict[str, str]:
    """Writes a figure as `name`.png; returns it as a data URI with its title."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    directory.mkdir(exist_ok=True)
    files.write_atomically(directory / f"{name}.png", buffer.getvalue())
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"title": title, "uri": uri}
