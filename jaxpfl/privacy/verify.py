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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np

FORMAT = "jaxpfl certificate 2"
TOLERANCE = 2e-3
"""By this share of an epsilon, two grids of privacy losses may differ."""

_ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)])
_STATED = r"epsilon = (\d+\.?\d*(?:e[+-]\d+)?), delta = (\d+\.?\d*(?:e[+-]\d+)?)"
_FIXED = "sampled_without_replacement"  # the only event whose adjacency is to replace one
_CERTIFICATE = "format ledgers not_covered seal stamp statement system versions weights"
_LEDGER = "name unit adjacency population key head lines charges queries delta epsilon curve "
_LEDGER += "trade_off"


class Unfit(Exception):
    """Something does not fit; the message says where and what."""


def cost_of(charges: Sequence[Any]) -> Callable[[float], float]:
    """`(delta) -> epsilon` of charges together: an upper bound, infinite if one has no noise."""
    adjacency = dp.NeighboringRelation[_adjacency_of(charges).upper()]
    leaves = Counter(_release(charge["event"]) for charge in charges).items()
    kinds = {type(leaf) for leaf, _ in leaves}
    if dp.NonPrivateDpEvent in kinds:
        return lambda delta: math.inf
    if kinds <= {dp.GaussianDpEvent}:
        # They are together one, of shift / noise = mu.
        mu = math.sqrt(sum(n / each.noise_multiplier**2 for each, n in leaves))
        return lambda delta: float(dp.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0
    if kinds <= {dp.GaussianDpEvent, dp.PoissonSampledDpEvent}:
        fine, least = zip(*(_steps(*each) for each in leaves), strict=True)
        losses = dp.pld.PLDAccountant(value_discretization_interval=max(min(fine), *least))
        for each in leaves:
            losses.compose(*each)
        return losses.get_epsilon
    renyi = dp.rdp.RdpAccountant([*_ORDERS], adjacency)
    for each in leaves:
        renyi.compose(*each)
    # Bounds of integer noise are proven at whole orders. Between them (order - 1) times the
    # divergence is convex, so a chord bounds it: it lies so far above the parabola.
    rho = sum(n * each.rho for each, n in leaves if isinstance(each, dp.ZCDpEvent))
    total = renyi.rdp + rho * (_ORDERS % 1) * (1 - _ORDERS % 1) / (_ORDERS - 1)
    return lambda delta: float(dp.rdp.compute_epsilon([*_ORDERS], [*total], delta)[0])


def _adjacency_of(charges: Sequence[Any]) -> str:
    """That of all charges, where they have noise; without any, add-or-remove-one."""
    types = {charge["event"]["type"] for charge in charges} - {"non_private"}
    need(_FIXED not in types or len(types) == 1, "has two adjacencies, with no common epsilon")
    return "replace_one" if _FIXED in types else "add_or_remove_one"


def _steps(leaf: Any, times: int) -> tuple[float, float]:
    """Of the grid of privacy losses: fine enough for TOLERANCE; for 10^5 points at most."""
    q, z = getattr(leaf, "sampling_probability", 1.0), getattr(leaf, "event", leaf).noise_multiplier
    deviation = q * math.sqrt(math.expm1(min(z**-2, 50.0)))
    return min(1e-4 if times > 250 else 5e-4, deviation / 100), (1 / z + 20) / (2 * z) / 2e5


def _release(event: Any) -> Any:
    match event:
        case {"type": "non_private"}:
            return dp.NonPrivateDpEvent()
        case {"type": "zero_concentrated", "rho": rho, "xi": xi} if rho > 0 and xi >= 0:
            return dp.ZCDpEvent(rho, xi)
        case {"type": "gaussian", "noise_multiplier": z} if 1e-12 <= z <= 1e12:
            return dp.GaussianDpEvent(z)
        # To sample everyone is not to sample.
        case {"type": "poisson_sampled", "probability": q, "event": noise} if 0 < q <= 1:
            return dp.PoissonSampledDpEvent(q, _release(noise)) if q < 1 else _release(noise)
        case {"type": "sampled_without_replacement", "clients": n, "population": of, **rest}:
            need(0 < n <= of, f"draws {n} clients of {of}")
            each = _release(rest["event"])
            return dp.SampledWithoutReplacementDpEvent(of, n, each) if n < of else each
    raise Unfit(f"has an event of an unknown kind, or out of range: {event}")


def check(certificate: Any) -> list[str]:
    """Checks what follows from the certificate alone; returns what its ledgers cost, in words."""
    need(certificate.get("format") == FORMAT, f"is not of the format {FORMAT!r}")
    wrong = sorted(certificate.keys() ^ {*_CERTIFICATE.split()})
    need(not wrong, f"lacks or adds the fields {wrong}")
    content = {name: value for name, value in certificate.items() if name != "seal"}
    need(certificate["seal"] == digest_of(content), "was changed after it was sealed")
    lines, stamp, runs = [], certificate["stamp"], defaultdict[Any, list[Any]](list)
    for number, ledger in enumerate(certificate["ledgers"], 1):
        with at(f"ledger {number}"):
            lines.append(_check_ledger(ledger, stamp))
        for charge in ledger["charges"]:
            runs[number, charge["run"]].append(charge)
    stated = "" if "SIMULATED" in stamp else certificate["statement"]
    for epsilon, delta in re.findall(_STATED, stated):
        least = min((cost_of(own)(float(delta)) for own in runs.values()), default=0.0)
        fits = float(epsilon) >= least * (1 - TOLERANCE)
        said = f"its statement says epsilon = {epsilon} at delta = {delta}"
        need(fits, f"{said}, its cheapest run costs {least:.6g}")
    return lines


def _check_ledger(ledger: Any, stamp: str) -> str:
    wrong = sorted(ledger.keys() ^ {*_LEDGER.split()})
    need(not wrong, f"lacks or adds the fields {wrong}")
    charges, curve, delta = ledger["charges"], ledger["curve"], ledger["delta"]
    plans = [(each["run"], each["label"], each["plan"]) for each in ledger["queries"]]
    strict = [plan for *_, plan in plans if plan["private"] and not plan["allow_large_delta"]]
    rare = len(strict) < len(plans) or any(delta * (p["population"] or 0) < 1 for p in strict)
    need(rare or not plans, f"states the delta {delta:g}, which is 1 / the population or more")
    for number, charge in enumerate(charges, 1):
        asked = charge["run"], charge["label"]
        planned = [_event_of(plan) for *names, plan in plans if names == [*asked]]
        fits = charge["event"] in planned or not planned
        need(fits, f"charge {number}: is not what its query's plan charges")
    unit, adjacency, cost = ledger["unit"], _adjacency_of(charges), cost_of(charges)
    need(ledger["adjacency"] == adjacency, f"has the adjacency {adjacency}, and states another")
    need(stamp or math.isfinite(cost(0.5)), "lacks the stamp NOT PRIVATE")
    for each in (ledger, *curve):
        need(0 < each["delta"] < 1, f"has the delta {each['delta']}")
        least, given = cost(each["delta"]), each["epsilon"]
        fits = math.isinf(least) if given is None else given >= least * (1 - TOLERANCE) - 1e-9
        need(fits, f"costs epsilon = {least:.6g} at delta = {each['delta']:g}, and states {given}")
    for each in ledger["trade_off"]:
        missed, most = each["false_negatives"], least_missed(each["false_positives"], curve)
        need(missed <= most + 1e-9, f"its trade-off says {missed:.4g}, its curve {most:.4g}")
    return (
        f"  {ledger['name']}: {len(charges)} releases cost (epsilon = {cost(delta):.6g}, delta = "
        f"{delta:g}) for each {unit}, computed again. Whoever accuses 5 % of the others of being "
        f"members misses at least {least_missed(0.05, curve):.1%} of the members"
    )


def _event_of(plan: dict[str, Any]) -> dict[str, Any]:
    """What one charge of a plan costs, as `charges` have it."""
    fixed, of, n = plan["sampling"] == "fixed", plan["population"], plan["clients_per_round"]
    # To replace a client moves a sum twice as far.
    noise = {"type": "gaussian", "noise_multiplier": plan["noise_multiplier"] / (1 + fixed)}
    if not plan["private"]:
        return {"type": "non_private"}
    if fixed:
        return {"type": _FIXED, "population": of, "clients": n, "event": noise}
    if plan["sampling"] == "poisson" and n != of:
        return {"type": "poisson_sampled", "probability": n / of, "event": noise}
    return noise


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


def check_file(path: Path, ledgers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Compares a ledger's file with those of `ledgers` that are of it; yields what was found."""
    records, heads = [], ["0" * 64]
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        with at(f"line {number}"):
            record = json.loads(line, object_pairs_hook=_once)
            digest, _ = record.pop("hash"), record.pop("bytes")
            need(digest_of(record) == digest, "was altered")
            need(record.pop("previous") == heads[-1], "does not follow the line before it")
            heads.append(digest)
            records.append(record)
    found = [ledger for ledger in ledgers if records and ledger["key"] == records[0]["key"]]
    need(found, "is the ledger of none of these certificates")
    for ledger in found:
        lines = ledger["lines"]
        need(heads[lines:][:1] == [ledger["head"]], f"line {lines} is not the certificate's last")
        charges, queries = ([r for r in records[:lines] if f in r] for f in ("event", "plan"))
        own = {**records[0], "charges": charges, "queries": queries}
        for name in ("population", "unit", "charges", "queries"):
            need(own[name] == ledger[name], f"does not have the certificate's {name}")
        more = sum("event" in each for each in records[lines:])
        yield f"{path}: fits" + (f"; {more} later releases are not certified" if more else "")


def check_weights(named: dict[str, str], folder: Path) -> str:
    """Compares the files of an export with their digests; returns in words what was found."""
    need(named, "names no weights")
    held = [each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()]
    for name, digest in named.items():
        fits = name in held and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        need(fits, f"{folder / name} is not the file that it is for")
    others = ", ".join(sorted({*held} - {*named, "certificate.json"}))
    return f"  {folder}: {len(named)} files fit" + (f"; not certified: {others}" if others else "")


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
    delta = min(each["delta"] for each in ledgers)
    cost, on = cost_of(charges)(delta), len(longest)
    said = f"{len(charges)} releases on {on} ledgers cost (epsilon = {cost:.6g}, delta = {delta:g})"
    return f"together, if of the same clients: {said}"


def verified(
    paths: Sequence[Path], ledgers: Sequence[Path], weights: Path | None, joined: bool
) -> Iterator[str]:
    """Checks certificates; yields what was found, a line each; raises Unfit."""
    every: list[dict[str, Any]] = []
    for path in paths:
        with at(str(path)):
            certificate = json.loads(path.read_bytes(), object_pairs_hook=_once)
            found, stamp = check(certificate), certificate["stamp"]
            yield f"{path}: fits" + (f"; {stamp}" if stamp else "")
            yield from found
            every += certificate["ledgers"]
            if weights is not None:
                yield check_weights(certificate["weights"], weights)
    compared: list[str] = []
    for path in ledgers:
        with at(str(path)):
            compared += check_file(path, every)
    yield from compared
    if joined:
        yield together(every)
    asked = "" if len(compared) >= len(every) else "whether all ledgers say the same (--ledger); "
    asked += "" if weights is not None else "weights (--weights); "
    yield f"not checked: {asked}releases on other ledgers; that the program did what it says"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; refuses a name that it has twice, for which readers find different values."""
    need(len(dict(pairs)) == len(pairs), "names a field twice")
    return dict(pairs)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Puts the place before what does not fit there, or cannot be used."""
    try:
        yield
    except Exception as error:
        why = "" if isinstance(error, Unfit) else f"cannot be read: {type(error).__name__}: "
        raise Unfit(f"{place}: {why}{getattr(error, 'strerror', None) or error}") from None


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
    except Unfit as error:
        sys.exit(f"DOES NOT FIT: {error}")


if __name__ == "__main__":
    main()
