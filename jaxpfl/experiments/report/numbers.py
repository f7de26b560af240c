"""Numbers as pages and terminals show them."""

import math


def number(value: float | None) -> str:
    """Four digits; "not finite" for NaN, infinities, and None, which stands for them in JSON."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share as a percentage; "" for a share of nothing."""
    return "" if share is None else f"{100 * share:.2f} %"
