"""Which examples a generative model is trained on: the tasks T1 to T6 as criteria.

Augenstein et al. 2020 ("Generative models for effective ML on private, decentralized datasets"),
Table 1 and section 2.1: where a modeller would look at examples of some kind, a model is trained on
exactly these, and what it generates is looked at.

| task | examples used                                                  | here                  |
|------|----------------------------------------------------------------|-----------------------|
| T1   | a random share                                                 | `random_examples`     |
| T2   | those that the primary model got wrong (or right)              | `classified_examples` |
| T3   | words out of vocabulary                                        | `text.metrics.oov`    |
| T4   | all of the users for whom the primary model does badly (well)  | `examples_of_users`   |
| T5   | a random share, to be labelled by humans                       | `unlabelled_examples` |
| T6   | those unlike a public corpus, by likelihoods                   | `unlike_public`       |

A criterion is bool [examples], PRIVATE; criteria combine by & and |. On a deployment every client
applies it to its own data, with public constants. `select` then gives the population to train on.

Who is selected is private, and so is how many are. Therefore nobody leaves the population: a client
without a match stays, with no examples, and contributes exactly 0. Cohorts are drawn from the whole
public N and sums are divided by a public constant, so that noise, denominators, epsilon and printed
sizes tell nothing of how many match; a cohort may be planned by a RELEASED estimate of it. Sampling
from the matching clients alone, or dividing by their number, would publish that number, and charge
an epsilon for it that nobody knows. The price: updates are diluted by the share that matches, and
adaptive clipping, which follows a quantile of ALL clients drawn, falls towards the zeros of those
without a match: use a constant clip norm.

Thresholds are public constants. One that is computed from private accuracies, such as a percentile
of them, is itself a release: make it by `algorithms.federated_metrics` and pay for it.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxpfl import checks
from jaxpfl.data.coins import example_uniforms
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError

Outcome = Literal["correct", "incorrect"]


def select(population: Population, kept: Any, at_least: int = 1) -> Population:
    """The same clients with only the examples where `kept` is true.

    Clients that keep none stay, with no examples (see the head of this file); the fingerprint stays
    too, so that training on any selection is charged to the one ledger of these clients.

    Args:
      kept: bool [examples], PRIVATE.
      at_least: a client with fewer kept examples keeps none.

    Raises:
      InputError: `kept` is not one boolean an example; `at_least` is below 1.
    """
    kept = _one_per_example(population, "kept", kept, "b")
    return population.keeping(kept & _of_clients_with(population, kept, at_least))


def random_examples(population: Population, fraction: float, seed: int) -> np.ndarray:
    """T1: a random share of the examples, bool [examples]. PRIVATE.

    Each example's coin depends on the seed, its client's id and its place among that client's
    examples, so that no client's examples depend on who else takes part.
    """
    fraction = checks.fraction("fraction", fraction)
    return example_uniforms("random examples", seed, population) < fraction


def at_most(population: Population, limit: int, seed: int) -> np.ndarray:
    """A random subset of each client's examples, `limit` or all it has, bool [examples]. PRIVATE.

    Coins as in `random_examples`: no client's examples depend on who else takes part.
    """
    checks.positive_int("limit", limit)
    coins_N = example_uniforms("at most", seed, population)
    clients_N = np.repeat(np.arange(len(population)), population.sizes())
    order_N = np.lexsort((coins_N, clients_N))
    kept = np.zeros(population.num_examples, bool)
    place_N = np.arange(population.num_examples) - np.repeat(
        population.offsets[:-1], population.sizes()
    )
    kept[order_N] = place_N < limit
    return kept


def classified_examples(
    population: Population, correct: Any, outcome: Outcome = "incorrect", at_least: int = 5
) -> np.ndarray:
    """T2: the examples that the primary model got wrong, or right, bool [examples]. PRIVATE.

    Args:
      correct: bool [examples], of `federated.evaluation.correct_examples`.
      outcome: which are wanted.
      at_least: only of clients with this many such examples (5 in the paper, appendix C.4).
    """
    checks.one_of("outcome", outcome, ("correct", "incorrect"))
    correct = _one_per_example(population, "correct", correct, "b")
    wanted = correct if outcome == "correct" else ~correct
    return wanted & _of_clients_with(population, wanted, at_least)


def examples_of_users(
    population: Population,
    correct: Any,
    *,
    below: float | None = None,
    above: float | None = None,
) -> np.ndarray:
    """T4: all examples of users by the primary model's accuracy on their own data. PRIVATE.

    A client without examples has no accuracy and matches neither side.

    Args:
      correct: bool [examples], of `federated.evaluation.correct_examples`.
      below: selects users with accuracy STRICTLY below it; a public constant in 0 .. 1.
      above: selects users with accuracy STRICTLY above it. Give exactly one of the two.

    Returns:
      bool [examples], PRIVATE.

    Raises:
      InputError: not exactly one threshold, or one out of range.
    """
    if (below is None) == (above is None):
        raise InputError("examples_of_users needs either below or above, found both or neither")
    accuracy = user_accuracies(population, correct)
    # NaN, the accuracy of a client without examples, is on neither side.
    if below is not None:
        matches = accuracy < checks.fraction("below", below)
    else:
        matches = accuracy > checks.fraction("above", above)
    return np.repeat(matches, population.sizes())


def user_accuracies(population: Population, correct: Any) -> np.ndarray:
    """Each client's share of correct examples, float64 [clients]; NaN without any. PRIVATE."""
    correct = _one_per_example(population, "correct", correct, "b")
    sizes = population.sizes()
    hits = _count_by_client(population, correct)
    return np.divide(hits, sizes, out=np.full(len(population), np.nan), where=sizes > 0)


def unlabelled_examples(
    population: Population, fraction: float, seed: int, labels: Sequence[str] = ("label",)
) -> Population:
    """T5: a random share of the examples without their labels, as a generator is to learn them.

    What is generated is labelled by humans; the clients' labels, if any, take no part.

    Args:
      fraction, seed: as in `random_examples`.
      labels: the columns that are dropped; those not there are passed over.

    Raises:
      InputError: a parameter is out of range, or no column is left.
    """
    kept = random_examples(population, fraction, seed)
    columns = {name: held for name, held in population.columns.items() if name not in labels}
    if not columns:
        raise InputError(f"no column is left without {', '.join(labels)}")
    return select(population.with_columns(columns), kept)


def unlike_public(
    population: Population,
    log_public: Any,
    threshold: float,
    log_private: Any | None = None,
) -> np.ndarray:
    """T6: examples that a public corpus lacks, by likelihood models, bool [examples]. PRIVATE.

    Sketched in the paper's section 2.1. With `log_private`: where the density ratio
    log p_private(x) - log p_public(x) exceeds `threshold`. Without: where log p_public(x) is below
    `threshold`. Texts of different lengths compare by log-likelihood PER TOKEN.

    Args:
      log_public: float [examples], nats under a model of PUBLIC data.
      threshold: a public constant, in the same nats.
      log_private: float [examples], nats under a model of the private data that was trained with
        DP and charged to their ledger.

    Returns:
      True also where p_public is 0; False where a likelihood is NaN, or both are 0.
    """
    threshold = checks.real("threshold", threshold)
    log_public = _one_per_example(population, "log_public", log_public, "f")
    if log_private is None:
        return log_public < threshold
    log_private = _one_per_example(population, "log_private", log_private, "f")
    with np.errstate(invalid="ignore"):
        return log_private - log_public > threshold


def _of_clients_with(population: Population, kept: np.ndarray, at_least: int) -> np.ndarray:
    at_least = checks.positive_int("at_least", at_least)
    enough = _count_by_client(population, kept) >= at_least
    return np.repeat(enough, population.sizes())


def _count_by_client(population: Population, kept: np.ndarray) -> np.ndarray:
    """How many examples of each client are kept, int64 [clients]."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept, dtype=np.int64)])
    return np.diff(before[population.offsets])


def _one_per_example(population: Population, name: str, values: Any, kind: str) -> np.ndarray:
    array = np.asarray(values)
    expected = {"b": "booleans", "f": "floats"}[kind]
    if array.dtype.kind != kind or array.ndim != 1:
        raise InputError(
            f"{name} must be {expected} [examples], found {array.dtype} with {array.ndim} axes"
        )
    # Of a selected population, the number of examples is private: the message does not tell it.
    if len(array) != population.num_examples:
        raise InputError(f"{name} must have one value an example, found another number")
    return array
