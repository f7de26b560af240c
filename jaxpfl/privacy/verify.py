"""Checks certificates of privacy with dp-accounting alone: it imports nothing else of jaxpfl.

    python verify.py CERTIFICATE ... [--ledger FILE] [--weights FOLDER] [--together]

Copy this file to a machine that has Python and dp-accounting. It computes every epsilon again from
the charged events, by its own code, and compares ledgers and weights with what a certificate says
of them; docs/certificate.md says what that is. If something does not fit, it ends with status 1 and
a sentence that says what.
"""

import argparse
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting import pld, rdp

FORMAT = "jaxpfl certificate 1"
TOLERANCE = 2e-3
"""By this share of an epsilon, two grids of privacy losses may differ."""

_POISSON, _FIXED = dp.PoissonSampledDpEvent, dp.SampledWithoutReplacementDpEvent

_ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)]
# The fields of each kind of record: NAME is a string, NAME:TYPE another thing.
_FIELDS = {
    "certificate": "format system stamp statement seal versions:record weights:record "
    "not_covered:list ledgers:[ledger]",
    "ledger": "name unit adjacency population key head lines:whole charges:[charge] "
    "queries:[query] runs:record delta:number? epsilon:number? curve:[point] trade_off:[test]",
    "charge": "run label identity round:whole event:record",
    "query": "run label plan:record event:record captured:list flow_checked:bool",
    "point": "delta:number epsilon:number",
    "test": "false_positives:number false_negatives:number",
    "none": "type",
    "non_private": "type",
    "gaussian": "type noise_multiplier:number",
    "zero_concentrated": "type rho:number xi:number",
    "poisson_sampled": "type probability:number event:record",
    "sampled_without_replacement": "type population:whole clients:whole event:record",
    "repeated": "type count:whole event:record",
    "composed": "type events:list",
}
_TYPES: dict[str, Any] = {"": str, "record": dict, "list": list, "whole": int, "bool": bool}
_TYPES |= {"number": (int, float), "number?": (int, float, type(None))}


class Unfit(Exception):
    """Something does not fit; the message says where and what."""


class Releases:
    """What the events of some charges cost together.

    Attributes:
      adjacency: that they share.
      noisy, private: whether any of them has noise, and whether all have.
      epsilon: `(delta) -> epsilon`, an upper bound; infinite if a release has no noise.
    """

    def __init__(self, charges: Sequence[Any]) -> None:
        leaves: Counter[dp.DpEvent] = Counter()
        for number, charge in enumerate(charges, 1):
            with at(f"charge {number}"):
                _count(charge["event"], 1, leaves)
        leaves = +leaves  # not those that are repeated 0 times
        kinds = {type(leaf) for leaf in leaves}
        fixed = _FIXED in kinds
        need(not fixed or not {_POISSON, dp.ZCDpEvent} & kinds, "two kinds of adjacency")
        self.adjacency = "replace_one" if fixed else "add_or_remove_one"
        self.private = dp.NonPrivateDpEvent not in kinds
        self.noisy = bool(kinds - {dp.NonPrivateDpEvent})
        self.epsilon = _epsilon_of(leaves, kinds) if self.private else lambda delta: math.inf


def _count(event: Any, times: int, leaves: Counter[dp.DpEvent]) -> None:
    kind = event.get("type") if isinstance(event, dict) else None
    need(kind in _FIELDS, f"has an event of the unknown type {kind!r}")
    _check_fields(event, str(kind))
    if kind == "composed":
        for part in event["events"]:
            _count(part, times, leaves)
    elif kind == "repeated":
        need(event["count"] >= 0, "repeats an event a negative number of times")
        _count(event["event"], times * event["count"], leaves)
    elif kind != "none":
        leaves[_leaf(str(kind), event)] += times


def _leaf(kind: str, event: dict[str, Any]) -> dp.DpEvent:
    if kind == "non_private":
        return dp.NonPrivateDpEvent()
    if kind == "zero_concentrated":
        need(event["rho"] > 0 and event["xi"] >= 0, "has a rho or xi out of range")
        return dp.ZCDpEvent(float(event["rho"]), float(event["xi"]))
    inner = event if kind == "gaussian" else event["event"]
    _check_fields(inner, "gaussian")
    z = float(inner["noise_multiplier"])
    need(z >= 0 and inner["type"] == "gaussian", "has no Gaussian noise")
    found: dp.DpEvent = dp.GaussianDpEvent(z)
    # To sample everyone is not to sample.
    if kind == "poisson_sampled":
        q = float(event["probability"])
        need(0 < q <= 1, f"has the sampling probability {q:g}")
        found = _POISSON(q, found) if q < 1 else found
    if kind == "sampled_without_replacement":
        clients, population = event["clients"], event["population"]
        need(0 < clients <= population, "samples more clients than there are")
        found = _FIXED(population, clients, found) if clients < population else found
    return found if z else dp.NonPrivateDpEvent()


def _epsilon_of(leaves: Counter[dp.DpEvent], kinds: set[type]) -> Callable[[float], float]:
    """Epsilon as a function of delta; every release has noise."""
    # Gaussians on everyone are together one, of shift / noise = mu.
    on_everyone = {e: n for e, n in leaves.items() if isinstance(e, dp.GaussianDpEvent)}
    mu = math.sqrt(sum(n / e.noise_multiplier**2 for e, n in on_everyone.items()))
    if kinds <= {dp.GaussianDpEvent}:
        return lambda delta: float(dp.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0
    if kinds <= {dp.GaussianDpEvent, _POISSON}:
        parts = [(each, n) for each, n in leaves.items() if each not in on_everyone]
        parts += [(_POISSON(1.0, dp.GaussianDpEvent(1 / mu)), 1)] if mu else []
        losses = pld.PLDAccountant(value_discretization_interval=min(_step(*p) for p in parts))
        for part in parts:
            losses.compose(*part)
        return lambda delta: float(losses.get_epsilon(delta))
    neighbours = "REPLACE_ONE" if _FIXED in kinds else "ADD_OR_REMOVE_ONE"
    renyi = rdp.RdpAccountant(_ORDERS, dp.NeighboringRelation[neighbours])
    # Bounds of sums of integer noise are proven at whole orders; (order - 1) times them is convex.
    whole = np.arange(1.0, 65.0)
    bounds = np.zeros_like(whole)
    for each, times in leaves.items():
        if isinstance(each, dp.ZCDpEvent):
            bounds += times * (whole - 1) * (each.xi + each.rho * whole)
        else:
            renyi.compose(each, times)
    total = renyi.rdp + np.interp(_ORDERS, whole, bounds) / (np.array(_ORDERS) - 1)
    return lambda delta: float(rdp.compute_epsilon(_ORDERS, total.tolist(), delta)[0])


def _step(sampled: Any, times: int) -> float:
    """Of the grid of privacy losses: fine enough for TOLERANCE, with some 10^5 points at most."""
    q, z = sampled.sampling_probability, sampled.event.noise_multiplier
    deviation = q * math.sqrt(math.expm1(min(z**-2, 50.0)))
    return max(min(1e-4 if times > 250 else 5e-4, deviation / 100), (1 / z + 20) / (2 * z) / 2e5)


def check(certificate: Any) -> list[Releases]:
    """Checks what follows from the certificate alone; returns the releases of its ledgers."""
    _check_fields(certificate, "certificate")
    need(certificate["format"] == FORMAT, f"is not of the format {FORMAT!r}")
    content = {name: value for name, value in certificate.items() if name != "seal"}
    need(certificate["seal"] == digest_of(content), "was changed after it was sealed")
    found, costs, stamp = [], [], certificate["stamp"]
    for number, ledger in enumerate(certificate["ledgers"], 1):
        with at(f"ledger {number}"):
            found.append(_check_ledger(ledger))
            costs += [cost for cost in ledger["runs"].values() if cost is not None]
    need(stamp or all(releases.private for releases in found), "lacks the stamp NOT PRIVATE")
    least = min(costs, default=0.0) * (1 - TOLERANCE)
    for stated in re.findall(
        r"epsilon = ([0-9]+\.?[0-9]*(?:e[+-][0-9]+)?)", certificate["statement"]
    ):
        said = f"its statement says epsilon = {stated}, the cheapest of its runs cost {least:.6g}"
        need("SIMULATED" in stamp or float(stated) >= least, said)
    return found


def _check_ledger(ledger: Any) -> Releases:
    charges = ledger["charges"]
    planned = {(query["run"], query["label"]): query["event"] for query in ledger["queries"]}
    for number, charge in enumerate(charges, 1):
        event = planned.get((charge["run"], charge["label"]), charge["event"])
        said = f"charge {number}: is not what its query's plan charges"
        need(charge["event"] == event, said)
    asked = {(charge["run"], charge["label"]) for charge in charges}
    need(planned.keys() <= asked, "describes a query that was not asked")
    need(len({charge["identity"] for charge in charges}) == len(charges), "charges a release twice")
    releases, delta = Releases(charges), ledger["delta"]
    need(ledger["unit"] in ("client", "example"), f"has the unit {ledger['unit']!r}")
    fits = not releases.noisy or ledger["adjacency"] == releases.adjacency
    need(fits, f"has the adjacency {releases.adjacency}, not {ledger['adjacency']}")
    need(ledger["lines"] > len(charges), "has more charges than lines")
    if delta is None:
        need(not charges or not releases.private, "states no delta")
        return releases
    need(ledger["runs"].keys() == {run for run, _ in asked}, "lists other runs than its charges")
    _at_least(ledger["epsilon"], releases, delta, "its releases")
    for run, stated in ledger["runs"].items():
        own = Releases([charge for charge in charges if charge["run"] == run])
        _at_least(stated, own, delta, f"run {run}")
    for each in ledger["curve"]:
        _at_least(each["epsilon"], releases, each["delta"], "its curve")
    for each in ledger["trade_off"]:
        most = least_missed(each["false_positives"], ledger["curve"])
        said = f"{each['false_negatives']:.4g} at {each['false_positives']:g}"
        need(each["false_negatives"] <= most + 1e-9, f"trade-off {said}: the curve says {most:.4g}")
    return releases


def _at_least(stated: Any, releases: Releases, delta: Any, what: str) -> None:
    need(isinstance(delta, float) and 0 < delta < 1, f"{what}: has the delta {delta}")
    cost, given = releases.epsilon(delta), math.inf if stated is None else stated
    said = f"{what} cost epsilon = {cost:.6g} at delta = {delta:g}, not {given:.6g}"
    need(releases.private == (stated is not None) and given >= cost * (1 - TOLERANCE) - 1e-9, said)


def least_missed(level: float, curve: Sequence[dict[str, float]]) -> float:
    """The least false negatives of any test with `level` false positives, of a privacy curve.

    Source: Dong, Roth, Su 2022, "Gaussian differential privacy", Proposition 2.12.
    """
    found = [0.0]
    for each in curve:
        kept, grown = 1 - each["delta"], math.exp(min(each["epsilon"], 700.0))
        found += [kept - grown * level, (kept - level) / grown]
    return max(found)


def digest_of(content: Any) -> str:
    """The SHA-256 of JSON data, as ledgers and certificates have it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def check_file(ledger: dict[str, Any], path: Path) -> str:
    """Compares a certificate's ledger with the file; returns in words what was found."""
    records, head, lines = [], "0" * 64, ledger["lines"]
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        with at(f"line {number}"):
            record = _record(line)
            need(record.pop("bytes", 0), "is no line of a ledger")
            digest = record.pop("hash", None)
            need(record.get("previous") == head, "does not follow the line before it")
            need(digest_of(record) == digest, "was altered")
            head = str(digest)
            need(number != lines or head == ledger["head"], "is not the certificate's last one")
            records.append(record)
    need(len(records) >= lines, f"has {len(records)} of {lines} lines")
    charges = [each for each in records[:lines] if "event" in each]
    for each in charges:
        del each["previous"]
    need(charges == ledger["charges"], "has other charges than the certificate")
    for name in ("key", "population", "unit"):
        need(records[0].get(name) == ledger[name], f"has another {name} than the certificate")
    more = sum("event" in each for each in records[lines:])
    return f"{path}: fits" + (f"; {more} later releases are not certified" if more else "")


def together(ledgers: Sequence[dict[str, Any]]) -> str:
    """What all releases of several certificates cost, if they are of the same clients."""
    longest: dict[str, list[Any]] = {}
    for ledger in ledgers:
        before, now = longest.get(ledger["key"], []), ledger["charges"]
        same = min(len(before), len(now))
        need(before[:same] == now[:same], "two certificates of one ledger have other charges")
        longest[ledger["key"]] = max(before, now, key=len)
    need(len({ledger["unit"] for ledger in ledgers}) == 1, "two units have no common epsilon")
    charges = [charge for each in longest.values() for charge in each]
    delta = min((each["delta"] for each in ledgers if each["delta"] is not None), default=0.5)
    cost = f"(epsilon = {Releases(charges).epsilon(delta):.6g}, delta = {delta:g})"
    of = f"{len(charges)} releases on {len(longest)} ledgers"
    return f"together, if of the same clients: {of} cost {cost}"


def verified(
    paths: Sequence[Path], ledgers: Sequence[Path], weights: Path | None, joined: bool
) -> Iterator[str]:
    """Checks certificates; yields what was found, a line each; raises Unfit, OSError."""
    every: list[dict[str, Any]] = []
    for path in paths:
        with at(str(path)):
            certificate = _record(path.read_bytes())
            found = check(certificate)
            yield f"{path}: fits" + (f"; {certificate['stamp']}" * bool(certificate["stamp"]))
            for ledger, releases in zip(certificate["ledgers"], found, strict=True):
                every.append(ledger)
                yield f"  {ledger['name']}: {_in_words(ledger, releases)}"
            if weights is not None:
                need(certificate["weights"], "names no weights")
                for name, digest in certificate["weights"].items():
                    found = hashlib.sha256((weights / name).read_bytes()).hexdigest()
                    need(found == digest, f"{weights / name} is not the file that it is for")
                yield f"  {weights}: {len(certificate['weights'])} files fit"
    for path in ledgers:
        with at(str(path)):
            first = _record(path.read_bytes().split(b"\n", 1)[0])
            of = [ledger for ledger in every if ledger["key"] == first.get("key")]
            need(of, "is the ledger of none of these certificates")
            yield from (check_file(ledger, path) for ledger in of)
    if joined:
        yield together(every)
    asked = "" if ledgers else "whether the ledgers say the same (--ledger); "
    asked += "" if weights is not None else "weights (--weights); "
    yield f"not checked: {asked}releases on other ledgers; that the program did what it says"


def _in_words(ledger: dict[str, Any], releases: Releases) -> str:
    what, delta = f"{len(ledger['charges'])} releases cost", ledger["delta"]
    if not releases.private or delta is None:
        return f"{what} epsilon = infinity: NOT PRIVATE"
    again, missed = releases.epsilon(delta), least_missed(0.05, ledger["curve"])
    return (
        f"{what} (epsilon = {ledger['epsilon']:.6g}, delta = {delta:g}) for each {ledger['unit']}, "
        f"computed again: {again:.6g}. Whoever accuses 5 % of the others of being members misses "
        f"at least {missed:.1%} of the members"
    )


@contextmanager
def at(place: str) -> Iterator[None]:
    """Puts the place before what does not fit there."""
    try:
        yield
    except Unfit as error:
        raise Unfit(f"{place}: {error}") from None


def need(holds: Any, otherwise: str) -> None:
    if not holds:
        raise Unfit(otherwise)


def _record(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Unfit("is no JSON") from None
    need(isinstance(found, dict), "has no fields")
    return found


def _check_fields(record: Any, kind: str) -> None:
    need(isinstance(record, dict), f"is no {kind} with fields")
    fields = {name: kind for name, _, kind in (f.partition(":") for f in _FIELDS[kind].split())}
    for name in sorted({*record, *fields}):
        need(name in fields, f"has an unknown field {name!r}")
        need(name in record, f"lacks the field {name!r}")
        each: str = fields[name].strip("[]")
        value: Any = record[name]
        types = list if each != fields[name] else _TYPES[each]
        fits = isinstance(value, types) and (types is bool or not isinstance(value, bool))
        need(fits and value == value, f"its field {name!r} is of a wrong type")
        for number, part in enumerate(value if each in _FIELDS else (), 1):
            with at(f"{each} {number}"):
                _check_fields(part, each)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="verify", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("certificates", metavar="CERTIFICATE", type=Path, nargs="+")
    parser.add_argument("--ledger", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--weights", type=Path, metavar="FOLDER")
    parser.add_argument("--together", action="store_true")
    given = parser.parse_args(arguments)
    try:
        for line in verified(given.certificates, given.ledger, given.weights, given.together):
            sys.stdout.write(f"{line}\n")
    except (Unfit, OSError) as error:
        sys.stderr.write(f"DOES NOT FIT: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
