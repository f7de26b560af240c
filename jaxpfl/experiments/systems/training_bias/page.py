"""The page of the study of training bias: how much the public data lacks, and what."""

from pathlib import Path
from typing import Any

from jaxpfl.experiments.records.cautions import percent
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.systems.training_bias.study import MODEL
from jaxpfl.experiments.systems.worlds import page_fields, ranked


def page(directory: Path, record: dict[str, Any]) -> Page:
    """Makes the tables from the record."""
    worlds, drawn, bias = list(record["worlds"].values()), record["drawn"], record["bias"]
    plan = record["plans"][MODEL]
    titles = [f"bias of {100 * world['share']:g} %" for world in worlds]
    rows, shown = [], []
    for title, world in zip(titles, worlds, strict=True):
        clients = f"{percent(world['rare_share'])} ± {percent(world['rare_noise'])}"
        drawn_shares = percent(world["missing_share"]), percent(world["planted_share"])
        rows.append((title, clients, *drawn_shares))
        shown.append([(each["text"], f"{each['excess']:.2f}") for each in world["top"]])
    columns = ("", "rare sentences of the clients", "drawn: missing in public", "drawn: planted")
    return Page(
        title="What does the public training data lack? A private language model",
        lead=f"{record['population']} · a client: {record['unit']} · public: {record['public']}",
        **page_fields(record),
        facts=[
            (f"{plan['rounds']}", "rounds"),
            (f"{plan['clients_per_round']:g}", "clients in a round (expected)"),
            (f"{plan['noise_multiplier']:.3g}", "noise multiplier"),
            (f"{drawn['sentences']:,}", "drawn sentences"),
        ],
        sections=[
            Section(
                "How much the public data lacks",
                f"A sentence is rare if the public model gives it less than to all but "
                f"{percent(record['rare'])} of held-out public sentences; the share of the clients "
                "is a private count with the standard deviation of its noise. The private model is "
                f"trained on rare ones alone. Missing: its words are {drawn['excess']:g} nats more "
                "probable by the private model. Planted: nearer by the frequencies of words to "
                f"{bias['source']}, from which some simulated clients write, than to the public.",
                table=Table(columns, rows, (1, 2, 3)),
            ),
            Section(
                "What it lacks: drawn sentences of the greatest excess",
                f"By how much each word is more probable than by the model of {record['public']}, "
                "in the mean.",
                table=ranked(titles, "excess, nats", shown),
            ),
        ],
    )
