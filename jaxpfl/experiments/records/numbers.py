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


def duration(seconds: float) -> str:
    """A duration in the two largest of its units, such as "2 min 5 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
