"""The page of the study of joined words: where words are out of vocabulary, and which ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import percent
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.systems.worlds import RATE, page_fields, ranked


def page(directory: Path, record: dict[str, Any]) -> Page:
    """Draws the picture from the record."""
    worlds, drawn = list(record["worlds"].values()), record["drawn"]
    source, size = record["vocabulary"]["source"], record["vocabulary"]["size"]
    titles = [f"bug in {100 * world['share']:g} %" for world in worlds]
    axes = plots.axes("Out-of-vocabulary rate by position", stamp=mark_of(record["stamp"]))
    rows, tops = [], []
    for index, (title, world) in enumerate(zip(titles, worlds, strict=True)):
        # There is no rate where no sentence has a word.
        rates, generated = 100 * np.array(world["oov_by_position"], float), world["oov_generated"]
        label = f"{title} of sentences; {percent(generated)} overall"
        plots.curve(axes, list(enumerate(rates, 1)), index, label=label)
        first, top = percent(world["oov_by_position"][0]), world["top_words"]
        clients = f"{percent(world['oov_overall'])} ± {percent(world['oov_noise'])}"
        spaces = f"{sum(' ' in each['word'] for each in top)} of {len(top)}"
        rows.append((title, clients, first, percent(generated), spaces))
        shown = [each["word"].replace(" ", " ␣ ") for each in top]
        probabilities = [percent(math.exp(each["log_probability"])) for each in top]
        tops.append(list(zip(shown, probabilities, strict=True)))
    # Rates of 1 % and of 90 % must both be visible.
    plots.logarithmic(axes)
    picture = plots.labelled(axes, "position in the sentence", "% of words", legend=True)
    columns = ("", "OOV of the clients", "generated: OOV at position 1", "OOV overall")
    columns += ("top words with a space",)
    return Page(
        title="Which words does the vocabulary lack? Federated language models",
        lead=f"{record['population']} · a client: {record['unit']} · vocabulary of {size:,} words "
        f"from {source}",
        **page_fields(record),
        facts=[
            (f"{plan[name]:g}", f"{name.replace('_', ' ')}, {kind} model")
            for name in ("rounds", "clients_per_round", "noise_multiplier")
            for kind, plan in record["plans"].items()
            if kind != RATE
        ],
        sections=[
            Section(
                "Where: words out of vocabulary (OOV) by their position in generated sentences",
                f"{drawn['sentences']:,} sentences drawn from each word model, against the "
                f"vocabulary of {source}. The bug joins the first two words of a share of the "
                "sentences. The rate of the clients is of their own sentences, as a private count "
                "with the standard deviation of its noise.",
                [("oov_by_position", "OOV rate by position", picture)],
                Table(columns, rows, (1, 2, 3, 4)),
            ),
            Section(
                f"Which: the {drawn['top']} most probable words of the character models",
                f"The character models are trained only on words out of the vocabulary of {source}."
                " The probability is that of the whole word and its end. The bug makes words that "
                "contain a space (marked ␣).",
                table=ranked(titles, "probability by the model", tops),
            ),
        ],
    )
