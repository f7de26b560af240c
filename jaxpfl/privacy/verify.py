"""Checks certificates of privacy with dp-accounting alone: it imports nothing else of jaxpfl.

    python verify.py CERTIFICATE ... [--ledger FILE] [--weights FOLDER] [--together]

Copy this file to a machine that has Python and dp-accounting. It computes every epsilon again from
the charged events, by its own code, and compares ledgers and weights with a certificate (see
docs/certificate.md). If something does not fit, a sentence says what, and the status is 1.
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
from functools import cached_property
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting import pld, rdp

FORMAT = "jaxpfl certificate 1"
TOLERANCE = 2e-3
"""By this share of an epsilon, two grids of privacy losses may differ."""

_GAUSSIAN, _POISSON = dp.GaussianDpEvent, dp.PoissonSampledDpEvent
_FIXED, _NO_NOISE = dp.SampledWithoutReplacementDpEvent, dp.NonPrivateDpEvent
_ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)])
# The form of a certificate, by an example: {} and [] may hold anything; null, a number or nothing.
_EXAMPLE = json.loads("""{"format": "", "system": "", "stamp": "", "statement": "", "seal": "",
  "versions": {}, "weights": {}, "not_covered": [], "ledgers": [{"name": "", "unit": "",
    "adjacency": "", "population": "", "key": "", "head": "", "lines": 1, "runs": {},
    "charges": [{"run": "", "label": "", "identity": "", "round": 1, "event": {}}],
    "queries": [{"run": "", "label": "", "event": {}, "plan": {}, "captured": [],
                 "flow_checked": true}], "delta": null, "epsilon": null,
    "curve": [{"delta": 0.5, "epsilon": 0.5}],
    "trade_off": [{"false_positives": 0.5, "false_negatives": 0.5}]}]}""")
_KINDS = {float: int | float, type(None): int | float | None}


class Unfit(Exception):
    """Something does not fit; the message says where and what."""


class Releases:
    """What the events of some charges cost together.

    Attributes:
      adjacency: that they share; None if none of them has noise.
      private: whether all of them have noise.
    """

    def __init__(self, charges: Sequence[Any]) -> None:
        leaves: Counter[dp.DpEvent] = Counter()
        for charge in charges:
            for leaf, times in _leaves(charge["event"]):
                leaves[leaf] += times
        self._leaves: Any = (+leaves).items()  # not those that are repeated 0 times
        self._kinds = {type(leaf) for leaf, _ in self._leaves}
        self.private, fixed = _NO_NOISE not in self._kinds, _FIXED in self._kinds
        need(not fixed or not {_POISSON, dp.ZCDpEvent} & self._kinds, "has two kinds of adjacency")
        shared = "replace_one" if fixed else "add_or_remove_one"
        self.adjacency = shared if self._kinds - {_NO_NOISE} else None

    @cached_property
    def epsilon(self) -> Callable[[float], float]:
        """`(delta) -> epsilon`, an upper bound; infinite if a release has no noise."""
        if not self.private:
            return lambda delta: math.inf
        if self._kinds <= {_GAUSSIAN}:
            # They are together one, of shift / noise = mu.
            mu = math.sqrt(sum(n / each.noise_multiplier**2 for each, n in self._leaves))
            return lambda delta: float(dp.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0
        if self._kinds <= {_GAUSSIAN, _POISSON}:
            step = min(_step(*each) for each in self._leaves)
            losses = pld.PLDAccountant(value_discretization_interval=step)
            for each in self._leaves:
                losses.compose(*each)
            return losses.get_epsilon
        renyi = rdp.RdpAccountant([*_ORDERS], dp.NeighboringRelation[str(self.adjacency).upper()])
        for each in self._leaves:
            renyi.compose(*each)
        # Bounds of integer noise are proven at whole orders. Between them (order - 1) times the
        # divergence is convex, so a chord bounds it: it lies so far above the parabola.
        rho = sum(n * each.rho for each, n in self._leaves if isinstance(each, dp.ZCDpEvent))
        total = renyi.rdp + rho * (_ORDERS % 1) * (1 - _ORDERS % 1) / (_ORDERS - 1)
        return lambda delta: float(rdp.compute_epsilon([*_ORDERS], [*total], delta)[0])


def _step(leaf: Any, times: int) -> float:
    """Of the grid of privacy losses: fine enough for TOLERANCE, with some 10^5 points at most."""
    q, z = getattr(leaf, "sampling_probability", 1.0), getattr(leaf, "event", leaf).noise_multiplier
    deviation = q * math.sqrt(math.expm1(min(z**-2, 50.0)))
    return max(min(1e-4 if times > 250 else 5e-4, deviation / 100), (1 / z + 20) / (2 * z) / 2e5)


def _leaves(event: dict[str, Any], times: int = 1) -> Iterator[tuple[dp.DpEvent, int]]:
    """The elementary releases of an event, and how often each takes place."""
    match event.get("type"), *sorted(each for each in event.items() if each[0] != "type"):
        case ("none",):
            return
        case "composed", ("events", parts):
            for part in parts:
                yield from _leaves(part, times)
        case "repeated", ("count", int(count)), ("event", part) if count >= 0:
            yield from _leaves(part, times * count)
        case ("non_private",):
            yield _NO_NOISE(), times
        case "zero_concentrated", ("rho", rho), ("xi", xi) if rho > 0 and xi >= 0:
            yield dp.ZCDpEvent(rho, xi), times
        case "gaussian", ("noise_multiplier", z) if z >= 0:
            yield (_GAUSSIAN(z) if z else _NO_NOISE()), times
        case "poisson_sampled", ("event", {"type": "gaussian"} as part), ("probability", q):
            need(0 < q <= 1, f"has the sampling probability {q:g}")
            noise, _ = next(_leaves(part))
            # To sample everyone is not to sample.
            yield (_POISSON(q, noise) if q < 1 and noise != _NO_NOISE() else noise), times
        case "sampled_without_replacement", ("clients", n), ("event", part), ("population", of):
            need(part["type"] == "gaussian" and 0 < n <= of, "samples more clients than there are")
            noise, _ = next(_leaves(part))
            yield (_FIXED(of, n, noise) if n < of and noise != _NO_NOISE() else noise), times
        case _:
            raise Unfit(f"has an event of an unknown kind, {event}")


def check(certificate: Any) -> list[Releases]:
    """Checks what follows from the certificate alone; returns the releases of its ledgers."""
    _check_form(certificate, _EXAMPLE, "the certificate")
    need(certificate["format"] == FORMAT, f"is not of the format {FORMAT!r}")
    content = {name: value for name, value in certificate.items() if name != "seal"}
    need(certificate["seal"] == digest_of(content), "was changed after it was sealed")
    found, stamp, ledgers = [], certificate["stamp"], certificate["ledgers"]
    for number, ledger in enumerate(ledgers, 1):
        with at(f"ledger {number}"):
            found.append(_check_ledger(ledger))
    need(stamp or all(releases.private for releases in found), "lacks the stamp NOT PRIVATE")
    costs = [cost for ledger in ledgers for cost in ledger["runs"].values() if cost is not None]
    least = min(costs, default=0.0) * (1 - TOLERANCE)
    for stated in re.findall(r"epsilon = (\d+\.?\d*(?:e[+-]\d+)?)", certificate["statement"]):
        said = f"its statement says epsilon = {stated}, the cheapest of its runs cost {least:.6g}"
        need("SIMULATED" in stamp or float(stated) >= least, said)
    return found


def _check_ledger(ledger: Any) -> Releases:
    charges, curve, delta = ledger["charges"], ledger["curve"], ledger["delta"]
    planned = {(query["run"], query["label"]): query["event"] for query in ledger["queries"]}
    by_run: dict[str, list[Any]] = {}
    for number, charge in enumerate(charges, 1):
        by_run.setdefault(charge["run"], []).append(charge)
        event = planned.get((charge["run"], charge["label"]), charge["event"])
        need(charge["event"] == event, f"charge {number}: is not what its query's plan charges")
    asked = {(charge["run"], charge["label"]) for charge in charges}
    need(planned.keys() <= asked, "describes a query that was not asked")
    need(len({each["identity"] for each in charges}) == len(charges), "charges a release twice")
    need(ledger["unit"] in ("client", "example"), f"has the unit {ledger['unit']!r}")
    need(ledger["lines"] > len(charges), "has more charges than lines")
    releases, stated = Releases(charges), ledger["adjacency"]
    found = releases.adjacency or stated
    need(found == stated, f"has the adjacency {found}, not {stated}")
    if delta is None:
        need(not charges or not releases.private, "states no delta")
        return releases
    need(ledger["runs"].keys() == by_run.keys(), "lists other runs than its charges")
    claims = [("its releases", releases, delta, ledger["epsilon"])]
    claims += [(f"run {r}", Releases(by_run[r]), delta, e) for r, e in ledger["runs"].items()]
    claims += [("its curve", releases, each["delta"], each["epsilon"]) for each in curve]
    for what, of, at_delta, epsilon in claims:
        need(0 < at_delta < 1, f"{what}: has the delta {at_delta}")
        cost, given = of.epsilon(at_delta), math.inf if epsilon is None else epsilon
        said = f"{what} cost epsilon = {cost:.6g} at delta = {at_delta:g}, not {given:.6g}"
        fits = given >= cost * (1 - TOLERANCE) - 1e-9
        need(of.private == (epsilon is not None) and fits, said)
    for each in ledger["trade_off"]:
        level, missed = each["false_positives"], each["false_negatives"]
        most = least_missed(level, curve)
        need(missed <= most + 1e-9, f"its trade-off says {missed:.4g}, its curve {most:.4g}")
    return releases


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
            record = json.loads(line)
            digest, _ = record.pop("hash"), record.pop("bytes")
            need(digest_of(record) == digest, "was altered")
            need(record.pop("previous") == head, "does not follow the line before it")
            need(number != lines or digest == ledger["head"], "is not the certificate's last one")
            head = digest
            records.append(record)
    need(len(records) >= lines, f"has {len(records)} of {lines} lines")
    for name in ("key", "population", "unit"):
        need(records[0][name] == ledger[name], f"has another {name} than the certificate")
    charges = [each for each in records[:lines] if "event" in each]
    need(charges == ledger["charges"], "has other charges than the certificate")
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
    cost, on = Releases(charges).epsilon(delta), len(longest)
    said = f"{len(charges)} releases on {on} ledgers cost (epsilon = {cost:.6g}, delta = {delta:g})"
    return f"together, if of the same clients: {said}"


def verified(
    paths: Sequence[Path], ledgers: Sequence[Path], weights: Path | None, joined: bool
) -> Iterator[str]:
    """Checks certificates; yields what was found, a line each; raises Unfit, OSError."""
    every: list[dict[str, Any]] = []
    for path in paths:
        with at(str(path)):
            certificate = json.loads(path.read_bytes())
            costs, stamp = check(certificate), certificate["stamp"]
            yield f"{path}: fits" + (f"; {stamp}" if stamp else "")
            every += certificate["ledgers"]
            yield from map(_in_words, certificate["ledgers"], costs)
            if weights is not None:
                need(certificate["weights"], "names no weights")
                for name, digest in certificate["weights"].items():
                    found = hashlib.sha256((weights / name).read_bytes()).hexdigest()
                    need(found == digest, f"{weights / name} is not the file that it is for")
                yield f"  {weights}: {len(certificate['weights'])} files fit"
    for path in ledgers:
        with at(str(path)):
            key = json.loads(path.read_bytes().split(b"\n", 1)[0])["key"]
            of = [ledger for ledger in every if ledger["key"] == key]
            need(of, "is the ledger of none of these certificates")
            yield from (check_file(ledger, path) for ledger in of)
    if joined:
        yield together(every)
    asked = "" if ledgers else "whether the ledgers say the same (--ledger); "
    asked += "" if weights is not None else "weights (--weights); "
    yield f"not checked: {asked}releases on other ledgers; that the program did what it says"


def _in_words(ledger: dict[str, Any], releases: Releases) -> str:
    what, delta = f"  {ledger['name']}: {len(ledger['charges'])} releases cost", ledger["delta"]
    if not releases.private or delta is None:
        return f"{what} epsilon = infinity: NOT PRIVATE"
    again, missed = releases.epsilon(delta), least_missed(0.05, ledger["curve"])
    return (
        f"{what} (epsilon = {ledger['epsilon']:.6g}, delta = {delta:g}) for each {ledger['unit']}, "
        f"computed again: {again:.6g}. Whoever accuses 5 % of the others of being members misses "
        f"at least {missed:.1%} of the members"
    )


def _check_form(value: Any, example: Any, place: str) -> None:
    """Refuses other fields and types than the example's, numbers below 0 and NaN."""
    kind = _KINDS.get(type(example), type(example))
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    fits = fits and (not isinstance(value, int | float) or value >= 0)
    need(fits, f"{place} is of a wrong type, or below 0")
    if example and isinstance(value, dict):
        wrong = sorted(value.keys() ^ example.keys())
        need(not wrong, f"{place} lacks or adds the fields {wrong}")
        for name, each in value.items():
            _check_form(each, example[name], f"{place}: {name}")
    for number, each in enumerate(value if example and isinstance(value, list) else (), 1):
        _check_form(each, example[0], f"{place} {number}")


@contextmanager
def at(place: str) -> Iterator[None]:
    """Puts the place before what does not fit there, or cannot be used."""
    try:
        yield
    except Exception as error:
        plain = error.strerror if isinstance(error, OSError) else repr(error)
        plain = f"it is no JSON, {error}" if isinstance(error, json.JSONDecodeError) else plain
        said = str(error) if isinstance(error, Unfit) else f"cannot be read: {plain}"
        raise Unfit(f"{place}: {said}") from None


def need(holds: Any, otherwise: str) -> None:
    if not holds:
        raise Unfit(otherwise)


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks what the command line names; ends with status 1 if something does not fit."""
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
        sys.exit(f"DOES NOT FIT: {error}")


if __name__ == "__main__":
    main()
