"""Which examples a generative model is trained on: the tasks T1, T2, T4 and T5 as criteria.

Where a modeller would want to see examples of some kind, a generative model is trained on exactly
these examples, and the modeller sees what it generates. Source: Augenstein et al. 2020 ("Generative
models for effective ML on private, decentralized datasets"), Table 1 and section 2.1. T3 is
`text.character.words.oov_words`, T6 `text.metrics.prediction.unlikely`.

A criterion is bool [examples] and PRIVATE; criteria combine by & and |. In a deployment every
client applies the criterion to its own data, with public constants. `Population.keeping` returns
the population to train on.

Which clients are selected is private, and so is their number. A client without selected examples
therefore stays in the population and contributes exactly 0, and nothing, such as a denominator or
epsilon, depends on how many clients match. The price is that updates are diluted by the share of
clients that match. Use a constant clip norm: an adaptive one follows a quantile over ALL sampled
clients, and the zeros of those without a match draw it towards 0.

A threshold is a public constant. One that follows from private accuracies is itself a release:
compute it by `algorithms.federated_metrics`, which charges it.
"""

from typing import Any, Literal

import numpy as np

from jaxpfl import checks
from jaxpfl.data.draws import example_uniforms, place_in_client
from jaxpfl.data.population import Population, offsets_of, one_per_example
from jaxpfl.errors import InputError

Outcome = Literal["correct", "incorrect"]
Side = Literal["below", "above"]


def random_examples(population: Population, fraction: float, seed: int) -> np.ndarray:
    """T1 and T5: selects a random share of the examples, bool [examples]. PRIVATE.

    A client's selection does not depend on which other clients take part: see `data.draws`.
    """
    fraction = checks.fraction("fraction", fraction)
    ids, offsets = population.client_ids, population.offsets
    return example_uniforms("random examples", seed, ids, offsets) < fraction


def at_most(population: Population, limit: int, seed: int) -> np.ndarray:
    """Selects at most `limit` random examples of each client, bool [examples]. PRIVATE."""
    checks.positive_int("limit", limit)
    draws_N = example_uniforms("at most", seed, population.client_ids, population.offsets)
    clients_N = np.repeat(np.arange(len(population)), population.sizes())
    chosen = np.zeros(population.num_examples, bool)
    chosen[np.lexsort((draws_N, clients_N))] = place_in_client(population.offsets) < limit
    return chosen


def classified_examples(
    population: Population, correct: Any, outcome: Outcome = "incorrect", at_least: int = 5
) -> np.ndarray:
    """T2: selects what the primary model classified wrongly, or rightly: bool [examples]. PRIVATE.

    Args:
      correct: bool [examples], from `federated.clients.evaluation.correct_examples`.
      at_least: only clients with this many such examples match; 5 in the paper, appendix C.4.
    """
    checks.one_of("outcome", outcome, ("correct", "incorrect"))
    correct = one_per_example(population, "correct", correct)
    wanted = correct if outcome == "correct" else ~correct
    enough = _count_by_client(population, wanted) >= checks.positive_int("at_least", at_least)
    return wanted & np.repeat(enough, population.sizes())


def examples_of_users(
    population: Population, correct: Any, side: Side, threshold: float
) -> np.ndarray:
    """T4 by user: selects all examples of users by the primary model's accuracy on their data.

    The result is bool [examples] and PRIVATE. A client without examples is never selected.

    Args:
      correct: as for `classified_examples`.
      side, threshold: users with an accuracy STRICTLY "below" or "above" this public constant in
        0 .. 1 are selected.
    """
    checks.one_of("side", side, ("below", "above"))
    threshold = checks.fraction("threshold", threshold)
    correct = one_per_example(population, "correct", correct)
    sizes = population.sizes()
    hits = _count_by_client(population, correct)
    accuracy = np.divide(hits, sizes, out=np.full(len(population), np.nan), where=sizes > 0)
    # Comparisons with NaN, the accuracy of a client without examples, are False.
    return np.repeat(accuracy < threshold if side == "below" else accuracy > threshold, sizes)


def examples_of_slice(population: Population, column: str, value: str) -> np.ndarray:
    """T4 by slice: selects the examples with a PUBLIC value in a column, bool [examples]. PRIVATE.

    The column has one number or text for each example, such as its class or the client's country;
    `value` is as text.
    """
    values = population.columns.get(column)
    if values is not None and not isinstance(values, np.ndarray):
        values = values.to_numpy(zero_copy_only=False)
    if values is None or values.ndim != 1:
        expected = f"a column {column!r} with one value for each example"
        raise InputError(f"expected {expected}, found {population.column_types()}")
    return values.astype(str) == value


def _count_by_client(population: Population, chosen: np.ndarray) -> np.ndarray:
    """How many examples of each client are kept, int64 [clients]."""
    return np.diff(offsets_of(chosen)[population.offsets])
