"""The one builder of pages: it is handed texts, tables and figures, and writes HTML or lines."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.records.cautions import OURS, in_words, score
from jaxpfl.experiments.records.lines import attempts as attempts_of
from jaxpfl.experiments.report.plots import plain
from jaxpfl.printable import in_one_line, printable, template
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
    """A text that may be a `link`, then `stamps` in red; below, paragraphs and a small note."""

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

    A title of "" continues the previous section. A figure is (file name, title, its matplotlib).
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
      stamp: the warning on a page that is not private, above what would be its statement; else "".
      privacy: the statement on all releases of one world; "" for a page that no statement covers.
        Below are `privacy_notes`, and `cautions` of what the results may be mistaken for.
      facts: (value, what it is).
      runs: names of the runs in `runs/`, each with its own report.
      warning: says that the results are those of a simulation, above the statement; else "".
      details: (summary, text) at the end, after the config.
    """

    title: str
    lead: str = ""
    stamp: str = ""
    privacy: str = ""
    privacy_notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
    cautions: Sequence[str] = ()
    runs: Sequence[str] = ()
    warning: str = ""
    details: Sequence[tuple[str, str]] = ()
    name: str = REPORT
    further: "Sequence[Page]" = ()

    @property
    def marks(self) -> list[str]:
        """The warnings in the banner and after the title."""
        mark = SIMULATED if self.stamp.startswith(SIMULATED) else "NOT PRIVATE"
        return ["SIMULATION"] * bool(self.warning) + [mark] * bool(self.stamp)


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
    lines += [f"caution: {caution}" for caution in page.cautions]
    if page.privacy:
        lines.append(f"privacy of this run: {page.privacy}")
    for further in page.further:
        lines += ["", *page_lines(further)]
    return [printable(line) for line in lines]


def joined(marks: Iterable[str]) -> str:
    """The different marks, such as NOT PRIVATE, in one text; "" without any."""
    return " and ".join(dict.fromkeys(mark for mark in marks if mark))


def some_are(marks: Iterable[str]) -> str:
    """The stamp of a page of several runs, by the marks of these."""
    return f"Some results are {text}; the tables state which" if (text := joined(marks)) else ""


def no_protection(epsilon: float | None) -> list[str]:
    """A warning about an epsilon that is too large to protect anyone; [] for a smaller one."""
    why = (
        "An epsilon as large as this promises nothing, because there are too few clients for the "
        "noise. The figures at scale, where given, are of many more, with equal noise of the mean."
    )
    return [why] if epsilon is not None and epsilon > _LARGEST else []


def write_page(directory: Path, page: Page) -> Path:
    """Writes the page and its pictures, `plots/*.png`, to a directory; returns the page's path."""
    files.write_atomically(directory / page.name, page_html(directory, page, directory / "plots"))
    for further in page.further:
        write_page(directory, further)
    return directory / page.name


def page_html(directory: Path, page: Page, plots: Path | None = None, live: str = "") -> str:
    """The page as HTML; its figures are written to the folder `plots`, too, if there is one.

    With `live`, HTML that says where a run under way is, the page renews itself.
    """
    from markupsafe import Markup

    folder, config = "jaxpfl.experiments.report", directory / "config.yaml"
    # The run's own page shows what concerns the whole run.
    own, sections, details = page.name == REPORT, list(page.sections), list(page.details)
    if own and (directory / AUDIT).exists():
        sections.append(audited(files.read_record(directory / AUDIT)))
    resolved = config.read_text("utf-8") if own and config.exists() else ""
    if resolved:
        details.insert(0, ("config.yaml, resolved", resolved))
    html = template(folder, "page.html.jinja").render(
        style=Markup(package_files(folder).joinpath("page.css").read_text("utf-8")),
        page=page,
        sections=[(part, [_saved_figure(plots, *f) for f in part.figures]) for part in sections],
        details=details,
        attempts=attempts_of(directory) if own else [],
        not_protected=_not_protected(resolved) if own and page.privacy and not page.stamp else "",
        certificate=CERTIFICATE if own and (directory / CERTIFICATE).exists() else "",
        live=Markup(live),
    )
    return html.lstrip()


def _not_protected(config: str) -> str:
    """Says which clients and data the statement does not cover, by the config as YAML, if any."""
    import yaml

    settings: dict[str, Any] = yaml.safe_load(config) or {}
    split, evaluation = settings.get("data", {}).get("split", {}), settings.get("evaluation", {})
    held_out = ("valid", "test") if evaluation.get("declared_public") else ()
    shares = [f"{p} ({100 * split[p]:g} %)" for p in (*held_out, "public") if split.get(p)]
    whose = f"the clients of {', '.join(shares)}, and whatever else" if shares else "whatever"
    return (
        f"NOT protected: {whose} was declared public. The files under private/ are the owner's "
        "alone: nothing that is said here covers them."
    )


def _saved_figure(folder: Path | None, name: str, title: str, figure: Any) -> dict[str, Any]:
    """A picture, and the values of its points, for HTML; it is written to a folder, too."""
    plain(figure).savefig(buffer := io.BytesIO(), format="png", metadata={"Software": None})
    if folder is not None:
        folder.mkdir(exist_ok=True)
        files.write_atomically(folder / f"{name}.png", buffer.getvalue())
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    points = []  # (% from the left, % from the top, value)
    for line in [line for axes in figure.axes for line in axes.lines]:
        label, along, values = line.get_label(), line.axes.get_xlabel(), line.get_xydata()
        if label.startswith("_") or len(values) > 500:  # which would overlap
            continue
        places = figure.transFigure.inverted().transform(line.get_transform().transform(values))
        for (x, y), (left, bottom) in zip(values, places, strict=True):
            points.append((100 * left, 100 * (1 - bottom), f"{label}, {along} {x:g}: {y:.4g}"))
    return {"title": title, "uri": uri, "points": points}


def audited(record: Mapping[str, Any]) -> Section:
    """The bounds of an audit beside the stated epsilons, from a record of `experiments.audit`."""
    columns = ("release", "rounds", "delta", "epsilon is at most", "epsilon is at least", "trials")
    rows = []
    for name, row in record["releases"].items():
        rounds = f"{row['rounds']:,} of {row['planned_rounds']:,}"
        bound = f"{row['bound']:.4g}" + " EXCEEDS IT" * row["exceeded"]
        terms = f"{row['delta']:g}", rounded_up(row["epsilon"]), bound, f"{row['trials']:,}"
        rows.append((name, rounds, *terms))
    text = f"{record['simulation']}. {record['found']}"
    return Section("What an audit shows", text, table=Table(columns, rows, (1, 2, 3, 4, 5)))


_NO_OTHER = {"model", "private", "frequencies", "count", "loss", "perplexity", "accuracy"}


def compared_models(table: Sequence[Mapping[str, Any]], tested_on: str, language: bool) -> Section:
    """The table of models: "model", "private", scores; of word counts their data, "frequencies"."""
    metric = "perplexity" if language else "loss"
    titles = {metric: metric}
    if any("accuracy" in row for row in table):
        titles["accuracy"] = "next-token accuracy" if language else "accuracy"
    # A user's own model has metrics of other names.
    numbers = [name for name, value in table[0].items() if isinstance(value, int | float)]
    titles |= {name: name for name in numbers if name not in _NO_OTHER}
    rows = []
    for row in table:
        note = f"word frequencies of {in_words(row['frequencies'])}" if "frequencies" in row else ""
        model = Cell(row["model"], note=note, stamps=[] if row["private"] else ["NOT PRIVATE"])
        rows.append((model, *(score(name, row[name]) if name in row else "" for name in titles)))
    ours = [row["model"] for row in table].index(OURS)
    compared = Table(("model", *titles.values()), rows, tuple(range(1, len(rows[0]))), ours)
    return Section(f"Compared on {in_words(tested_on)}", table=compared)
