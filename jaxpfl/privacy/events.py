"""The kinds of release, as `dp_accounting.DpEvent`s, and their form in a file.

| release                              | event                               | adjacency     |
|--------------------------------------|-------------------------------------|---------------|
| noisy sum over all clients           | Gaussian                            | either        |
| ... over a Poisson cohort            | PoissonSampled(Gaussian)            | add or remove |
| ... over a cohort of fixed size      | SampledWithoutReplacement(Gaussian) | replace one   |
| ... over a cohort that depends on N  | ZeroOut(Gaussian)                   | zero out one  |
| ... over a truncated Poisson cohort  | TruncatedSubsampledGaussian         | zero out one  |
| secure sum with integer noise        | ZCDp, see `privacy.secure_sum`      | zero out one  |
| the best of a random number of runs  | RepeatAndSelect(a run), `selection` | the run's     |
| anything without noise               | NonPrivate                          | either        |

and their (self-)compositions. A Gaussian's multiplier is the standard deviation of its noise
divided by the largest change that one client can make UNDER THE ADJACENCY IN USE: S when a client
is added, removed or zeroed, 2 S when one is replaced. Only `Plan` and `SecureSum` make events, so
that no caller has to choose.

"Zero out one" replaces a client's data by nothing: the client still takes part, and adds zero to
every sum, also to adaptive clipping's. A release under add-or-remove-one is as private under
zero-out-one, because here a client who is absent and one who adds zero give the same release: no
cohort then depends on other clients, and no noise or denominator on the cohort. So the two compose,
and the composition is under zero-out-one. The reverse does not hold, and is nowhere assumed.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import InputError

Adjacency = Literal["add_or_remove_one", "replace_one", "zero_out_one"]
Counts = Mapping[dp_accounting.DpEvent, int]


@dataclasses.dataclass(frozen=True)
class ZeroOut(dp_accounting.DpEvent):
    """A release whose cost holds if a client's data is replaced by nothing, and only then."""

    event: dp_accounting.DpEvent


# Each kind's name in a file, and there the names of its attributes.
_FORMS: dict[str, tuple[Any, dict[str, str]]] = {
    "none": (dp_accounting.NoOpDpEvent, {}),
    "non_private": (dp_accounting.NonPrivateDpEvent, {}),
    "gaussian": (dp_accounting.GaussianDpEvent, {"noise_multiplier": "noise_multiplier"}),
    "zero_concentrated": (dp_accounting.ZCDpEvent, {"rho": "rho", "xi": "xi"}),
    "poisson_sampled": (
        dp_accounting.PoissonSampledDpEvent,
        {"probability": "sampling_probability", "event": "event"},
    ),
    "sampled_without_replacement": (
        dp_accounting.SampledWithoutReplacementDpEvent,
        {"population": "source_dataset_size", "clients": "sample_size", "event": "event"},
    ),
    "repeated_and_selected": (
        dp_accounting.dp_event.RepeatAndSelectDpEvent,
        {"mean": "mean", "shape": "shape", "event": "event"},
    ),
    "truncated_poisson": (
        dp_accounting.TruncatedSubsampledGaussianDpEvent,
        {
            "population": "dataset_size",
            "probability": "sampling_probability",
            "at_most": "truncated_batch_size",
            "noise_multiplier": "noise_multiplier",
        },
    ),
    "zero_out": (ZeroOut, {"event": "event"}),
    "repeated": (dp_accounting.SelfComposedDpEvent, {"count": "count", "event": "event"}),
    "composed": (dp_accounting.ComposedDpEvent, {"events": "events"}),
}

ZEROED = (ZeroOut, dp_accounting.ZCDpEvent, dp_accounting.TruncatedSubsampledGaussianDpEvent)
"""The kinds of release whose cost is for a client who is zeroed, and not for one who is absent."""

_WHOLE = ("population", "clients", "count", "at_most")


def counts(event: dp_accounting.DpEvent) -> Counter[dp_accounting.DpEvent]:
    """Returns how often each elementary release happens in `event`."""
    total = Counter[dp_accounting.DpEvent]()
    for part, times in _parts(event):
        total[_elementary(part)] += times
    return total


def adjacency(event: dp_accounting.DpEvent) -> Adjacency:
    """Returns an event's adjacency; that of a release on everyone is add-or-remove-one."""
    kinds = {type(part) for part in noises(event)} - {dp_accounting.NonPrivateDpEvent}
    if dp_accounting.SampledWithoutReplacementDpEvent not in kinds:
        return "zero_out_one" if kinds & {*ZEROED} else "add_or_remove_one"
    if len(kinds) > 1:
        raise InputError(
            "the event mixes cohorts of fixed size or noise of clients' own (replace one) with "
            "other releases (add, remove or zero out one), which have no common epsilon"
        )
    return "replace_one"


def noises(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
    """Yields the releases that an event is made of; of a selection, those of one of its runs."""
    for part, _ in _parts(event):
        if isinstance(part, dp_accounting.dp_event.RepeatAndSelectDpEvent):
            yield from noises(part.event)
        else:
            yield part


def common(first: Adjacency, second: Adjacency) -> Adjacency | None:
    """Returns the adjacency of two releases together; None if they have none in common."""
    if first == second:
        return first
    return None if "replace_one" in (first, second) else "zero_out_one"


def to_json(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns the event as plain values; a selection in one form, whatever its runs are made of."""
    if isinstance(event, dp_accounting.dp_event.RepeatAndSelectDpEvent):
        event = _elementary(event)
    for name, (kind, fields) in _FORMS.items():
        if isinstance(event, kind):
            plain = {field: _plain(field, getattr(event, name)) for field, name in fields.items()}
            return {"type": name, **plain}
    raise _unknown(event)


def from_json(record: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """Returns the event that `to_json` wrote; others raise InputError, KeyError or TypeError."""
    if record["type"] not in _FORMS:
        raise InputError(f"unknown type of event {record['type']!r}")
    kind, fields = _FORMS[record["type"]]
    values = {attribute: record[field] for field, attribute in fields.items()}
    if "event" in values:
        values["event"] = from_json(values["event"])
    if "events" in values:
        values["events"] = [from_json(part) for part in values["events"]]
    if values.get("shape", 0.0) is None:
        values["shape"] = math.inf
    return kind(**values)


def _plain(field: str, value: Any) -> Any:
    if field == "event":
        return to_json(value)
    if field == "events":
        return [to_json(part) for part in value]
    if field == "shape" and math.isinf(value):
        return None  # JSON has no infinity.
    return int(value) if field in _WHOLE else float(value)


def _parts(event: dp_accounting.DpEvent, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The events that a composition is made of, and how often."""
    match event:
        case dp_accounting.NoOpDpEvent():
            return
        case dp_accounting.SelfComposedDpEvent():
            repeats = checks.non_negative_int("count of an event", event.count)
            if repeats:
                times = checks.positive_int("count of an event", times * repeats)
                yield from _parts(event.event, times)
        case dp_accounting.ComposedDpEvent():
            for part in event.events:
                yield from _parts(part, times)
        case _:
            yield event, times


def _elementary(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    match event:
        case dp_accounting.NonPrivateDpEvent():
            return event
        case dp_accounting.GaussianDpEvent():
            z = checks.non_negative("noise multiplier of an event", event.noise_multiplier)
            if z == 0:
                return dp_accounting.NonPrivateDpEvent()
            # Wider than `Noise` allows, because multipliers are relative to several shifts.
            if not 1e-12 <= z <= 1e12:
                raise InputError(
                    f"noise multiplier of an event must lie in 1e-12 .. 1e12, found {z:g}"
                )
            return event
        case ZeroOut(event=dp_accounting.GaussianDpEvent()):
            # A Gaussian on everyone costs the same under either adjacency.
            return _elementary(event.event)
        case dp_accounting.TruncatedSubsampledGaussianDpEvent():
            checks.open_fraction("sampling probability of an event", event.sampling_probability)
            checks.positive_int("population of an event", event.dataset_size)
            checks.positive_int("at_most of an event", event.truncated_batch_size)
            inner = _elementary(dp_accounting.GaussianDpEvent(event.noise_multiplier))
            return inner if isinstance(inner, dp_accounting.NonPrivateDpEvent) else event
        case dp_accounting.ZCDpEvent():
            checks.positive("rho of an event", event.rho)
            checks.non_negative("xi of an event", event.xi)
            return event
        case dp_accounting.PoissonSampledDpEvent(event=dp_accounting.GaussianDpEvent()):
            name, rate = "sampling probability of an event", event.sampling_probability
            everyone = checks.positive_fraction(name, rate) == 1
        case dp_accounting.SampledWithoutReplacementDpEvent(event=dp_accounting.GaussianDpEvent()):
            population = checks.positive_int("population of an event", event.source_dataset_size)
            clients = checks.positive_int("clients of an event", event.sample_size)
            everyone = clients == population
            if clients > population:
                limit = f"its population of {population}"
                raise InputError(f"clients of an event must be at most {limit}, found {clients}")
        case dp_accounting.dp_event.RepeatAndSelectDpEvent():
            mean = checks.at_least_one("mean of an event", event.mean)
            if event.shape not in (0, 1, math.inf):
                raise InputError(f"shape of an event must be 0, 1 or inf, found {event.shape!r}")
            if any(isinstance(part, ZeroOut) for part in noises(event.event)):
                # Counted as its Gaussian, it would lose its adjacency.
                raise InputError(
                    "cannot account for a private selection among runs with a minimum separation; "
                    "expected runs under add-or-remove-one"
                )
            # In one order and with a hash, as equal events must count as one.
            runs = sorted(counts(event.event).items(), key=repr)
            parts = tuple(dp_accounting.SelfComposedDpEvent(*pair) for pair in runs)
            if any(isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf, _ in runs):
                return dp_accounting.NonPrivateDpEvent()
            one = dp_accounting.ComposedDpEvent(parts)  # pyright: ignore[reportArgumentType]
            return dp_accounting.dp_event.RepeatAndSelectDpEvent(one, mean, event.shape)
        case _:
            raise _unknown(event)
    # A sampled Gaussian; to sample everyone is not to sample.
    inner = _elementary(event.event)
    return event if isinstance(inner, dp_accounting.GaussianDpEvent) and not everyone else inner


def _unknown(event: object) -> InputError:
    return InputError(
        f"cannot account for {type(event).__name__}; expected Gaussian noise on everyone, on a "
        "Poisson cohort or on a cohort of fixed size, a secure sum, a selection, or a composition "
        "of these"
    )
