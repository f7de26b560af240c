"""What is said of texts that one look chose: in records, in a terminal and on pages."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpfl.algorithms.chosen_texts import Choice
from jaxpfl.experiments.report.page import Section, Table

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
    number, pool, size = choice["texts"], choice["pool"], choice["effective_size"]
    return [
        f"{number:,} of {pool:,} texts were chosen: {' + '.join(shares)}.",
        f"A text's weight is its chance to be taken. The weights are worth "
        f"{size:,.0f} texts of equal weight.",
        "Squared Frechet distance to the clients, estimated: "
        f"{', '.join(distances(choice['distances']))}. Where noise hides much, all three are too "
        "small: compare them with each other alone.",
    ]


def distances(values: Mapping[str, float]) -> list[str]:
    """What each of a choice's three distances is of."""
    return [f"{values[name]:.4g} of the {what}" for name, what in _OF.items()]


def of_repeats(number: int) -> str:
    """What `text_pool.without_repeats` left out."""
    return f"{number:,} texts were empty, or in the pool before, and left out."


def cautions(choice: Mapping[str, Any]) -> list[str]:
    """A sentence where single texts were not told apart."""
    if choice["kappa"] is not None:
        return []
    return [
        "No choice of single texts is nearer to the clients than the best mixture of corpora by "
        "more than the noise hides. So texts were taken at random from the best mixture."
    ]


def section(choice: Mapping[str, Any], stamp: str = "") -> Section:
    """The sentences of `lines`, and some of the texts, which are public."""
    texts = Table(("some of them",), [(text,) for text in choice["examples"]], style="sentences")
    return Section(
        "Single public texts, chosen by the same release",
        " ".join(lines(choice)),
        table=texts if choice["examples"] else None,
        stamps=[stamp] if stamp else [],
    )
