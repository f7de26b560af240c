"""`report.html`: one self-contained page, made from a run's public files."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.records.cautions import OURS, number, percent
from jaxpfl.experiments.records.lines import attempts as attempts_of
from jaxpfl.experiments.report.plots import plain
from jaxpfl.printable import in_one_line, printable
from jaxpfl.privacy.accounting import rounded_up
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.simulated import SIMULATED

REPORT = "report.html"
AUDIT = "audit.json"
"""Where `jaxpfl audit --out` puts what a run's page shows."""

# At an epsilon this large, membership can hardly be hidden.
_LARGEST = 20.0


@dataclass(frozen=True)
class Cell:
    """A table cell: a text that may be a `link` to another page, then `stamps` in red.

    Below it are paragraphs, and a note in small print.
    """

    text: str = ""
    link: str = ""
    paragraphs: Sequence[str] = ()
    note: str = ""
    stamps: Sequence[str] = ()

    def __str__(self) -> str:
        return " ".join([self.text, *(f"({stamp})" for stamp in self.stamps)])


@dataclass(frozen=True)
class Table:
    """A table of texts and `Cell`s; `numbers` are the columns aligned to the right."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    numbers: tuple[int, ...] = ()
    ours: int | None = None
    style: str = ""


def text_lines(table: Table) -> list[str]:
    """The headings and rows of a table as aligned text, for a terminal."""
    rows = [[in_one_line(str(cell)) for cell in row] for row in (table.columns, *table.rows)]
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        aligned = str.rjust if place in table.numbers else str.ljust
        columns.append([aligned(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Section:
    """A text, then pictures, then a table, below a title with `stamps` in red.

    Attributes:
      title: "" continues the previous section.
      figures: (file name, title, matplotlib figure).
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
      stamp: the warning on a page that is not private, else "".
      privacy: the statement on all releases of one world; "" for a page that no statement covers,
        which shows `warning` instead; beside a statement, `warning` stands above it. Below are
        `privacy_notes`, and `cautions` of what the results may be mistaken for.
      facts: (value, what it is).
      runs: names of the runs in `runs/`, each with its own report.
      simulation: whether the results are those of a simulation, not of a deployment.
      details: (summary, text) at the end, after the config.
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
    return [printable(line) for line in lines]


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
    path, pictures = directory / page.name, directory / page.pictures
    files.write_atomically(path, page_html(directory, page, pictures))
    for further in page.further:
        write_page(directory, further)
    return path


def page_html(directory: Path, page: Page, pictures: Path | None = None, live: str = "") -> str:
    """The page as HTML; its figures are written to the folder `pictures`, too, if there is one.

    With `live`, HTML that says where a run under way is, the page renews itself.
    """
    from markupsafe import Markup

    folder = "jaxpfl.experiments.report"
    details, config = list(page.details), directory / "config.yaml"
    # What is said of the whole run, its own page says.
    own = page.name == REPORT
    sections = list(page.sections)
    if own and (directory / AUDIT).exists():
        sections.append(audited(files.read_record(directory / AUDIT)))
    resolved = config.read_text("utf-8") if own and config.exists() else ""
    if resolved:
        details.insert(0, ("config.yaml, resolved", resolved))
    html = files.template(folder, "page.html.jinja").render(
        style=Markup(package_files(folder).joinpath("page.css").read_text("utf-8")),
        page=page,
        sections=[
            (section, [_saved_figure(pictures, *figure) for figure in section.figures])
            for section in sections
        ],
        details=details,
        attempts=attempts_of(directory) if own else [],
        not_protected=_not_protected(resolved) if own and page.privacy and not page.stamp else "",
        certificate=CERTIFICATE if own and (directory / CERTIFICATE).exists() else "",
        live=Markup(live),
    )
    return html.lstrip()


def _not_protected(config: str) -> str:
    """Whom and what the statement of a run's page does not cover, by its config as YAML, if any."""
    import yaml

    found: dict[str, Any] = yaml.safe_load(config) or {}
    split, evaluation = found.get("data", {}).get("split", {}), found.get("evaluation", {})
    held_out = ("valid", "test") if evaluation.get("declared_public") else ()
    shares = [f"{p} ({100 * split[p]:g} %)" for p in (*held_out, "public") if split.get(p)]
    whose = f"the clients of {', '.join(shares)}, and whatever else" if shares else "whatever"
    return (
        f"NOT protected: {whose} was declared public. The files under private/ are the owner's "
        "alone: nothing that is said here covers them."
    )


def _saved_figure(folder: Path | None, name: str, title: str, figure: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    plain(figure).savefig(buffer, format="png", metadata={"Software": None})
    if folder is not None:
        folder.mkdir(exist_ok=True)
        files.write_atomically(folder / f"{name}.png", buffer.getvalue())
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"title": title, "uri": uri, "points": list(_points(figure))}


def _points(figure: Any) -> Iterator[tuple[float, float, str]]:
    """Of each point of each curve of a drawn figure: % from the left, % from the top, its value."""
    for line in [line for axes in figure.axes for line in axes.lines]:
        label, along, values = line.get_label(), line.axes.get_xlabel(), line.get_xydata()
        if label.startswith("_") or len(values) > 500:  # which would overlap
            continue
        places = figure.transFigure.inverted().transform(line.get_transform().transform(values))
        for (x, y), (left, bottom) in zip(values, places, strict=True):
            yield 100 * left, 100 * (1 - bottom), f"{label}, {along} {x:g}: {y:.4g}"


def audited(record: Mapping[str, Any]) -> Section:
    """The bounds of an audit beside what is stated, of a record of `experiments.audit`."""
    stated, bound = "epsilon is at most", "epsilon is at least"
    rows = [
        (
            name,
            f"{each['rounds']:,} of {each['planned_rounds']:,}",
            f"{each['delta']:g}",
            rounded_up(each["epsilon"]),
            f"{each['bound']:.4g}" + (" EXCEEDS IT" if each["exceeded"] else ""),
            f"{each['trials']:,}",
        )
        for name, each in record["releases"].items()
    ]
    columns = ("release", "rounds", "delta", stated, bound, "trials")
    text = f"{record['simulation']}. {record['found']}"
    return Section("What an audit shows", text, table=Table(columns, rows, (1, 2, 3, 4, 5)))


_KNOWN = {"model", "private", "frequencies", "count", "loss", "perplexity", "accuracy"}


def compared_models(table: Sequence[Mapping[str, Any]], tested_on: str, language: bool) -> Section:
    """The table of a page, of rows with "model", "private" and scores.

    Word frequencies have "frequencies", the data that they were counted on.
    """
    metric = "perplexity" if language else "loss"
    titles = {metric: metric}
    if any("accuracy" in row for row in table):
        titles["accuracy"] = "next-token accuracy" if language else "accuracy"
    # Metrics of models of one's own, under whatever names.
    for name, value in table[0].items():
        if name not in _KNOWN and isinstance(value, int | float):
            titles[name] = name
    rows = []
    for row in table:
        note = f"word frequencies of {row['frequencies']}" if "frequencies" in row else ""
        model = Cell(row["model"], note=note, stamps=[] if row["private"] else ["NOT PRIVATE"])
        shown = {name: percent if name == "accuracy" else number for name in titles}
        rows.append((model, *(f(row[name]) if name in row else "" for name, f in shown.items())))
    columns = ("model", *titles.values())
    ours = [row["model"] for row in table].index(OURS)
    numbers = tuple(range(1, len(columns)))
    return Section(f"Compared on {tested_on}", table=Table(columns, rows, numbers, ours))
