"""The best of a random number of runs: how many there are, and what the choice costs.

To try settings on private clients and keep the best is a release of its own. If the number K of
tries is secret and drawn from one of these laws, and each try draws its setting anew, the best one
alone costs little more than one try, however many there were (Liu and Talwar 2019; Papernot and
Steinke 2022, "Hyperparameter tuning with Renyi differential privacy", Theorems 2 and 6):

| law         | shape    | K         | Renyi divergence at order a of the best, from R of a try    |
|-------------|----------|-----------|-------------------------------------------------------------|
| geometric   | 1        | 1, 2, ... | R(a) + log(m) / (a - 1) + 2 min (1 - 1/b) R(b) - log(g) / b |
| logarithmic | 0        | 1, 2, ... | R(a) + log(m) / (a - 1) + min (1 - 1/b) R(b) - log(g) / b   |
| poisson     | infinity | 0, 1, ... | R(a) + log(m) / (a - 1) + m d                               |

m is the mean of K, g the probability parameter that gives it, b any order, and d the delta of a try
at the epsilon log(1 + 1 / (a - 1)). The event is dp-accounting's `RepeatAndSelectDpEvent`. K must
not be cut at a largest number, and nothing may be told of the tries that were not chosen, nor K.
"""

import functools
import math
from typing import Literal, get_args

import numpy as np
import scipy
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

from jaxpfl import checks

Law = Literal["geometric", "logarithmic", "poisson"]
SHAPES: dict[Law, float] = dict(zip(get_args(Law), (1.0, 0.0, math.inf), strict=True))
"""The name of a law in dp-accounting's terms: the shape of a truncated negative binomial."""


def number(law: Law, mean: float, uniform: int) -> int:
    """Returns K, drawn from the law with this mean by a uniform number of 128 bits. PRIVATE.

    The law is met up to a total variation of 1e-12, by which the delta of the choice grows.
    """
    checks.one_of("law", law, get_args(Law))
    mean, shape = checks.at_least_one("mean", mean), SHAPES[law]
    # Papernot and Steinke 2022, Definition 1: the first value's probability, and each next one's.
    stop = 0.0 if law == "poisson" else parameter(shape, mean)
    count, log_probability = (0, -mean) if law == "poisson" else (1, math.log(stop))
    if law == "logarithmic" and stop < 1:
        log_probability = math.log((1 - stop) / -math.log(stop))
    share, total = (uniform >> 75) * 2.0**-53, 0.0
    while (total := total + math.exp(log_probability)) <= share:
        if log_probability < -41.4 and count > mean:  # a probability below 1e-18
            break
        grown = mean if law == "poisson" else (1 - stop) * (count + shape)
        log_probability += math.log(grown / (count + 1))
        count += 1
    return count


@functools.lru_cache(maxsize=64)
def parameter(shape: float, mean: float) -> float:
    """Returns g, the probability parameter of the geometric or logarithmic law with this mean."""
    if shape == 1 or mean == 1:
        return 1 / mean

    def excess(log_odds: float) -> float:
        odds = math.exp(log_odds)  # 1 / g - 1
        return odds / math.log1p(odds) - mean

    odds = math.exp(scipy.optimize.brentq(excess, -60.0, 60.0, xtol=1e-14))  # pyright: ignore
    return 1 / (1 + odds)


def divergences(orders: np.ndarray, one: np.ndarray, mean: float, shape: float) -> np.ndarray:
    """Returns the Renyi divergences of the best of K tries at `orders`, all above 1.

    `one` has those of a single try, whatever setting it draws; K has the law of mean and shape.
    """
    whole = one + math.log(mean) / (orders - 1)
    if math.isinf(shape):
        near = np.log1p(1 / (orders - 1))
        pairs = orders.tolist(), one.tolist()
        delta = [compute_delta(*pairs, epsilon)[0] for epsilon in near.tolist()]
        whole = whole + mean * np.array(delta)
    else:
        chosen = (1 - 1 / orders) * one - math.log(parameter(shape, mean)) / orders
        whole = whole + (1 + shape) * np.min(chosen)
    # A divergence grows with its order, so that a larger order's bound holds, too.
    return np.minimum.accumulate(whole[::-1])[::-1]
