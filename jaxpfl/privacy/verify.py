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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

FORMAT = "jaxpfl certificate 1"
TOLERANCE = 2e-3
"""By this share of an epsilon, two grids of privacy losses may differ."""

_ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)]
_FIELDS = {
    "certificate": "format system stamp statement seal versions weights not_covered ledgers",
    "ledger": "name unit adjacency population key head lines charges queries runs delta epsilon "
    "curve trade_off",
    "charge": "run label identity round event",
    "query": "run label plan event captured flow_checked",
    "point": "delta epsilon",
    "test": "false_positives false_negatives",
    "none": "type",
    "non_private": "type",
    "gaussian": "type noise_multiplier",
    "zero_concentrated": "type rho xi",
    "poisson_sampled": "type probability event",
    "sampled_without_replacement": "type population clients event",
    "repeated": "type count event",
    "composed": "type events",
}
_TYPES: dict[Any, str] = {
    dict: "versions weights runs event plan",
    list: "not_covered ledgers charges queries curve trade_off captured events",
    int: "lines round clients count",
    bool: "flow_checked",
    (int, str): "population",
    (int, float): "noise_multiplier rho xi probability false_positives false_negatives",
    (int, float, type(None)): "delta epsilon",
}
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names.split()}


class Unfit(Exception):
    """Something does not fit; the message says where and what."""


class Releases:
    """What the events of some charges cost together.

    Attributes:
      leaves: how often each elementary release happens: ("gaussian", z), ("poisson", q, z),
        ("fixed", clients, population, z), ("zcdp", rho, xi) or ("none",), which has no noise.
    """

    def __init__(self, charges: Sequence[Any]) -> None:
        self.leaves: Counter[tuple] = Counter()
        for number, charge in enumerate(charges, 1):
            with at(f"charge {number}"):
                self._add(charge["event"], 1)
        kinds = {leaf[0] for leaf in self.leaves}
        need(not {"poisson", "zcdp"} & kinds or "fixed" not in kinds, "two kinds of adjacency")
        self.adjacency = "replace_one" if "fixed" in kinds else "add_or_remove_one"
        self.noisy, self.private = bool(kinds - {"none"}), "none" not in kinds
        self._losses = None if {"zcdp", "fixed", "none"} & kinds else self._composed()

    def epsilon(self, delta: float) -> float:
        """An upper bound of epsilon at `delta`; infinite if a release has no noise."""
        if not self.private:
            return math.inf
        if self._losses is None:
            total = sum(times * np.array(_divergences(leaf)) for leaf, times in self.leaves.items())
            return float(rdp.compute_epsilon(_ORDERS, np.asarray(total).tolist(), delta)[0])
        if isinstance(self._losses, float):
            mu = self._losses
            return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0
        return float(self._losses.get_epsilon_for_delta(delta))

    def _add(self, event: Any, times: int) -> None:
        kind = event.get("type") if isinstance(event, dict) else None
        need(kind in _FIELDS, f"has an event of the unknown type {kind!r}")
        _check_fields(event, str(kind))
        if kind == "composed":
            for part in event["events"]:
                self._add(part, times)
        elif kind == "repeated":
            need(event["count"] >= 0, "repeats an event a negative number of times")
            self._add(event["event"], times * event["count"])
        elif kind != "none":
            self.leaves[_leaf(str(kind), event)] += times

    def _composed(self) -> Any:
        """The privacy loss distribution; of Gaussians on everyone, their total shift / noise."""
        leaves = self.leaves.items()
        parts = [(leaf[1], leaf[2], n) for leaf, n in leaves if leaf[0] == "poisson"]
        mu = math.sqrt(sum(n / leaf[1] ** 2 for leaf, n in leaves if leaf[0] == "gaussian"))
        if not parts:
            return mu
        parts += [(1.0, 1 / mu, 1)] if mu else []
        step, composed = min(_step(*part) for part in parts), None
        for q, z, times in parts:
            part = pld.privacy_loss_distribution.from_gaussian_mechanism(
                z, sampling_prob=q, value_discretization_interval=step
            ).self_compose(times)
            composed = part if composed is None else composed.compose(part)
        return composed


def _leaf(kind: str, event: dict[str, Any]) -> tuple:
    if kind == "non_private":
        return ("none",)
    if kind == "zero_concentrated":
        need(event["rho"] > 0 and event["xi"] >= 0, "has a rho or xi out of range")
        return ("zcdp", float(event["rho"]), float(event["xi"]))
    inner = event if kind == "gaussian" else event["event"]
    _check_fields(inner, "gaussian")
    z = float(inner["noise_multiplier"])
    need(z >= 0 and inner["type"] == "gaussian", "has no Gaussian noise")
    if kind == "poisson_sampled":
        q = float(event["probability"])
        need(0 < q <= 1, f"has the sampling probability {q:g}")
        if z and q < 1:
            return ("poisson", q, z)
    if kind == "sampled_without_replacement":
        clients, population = event["clients"], event["population"]
        need(0 < clients <= population, "samples more clients than there are")
        if z and clients < population:
            return ("fixed", clients, population, z)
    return ("gaussian", z) if z else ("none",)


def _step(q: float, z: float, times: int) -> float:
    """Of the grid of privacy losses: fine enough for TOLERANCE, with some 10^5 points at most."""
    deviation = q * math.sqrt(math.expm1(min(z**-2, 50.0)))
    return max(min(1e-4 if times > 250 else 5e-4, deviation / 100), (1 / z + 20) / (2 * z) / 2e5)


def _divergences(leaf: tuple) -> list[float]:
    """Renyi divergences of one release at _ORDERS."""
    if leaf[0] == "gaussian":
        return [order / (2 * leaf[1] ** 2) for order in _ORDERS]
    if leaf[0] == "zcdp":  # Proven at whole orders; (order - 1) times it is convex between them.
        whole = np.arange(1.0, 65.0)
        bounds = (whole - 1) * (leaf[2] + leaf[1] * whole)
        return (np.interp(_ORDERS, whole, bounds) / (np.array(_ORDERS) - 1)).tolist()
    noise, relation = dp_accounting.GaussianDpEvent(leaf[-1]), dp_accounting.NeighboringRelation
    if leaf[0] == "fixed":
        accountant = rdp.RdpAccountant(_ORDERS, relation.REPLACE_ONE)
        event = dp_accounting.SampledWithoutReplacementDpEvent(leaf[2], leaf[1], noise)
    else:
        accountant = rdp.RdpAccountant(_ORDERS, relation.ADD_OR_REMOVE_ONE)
        event = dp_accounting.PoissonSampledDpEvent(leaf[1], noise)
    accountant.compose(event)
    return list(accountant.rdp)


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
    _check_fields(ledger, "ledger")
    charges, planned = ledger["charges"], {}
    for query in ledger["queries"]:
        _check_fields(query, "query")
        planned[query["run"], query["label"]] = query["event"]
    for number, charge in enumerate(charges, 1):
        with at(f"charge {number}"):
            _check_fields(charge, "charge")
            event = planned.get((charge["run"], charge["label"]), charge["event"])
            need(charge["event"] == event, "is not what its query's plan charges")
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
        _check_fields(each, "point")
        _at_least(each["epsilon"], releases, each["delta"], "its curve")
    for each in ledger["trade_off"]:
        _check_fields(each, "test")
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
            record = _json(line)
            need(isinstance(record, dict) and record.pop("bytes", 0), "is no line of a ledger")
            digest = record.pop("hash", None)
            need(record.get("previous") == head, "does not follow the line before it")
            need(digest_of(record) == digest, "was altered")
            head = str(digest)
            need(number != lines or head == ledger["head"], "is not the certificate's last one")
            records.append(record)
    need(len(records) >= lines, f"has {len(records)} of {lines} lines")
    charges = [
        {name: each[name] for name in _FIELDS["charge"].split()}
        for each in records[:lines]
        if "event" in each
    ]
    need(charges == ledger["charges"], "has other charges than the certificate")
    for name in ("key", "population", "unit"):
        need(records[0].get(name) == ledger[name], f"has another {name} than the certificate")
    more = sum("event" in each for each in records[lines:])
    return f"{path}: fits" + (f"; {more} later releases are not certified" if more else "")


def check_weights(weights: dict[str, Any], folder: Path) -> str:
    """Compares files with a certificate's digests; returns in words what was found."""
    need(weights, "names no weights")
    for name, digest in weights.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        need(found == digest, f"{folder / name} is not the file that it is for")
    return f"{folder}: {len(weights)} files fit"


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
            certificate = _json(path.read_bytes())
            found = check(certificate)
            yield f"{path}: fits" + (f"; {certificate['stamp']}" * bool(certificate["stamp"]))
            for ledger, releases in zip(certificate["ledgers"], found, strict=True):
                every.append(ledger)
                yield f"  {ledger['name']}: {_in_words(ledger, releases)}"
            if weights is not None:
                yield f"  {check_weights(certificate['weights'], weights)}"
    for path in ledgers:
        with at(str(path)):
            first = _json(path.read_bytes().split(b"\n", 1)[0])
            key = first.get("key") if isinstance(first, dict) else None
            of = [ledger for ledger in every if ledger["key"] == key]
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
    """Raises Unfit with the message unless `holds`."""
    if not holds:
        raise Unfit(otherwise)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Unfit("is no JSON") from None


def _check_fields(record: Any, kind: str) -> None:
    need(isinstance(record, dict), f"is no {kind} with fields")
    names = _FIELDS[kind].split()
    for name in sorted({*record, *names}):
        need(name in names, f"has an unknown field {name!r}")
        need(name in record, f"lacks the field {name!r}")
        value, types = record[name], _TYPE_OF.get(name, str)
        fits = isinstance(value, types) and (types is bool or not isinstance(value, bool))
        need(fits and value == value, f"its field {name!r} is of a wrong type")


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
