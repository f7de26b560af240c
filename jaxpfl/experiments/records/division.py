"""Warns of public corpora whose texts are divided otherwise than the clients'.

The warnings follow from public sources, their options and the rule that cuts texts; no client's
text is read.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from jaxpfl.data.open import divided_into
from jaxpfl.data.population import Population
from jaxpfl.experiments.records.cautions import number
from jaxpfl.text.cut import MESSAGES, Cut

# The texts of a corpus whose words are counted.
_TEXTS = 20_000


def of_division(
    cut: str,
    clients: str | Population,
    corpora: Mapping[str, str],
    texts_of: Callable[[str], Iterable[str]],
) -> list[str]:
    """Warnings of public corpora whose texts have another form than the clients', or may have.

    Args:
      cut: the rule by which both were cut, see `text.cut`.
      clients: their source, of which the options are read, and no text.
      corpora: the source of each corpus by name; `texts_of(name)` are its texts as they were cut.
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
