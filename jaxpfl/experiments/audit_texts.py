"""Audits published texts: do they repeat training clients more than held-out ones?

`text.metrics.leakage` says how that is tested. What is written reads clients' own texts without
noise, so it goes to a private folder:

    private/leakage.json, .html     counts, and no text
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.build import read_clients, split_clients
from jaxpfl.experiments.registry import load_run
from jaxpfl.experiments.report.page import Page, Section, Table, page_lines, write_page
from jaxpfl.experiments.systems import CORPUS
from jaxpfl.text.columns import texts_of
from jaxpfl.text.metrics.leakage import LENGTHS, LEVEL, SIDES, leakage

RECORD = "private/leakage.json"
NOT_PUBLIC = "NOT PUBLIC: exact counts of clients' own texts, which no noise hides"

_SENTENCES = {
    "fails": "FAILS: training clients have runs of words in common with these texts that held-out "
    "clients do not have.",
    "passes": "Training clients have no more in common with these texts than held-out ones, as far "
    "as {clients:,} of them can tell. That is not a proof that no text is a client's.",
    "cannot tell": "CANNOT TELL: the clients' own texts, which are published as a control, pass, "
    "too. The texts are too short, or the clients too few.",
}


def audit_texts(
    texts: str | Path,
    training: str | Path | Population | None = None,
    held_out: str | Path | Population | None = None,
    *,
    out: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Compares what published texts have in common with training and with held-out clients.

    Args:
      texts: a source of public texts, see `jaxpfl.data.open`, or the directory of a finished run.
      training, held_out: sources of clients, dealt to the two sides at random; of a run those of
        its own parts `train` and `test`, unless they are given.
      out: the folder of what is written; None: that of the run, or nothing is written.

    Returns:
      the content of `leakage`, with "verdict", "fails", "cannot tell" or "passes"; "found", in a
      sentence; "text".

    Raises:
      InputError: a source cannot be read, or a side has no texts.
    """
    directory = Path(files.user_path(texts))
    if (directory / CORPUS).is_file():
        if training is None or held_out is None:
            data = load_run(directory).data
            parts = split_clients(read_clients(data), data)
            training, held_out = training or parts["train"], held_out or parts["test"]
        out, texts = out or directory, directory / CORPUS
    if training is None or held_out is None:
        raise InputError(
            f"{texts}: is no run that wrote a corpus: name --training and --held-out, the clients "
            "of whom these texts were made, and others"
        )
    sides = open_population(training), open_population(held_out)
    published = list(texts_of(open_population(texts, public=True)))
    result = leakage(published, *sides, seed=seed)
    verdict = "cannot tell" if not result["control"]["fails"] else "passes"
    verdict = "fails" if result["published"]["fails"] else verdict
    found = _SENTENCES[verdict].format(clients=sum(result["clients"].values()))
    sources = {"texts": str(texts), **dict(zip(SIDES, (side.name for side in sides), strict=True))}
    record = {"stamp": NOT_PUBLIC, **sources, **result, "verdict": verdict, "found": found}
    page = leakage_page(record)
    if out is not None:
        folder = files.user_path(out)
        files.private_directory((folder / RECORD).parent)
        files.write_json(folder / RECORD, record)
        write_page(folder, page)
    return {**record, "text": "\n".join([*page_lines(page), found])}


def leakage_page(record: Mapping[str, Any]) -> Page:
    """The page of an audit of texts, by its record; PRIVATE."""
    judged = {"these texts": record["published"], "clients' own (control)": record["control"]}
    shares, tests = [], []
    for name, result in judged.items():
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
    lengths = tuple(f"{words} words or more" for words in LENGTHS)
    of_texts = ("published", "beside", "texts", "longest", *lengths)
    of_clients = ("published", "words", "training", "held-out", "p", "would fail from")
    return Page(
        title="What published texts repeat of clients",
        lead="Exact counts of clients' own texts.",
        stamp=NOT_PUBLIC,
        privacy_notes=["Whoever sees this page learns of the clients what no noise hides."],
        sections=[
            Section("Verdict", record["found"]),
            Section(
                "Published texts by their longest run of words",
                f"Beside {record['searched']:,} texts of each side: the share with so many words "
                "in a row in common with a client's text. What everybody says repeats, too, "
                "beside held-out clients as beside training ones.",
                table=Table(of_texts, shares, (2, 3, 4, 5, 6, 7)),
            ),
            Section(
                "Clients with a run of words in the published texts",
                "Of {training:,} training and {held_out:,} held-out clients. ".format(
                    **record["clients"]
                )
                + "p is the probability of as many training clients, or more, if chance chose who "
                f"trains; it FAILS below {LEVEL / len(LENGTHS):g}, {LEVEL:.0%} for all lengths.",
                table=Table(of_clients, tests, (1, 2, 3, 4, 5)),
            ),
        ],
        warning=NOT_PUBLIC,
        name=str(Path(RECORD).with_suffix(".html")),
    )
