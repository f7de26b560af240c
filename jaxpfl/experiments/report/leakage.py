"""The record and the page of what published texts repeat of clients, see `text.metrics.leakage`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.report.page import Page, Section, Table, write_page
from jaxpfl.text.cut import Cut
from jaxpfl.text.metrics.leakage import LENGTHS, LEVEL, SIDES

RECORD = "private/leakage.json"
"""Exact counts of clients' own texts: no statement covers them."""
NOT_PUBLIC = "NOT PUBLIC: exact counts of clients' own texts, which no statement covers"
_FOUND = {
    "fails": "FAILS: training clients have runs of words in common with these texts that held-out "
    "clients do not have.",
    "passes": "PASSES: training clients have no more in common with these texts than held-out ones,"
    " as far as so many clients can tell. That is not a proof that no text is a client's.",
    "cannot tell": "CANNOT TELL: clients' own texts, published as a control, pass, too. The texts "
    "are too short, or the clients too few.",
}
_SOURCES = (
    " The two sides were not dealt at random from one source: a difference of their sources may be "
    "all that this shows, or hides."
)


def write_leakage(
    directory: Path | None,
    texts: str,
    sides: tuple[str, str],
    result: Mapping[str, Any],
    stamp: str,
    *,
    cut: Cut,
    dealt: bool,
) -> tuple[dict[str, Any], Page]:
    """The record and the page of a result; both are written to a directory, if there is one.

    `texts` and `sides` name what was audited, and the clients. The rule `cut` has cut the texts,
    and joined those of clients. `dealt`: chance dealt clients of one source to the two sides.
    """
    names = {"privacy": NOT_PUBLIC, "texts": texts, "sides": dict(zip(SIDES, sides, strict=True))}
    verdict = _FOUND[result["verdict"]] + ("" if dealt else _SOURCES)
    record = {**names, **result, "cut": str(cut), "found": verdict}
    page = leakage_page(record, stamp)
    if directory is not None:
        files.private_directory((directory / RECORD).parent)
        files.write_json(directory / RECORD, record)
        write_page(directory, page)
    return record, page


def leakage_page(record: Mapping[str, Any], stamp: str) -> Page:
    """The page of an audit of texts, by its record; PRIVATE."""
    shares, tests = [], []
    for name, result in record["writers"].items():
        for side in SIDES:
            by_words = result["by_words"][side]
            above = [100 * sum(by_words[words:]) / sum(by_words) for words in LENGTHS]
            cells = (f"{share:.2f} %" for share in above)
            own = (name, side.replace("_", "-"), f"{sum(by_words):,}", str(len(by_words) - 1))
            shares.append((*own, *cells))
        for test in result["tests"]:
            least = "never" if test["fails_from"] is None else f"{test['fails_from']:,}"
            counts = (f"{test[side]:,}" for side in SIDES)
            p = f"{test['p']:.2g}" + " FAILS" * test["fails"]
            tests.append((name, str(test["words"]), *counts, p, least))
    searched = "Clients' texts are those of their source, and are not cut."
    if Cut.parse(record["cut"]).size:
        searched = (
            f"Published texts were cut by the rule {record['cut']}. Each client's texts are joined "
            "as by this rule, and are not cut: a run that goes across a cut is found."
        )
    lengths = tuple(f"{words} words or more" for words in LENGTHS)
    of_texts = ("texts of", "beside", "texts", "longest", *lengths)
    of_clients = ("texts of", "words", "training", "held-out", "p", "would fail from")
    return Page(
        title=f"What published texts repeat of clients: {record['texts']}",
        lead="Exact counts of clients' own texts.",
        stamp=stamp,
        privacy_notes=["Whoever sees this page learns of the clients what no noise hides."],
        sections=[
            Section("Verdict", record["found"]),
            Section(
                "Published texts by their longest run of words",
                f"Beside {record['searched']:,} texts of each side: the share with so many words "
                "in a row in common with a client's text. What everybody says repeats, too, "
                f"beside held-out clients as beside training ones. {searched}",
                table=Table(of_texts, shares, (2, 3, 4, 5, 6, 7)),
            ),
            Section(
                "Clients with a run of words in the published texts",
                f"Of {record['clients']['training']:,} {record['sides']['training']}, and of "
                f"{record['clients']['held_out']:,} {record['sides']['held_out']}. "
                "p is the probability of as many training clients, or more, if chance chose who "
                f"trains; it FAILS below {LEVEL / len(LENGTHS):g}, {LEVEL:.0%} for all lengths.",
                table=Table(of_clients, tests, (1, 2, 3, 4, 5)),
            ),
        ],
        warning=record["privacy"],
        name=str(Path(RECORD).with_suffix(".html")),
    )
