"""What is said of public corpora, and of texts that one look chose: in records and on pages."""

import statistics
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from jaxpfl.algorithms.chosen_texts import Choice
from jaxpfl.data.open import divided_into
from jaxpfl.data.population import Population
from jaxpfl.experiments.records.cautions import number
from jaxpfl.experiments.report.page import Section, Table
from jaxpfl.text.cut import MESSAGES, Cut

# The texts of a corpus whose words are counted.
_TEXTS = 20_000
# Of the drawn texts, so many are shown.
_EXAMPLES = 3
_OF = {"mixture": "best mixture of corpora", "chosen": "weighted texts", "drawn": "texts taken"}


def record_of(choice: Choice, text: Callable[[int], str] | None) -> dict[str, Any]:
    """A choice in JSON's types, without its weights; `text` gives the text of a row of the pool."""
    shown = choice.rows_M[np.linspace(0, len(choice.rows_M) - 1, _EXAMPLES).astype(int)].tolist()
    three = choice.mixture_distance, choice.distance, choice.drawn_distance
    return {
        "texts": len(choice.rows_M),
        "pool": len(choice.weights_N),
        "kappa": choice.kappa,
        "effective_size": choice.effective_size,
        "shares": choice.shares,
        "distances": dict(zip(_OF, three, strict=True)),
        "judged": dict(zip(_OF, choice.judged, strict=False)),
        "examples": [] if text is None else list(map(text, dict.fromkeys(shown))),
    }


def lines(choice: Mapping[str, Any]) -> list[str]:
    """What was chosen and how near it is, in a few sentences."""
    shares = (f"{share:.1%} {name}" for name, share in choice["shares"].items() if share > 0.0005)
    taken, pool, size = choice["texts"], choice["pool"], choice["effective_size"]
    return [
        f"{taken:,} of {pool:,} texts were chosen: {' + '.join(shares)}.",
        f"A text's weight is its chance to be taken. The weights are worth "
        f"{size:,.0f} texts of equal weight.",
        "Squared Frechet distance to the clients, estimated: "
        f"{', '.join(distances(choice['distances']))}. Where noise hides much, all three are too "
        "small: compare them with each other alone.",
    ]


def distances(values: Mapping[str, float]) -> list[str]:
    """What each of a choice's three distances is of."""
    return [f"{values[name]:.4g} of the {what}" for name, what in _OF.items()]


def of_repeats(repeated: int) -> str:
    """What `text_pool.without_repeats` left out."""
    return f"{repeated:,} texts were empty, or in the pool before, and left out."


def cautions(choice: Mapping[str, Any]) -> list[str]:
    """A sentence where single texts were not told apart."""
    why = (
        "No choice of single texts is nearer to the clients than the best mixture of corpora by "
        "more than the noise hides. So texts were taken at random from the best mixture."
    )
    return [] if choice["kappa"] is not None else [why]


def section(choice: Mapping[str, Any], stamp: str = "") -> Section:
    """The sentences of `lines`, and some of the texts, which are public."""
    texts = Table(("some of them",), [(text,) for text in choice["examples"]], style="sentences")
    table, stamps = texts if choice["examples"] else None, [stamp] if stamp else []
    title = "Single public texts, chosen by the same release"
    return Section(title, " ".join(lines(choice)), table=table, stamps=stamps)


def of_division(
    cut: str, clients: str | Population, corpora: Mapping[str, str], texts_of: Callable
) -> list[str]:
    """Warnings of public corpora whose texts are divided otherwise than the clients', or may be.

    They follow from the sources of `clients` and `corpora`, by name, their options and the rule
    `cut`; no client's text is read. `texts_of(name)` are a corpus's texts as they were cut.
    """
    rule, ours, warnings = Cut.parse(cut), divided_into(clients), []
    for name, source in corpora.items():
        theirs = divided_into(source)
        otherwise = rule == MESSAGES and theirs and ours not in ("", theirs)
        if not otherwise and rule.unit != "words":
            continue
        words = statistics.median(len(text.split()) for text in islice(texts_of(name), _TEXTS))
        if otherwise:
            why = f"are {theirs}, and those of clients are {ours}: the setting `cut` cuts all alike"
        elif words < rule.size:
            why = f"are mostly shorter than {cut}: of a table, ?client=FIELD joins rows"
        else:
            continue
        warnings.append(
            f"The texts of {name} (median: {number(words)} words) {why}. A part of what tells them "
            "apart may be their form alone."
        )
    return warnings
