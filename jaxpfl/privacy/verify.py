"""Checks certificates of privacy with dp-accounting alone: it imports nothing else of jaxpfl.

    python verify.py CERTIFICATE ... [--ledger FILE] [--weights FOLDER] [--together]

Copy this file to a machine that has Python and dp-accounting. It computes every epsilon again from
the charged events, by its own code, and compares ledgers and weights with a certificate (see
docs/certificate.md). If something does not fit, a sentence says what, and the status is 1. Names
that others chose are printed in double quotes, as ASCII and cut; all other words are its own.
"""

import argparse
import hashlib
import json
import math
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import dp_accounting as dp
import numpy as np

FORMAT = "jaxpfl certificate 2"
TOLERANCE = 2e-3
"""By this share of an epsilon, two grids of privacy losses may differ."""

Cost = Callable[[float], float]
"""From a delta to an epsilon."""

_Run = tuple[str, str, Cost]  # its unit, adjacency and cost

_ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)])
DELTAS = (0.3, 0.1, 0.03, *(10.0**-power for power in range(2, 11)))
_LARGE = 0.01  # a delta that only the plan of a query can allow

# The possible names of an epsilon, and the forms in which a statement has it.
_NAMED = re.compile(r"\beps|epsilon|[\u025b\u03b5\u03f5]", re.IGNORECASE)
_DIGITS = r"([0-9]+\.?[0-9]*(?:e[+-][0-9]+)?)"
_UNIT = re.compile(
    r", unit = (client|example)\b(?:, adjacency = (add or remove|replace|zero out) one)?"
)
_STATED = re.compile(rf"epsilon = {_DIGITS}, delta = {_DIGITS}\)")
_WITHOUT = re.compile(
    r"epsilon = infinity\b|epsilon = 0\): (nothing was released|clients send nothing)"
)
_SELECTED = "repeated_and_selected"
_FIXED = "sampled_without_replacement"  # the only event whose adjacency is to replace one
_ZEROED = {"zero_out", "zero_concentrated", "truncated_poisson"}  # where it is to zero one
_FIELDS = {
    "certificate": {
        "str": "format seal stamp statement system",
        "list": "ledgers not_covered",
        "dict": "versions weights",
    },
    "ledger": {
        "str": "name unit adjacency population key head",
        "int": "lines",
        "list": "charges queries curve trade_off",
        "number": "delta epsilon",
    },
    "charge": {"str": "run label identity", "int": "round", "dict": "event"},
    "query": {
        "str": "run label program",
        "dict": "plan",
        "list": "captured",
        "bool": "flow_checked",
    },
    "curve": {"number": "delta epsilon"},
    "trade_off": {"number": "false_positives false_negatives"},
}


class Unfit(Exception):
    """Something does not fit; the message says where and what."""


def cost_of(charges: Sequence[Any]) -> Cost:
    """`(delta) -> epsilon` of charges together: an upper bound, infinite if one has no noise."""
    replaced = _adjacency_of(charges) == "replace_one"
    leaves = Counter(_release(charge["event"]) for charge in charges).items()
    kinds = {type(leaf) for leaf, _ in leaves}
    if dp.NonPrivateDpEvent in kinds:
        return lambda delta: math.inf
    if kinds <= {dp.GaussianDpEvent}:
        # They are together one, of shift / noise = mu.
        mu = math.sqrt(sum(n / leaf.noise_multiplier**2 for leaf, n in leaves))
        return lambda delta: float(dp.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0
    cut = dp.TruncatedSubsampledGaussianDpEvent
    if kinds <= {dp.GaussianDpEvent, dp.PoissonSampledDpEvent, cut}:
        fine, least = zip(*(_steps(leaf, n) for leaf, n in leaves), strict=True)
        losses = dp.pld.PLDAccountant(value_discretization_interval=max(min(fine), *least))
        for leaf, n in leaves:
            losses.compose(leaf, n)
        return losses.get_epsilon
    relation = dp.NeighboringRelation["REPLACE_ONE" if replaced else "ADD_OR_REMOVE_ONE"]
    total: Any = sum(n * _renyi(leaf, relation) for leaf, n in leaves)
    return lambda delta: float(dp.rdp.compute_epsilon([*_ORDERS], [*total], delta)[0])


def _adjacency_of(charges: Sequence[Any]) -> str:
    """The adjacency of all charges with noise; without any, add-or-remove-one."""
    types: set[str] = set()
    for event in (charge["event"] for charge in charges):
        # Of a selection, the kinds that one of its runs consists of.
        parts = event["event"]["events"] if event["type"] == _SELECTED else []
        types |= {part["event"]["type"] for part in parts} or {event["type"]}
    types -= {"non_private"}
    need(_FIXED not in types or len(types) == 1, "has two adjacencies, with no common epsilon")
    others = "zero_out_one" if types & _ZEROED else "add_or_remove_one"
    return "replace_one" if _FIXED in types else others


def _renyi(leaf: Any, relation: Any) -> Any:
    """The Renyi divergences of a release, or of a run that is selected from, at `_ORDERS`."""
    match leaf:
        case dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(runs), mean, shape):
            one: Any = sum(run.count * _renyi(run.event, relation) for run in cast(Any, runs))
            selected = dp.rdp.rdp_privacy_accountant._compute_rdp_repeat_and_select
            return np.asarray(selected([*_ORDERS], [*one], mean, shape))
        case dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)) if z > 1e-3:
            # dp-accounting's series does not converge at every order that is not whole.
            x = np.arange(-12 * z, _ORDERS[-1] + 12 * z, z / 30)
            loss = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))
            log_P = -(x**2) / (2 * z**2) - math.log(30 * math.sqrt(2 * math.pi))
            sums = [np.logaddexp.reduce(order * loss + log_P) for order in _ORDERS]
            return np.maximum(sums, 0.0) / (_ORDERS - 1)
    account = dp.rdp.RdpAccountant([*_ORDERS], relation)
    account.compose(leaf)
    # Bounds of integer noise are proven at whole orders. Between them (order - 1) times the
    # divergence is convex, so a chord bounds it: it lies so far above the parabola.
    rho = leaf.rho if isinstance(leaf, dp.ZCDpEvent) else 0.0
    return account.rdp + rho * (_ORDERS % 1) * (1 - _ORDERS % 1) / (_ORDERS - 1)


def _steps(leaf: Any, times: int) -> tuple[float, float]:
    """Steps of the grid of privacy losses: fine enough for TOLERANCE; for 10^5 points at most."""
    q, z = getattr(leaf, "sampling_probability", 1.0), getattr(leaf, "event", leaf).noise_multiplier
    deviation = q * math.sqrt(math.expm1(min(z**-2, 50.0)))
    return min(1e-4 if times > 250 else 5e-4, deviation / 100), (1 / z + 20) / (2 * z) / 2e5


def _release(event: Any) -> Any:
    match event:
        case {"type": "non_private"}:
            return dp.NonPrivateDpEvent()
        case {"type": "zero_concentrated", "rho": rho, "xi": xi} if _within(
            rho, 1e-30, 1e30
        ) and _within(xi, 0, 1e30):
            return dp.ZCDpEvent(rho, xi)
        case {"type": "zero_out", "event": {"type": "gaussian"} as noise}:
            return _release(noise)
        case {"type": "truncated_poisson", "population": of, "at_most": n, **rest}:
            q, z = rest["probability"], _release({**rest, "type": "gaussian"}).noise_multiplier
            need(type(n) is type(of) is int and 0 < n <= of and 0 < q < 1, f"cuts to {quoted(n)}")
            return dp.TruncatedSubsampledGaussianDpEvent(of, q, n, z)
        case {"type": "gaussian", "noise_multiplier": z} if _within(z, 1e-12, 1e12):
            return dp.GaussianDpEvent(z)
        # To sample everyone is not to sample.
        case {"type": "poisson_sampled", "probability": q, "event": noise} if _within(q, 1e-30, 1):
            return dp.PoissonSampledDpEvent(q, _release(noise)) if q < 1 else _release(noise)
        case {"type": "sampled_without_replacement", "clients": n, "population": of, **rest}:
            need(type(n) is type(of) is int and 0 < n <= of, f"draws {quoted(n)} of {quoted(of)}")
            gaussian = _release(rest["event"])
            return dp.SampledWithoutReplacementDpEvent(of, n, gaussian) if n < of else gaussian
        case {"type": "repeated_and_selected", "mean": mean, "shape": 0 | 1 | None as shape}:
            runs, law = event["event"]["events"], (mean, math.inf if shape is None else shape)
            numbers = [_within(mean, 1, 1e9), *(_within(run["count"], 1, 1e9) for run in runs)]
            need(all(numbers), "selects from an impossible number of runs or rounds")
            one: Any = tuple(dp.SelfComposedDpEvent(_release(r["event"]), r["count"]) for r in runs)
            return dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(one), *law)
    raise Unfit(f"has an event of an unknown kind, or out of range: {quoted(event)}")


def check(certificate: Any, also: Sequence[str] = ()) -> list[str]:
    """Checks what follows from the certificate alone; returns what its ledgers cost, in words.

    Args:
      also: statements on the same run from other files, checked as the certificate's own.
    """
    need(type(certificate) is dict, "is no certificate")
    need(certificate.get("format") == FORMAT, f"is not of the format {FORMAT!r}")
    _require("certificate", certificate)
    content = {name: value for name, value in certificate.items() if name != "seal"}
    need(certificate["seal"] == digest_of(content), "was changed after it was sealed")
    lines, costs, ledgers = [], list[_Run](), certificate["ledgers"]
    for number, ledger in enumerate(ledgers, 1):
        with at(f"ledger {number}"):
            lines += _check_ledger(ledger, number, certificate["stamp"], costs)
    for name in ("key", "head"):
        need(len({ledger[name] for ledger in ledgers}) == len(ledgers), "names one ledger twice")
    for statement in (certificate["statement"], *also):
        _check_statement(statement, "SIMULATED" in certificate["stamp"], costs)
    return lines or ["  it names no ledger, and so no release"]


def _check_statement(statement: str, simulated: bool, costs: Sequence[_Run]) -> None:
    """Refuses an epsilon below that of the cheapest run, and one in a form that cannot be read.

    The runs are those of the unit and adjacency that the statement names after it, if it does.
    """
    text, stated = unicodedata.normalize("NFKC", statement), []
    for place in (name.start() for name in _NAMED.finditer(text)):
        pair = _STATED.match(text, place)
        fits = pair or _WITHOUT.match(text, place)
        need(fits, "its statement has an epsilon in another form than (epsilon = E, delta = D)")
        if pair:
            epsilon, delta = map(float, pair.groups())
            need(0 < delta < 1, "its statement has a delta of 0, or of 1 or more")
            named = _UNIT.match(text, pair.end())
            own = [run for run in costs if named is None or run[0] == named.group(1)]
            if named is not None and (adjacency := named.group(2)) and own and not simulated:
                # A Gaussian on everyone has any adjacency; what costs so for a zeroed client, one.
                own = [run for run in own if run[1] != "zero_out_one" or adjacency == "zero out"]
                sentence = f"its statement says {adjacency} one, its runs cost so for zero out one"
                need(own, f"{sentence} only")
            least = min((cost(delta) for *_, cost in own), default=0.0)
            stated.append((epsilon >= least * (1 - TOLERANCE), epsilon, delta, least))
    # A simulation also states the epsilon of a larger population, which no ledger here has.
    if not simulated or not any(fits for fits, *_ in stated):
        for fits, epsilon, delta, least in stated:
            said = f"its statement says epsilon = {epsilon:g} at delta = {delta:g}"
            need(fits, f"{said}, its cheapest run costs {least:.6g}")


def _check_ledger(ledger: Any, place: int, stamp: str, costs: list[_Run]) -> list[str]:
    """Returns the costs of the ledger and its runs, in words; adds the runs' to `costs`."""
    _require("ledger", ledger)
    for name, what in (("charges", "charge"), ("queries", "query")):
        for number, record in enumerate(ledger[name], 1):
            with at(f"{what} {number}"):
                _require(what, record)
    for name in ("curve", "trade_off"):
        for point in ledger[name]:
            _require(name, point)
    charges, curve, delta = ledger["charges"], ledger["curve"], ledger["delta"]
    unit, adjacency, cost = ledger["unit"], _adjacency_of(charges), cost_of(charges)
    need(unit in ("client", "example"), "protects neither a client nor an example")
    need(ledger["lines"] > len(charges) + len(ledger["queries"]), "has fewer lines than releases")
    plans = [(query["run"], query["label"], query["plan"]) for query in ledger["queries"]]
    strict = [plan for *_, plan in plans if plan["private"] and not plan["allow_large_delta"]]
    rare = len(strict) < len(plans) or any(delta * (p["population"] or 0) < 1 for p in strict)
    need(rare or not plans, f"states the delta {delta:g}, which is 1 / the population or more")
    need(plans or delta <= _LARGE, f"states the delta {delta:g}, which no plan of it allows")
    runs, untold = defaultdict[str, list[Any]](list), 0
    for number, charge in enumerate(charges, 1):
        query = [charge["run"], charge["label"]]
        planned = [_event_of(plan) for *names, plan in plans if names == query]
        fits = charge["event"] in planned or not planned
        need(fits, f"charge {number}: is not what its query's plan charges")
        runs[charge["run"]].append(charge)
        untold += not planned
    need(ledger["adjacency"] == adjacency, "states another adjacency than that of its charges")
    need(stamp or math.isfinite(cost(0.5)), "lacks the stamp NOT PRIVATE")
    for point in (ledger, *curve):
        need(0 < point["delta"] < 1, f"has the delta {point['delta']:g}")
        least, stated = cost(point["delta"]), point["epsilon"]
        fits = math.isinf(least) if stated is None else stated >= least * (1 - TOLERANCE) - 1e-9
        need(
            fits, f"costs epsilon = {least:.6g} at delta = {point['delta']:g}, and states {stated}"
        )
    for point in ledger["trade_off"]:
        missed, most = point["false_negatives"], least_missed(point["false_positives"], curve)
        need(missed <= most + 1e-9, f"its trade-off says {missed:.4g}, its curve {most:.4g}")
    own = [{"delta": level, "epsilon": cost(level)} for level in {delta, *DELTAS}]
    lines = [
        f"  ledger {place}: {_priced(charges, cost, delta)} for each {unit}, computed again. "
        "At 5 % false positives, any membership attack misses at least "
        f"{least_missed(0.05, own):.1%} of the members. Its name there is {quoted(ledger['name'])}"
    ]
    if untold:
        lines += [f"  not checked: plan and population of {untold} of them, which it does not tell"]
    for name, some in runs.items():
        costs.append((unit, _adjacency_of(some), cost_of(some)))
        if len(runs) > 1:
            lines.append(f"    {_priced(some, costs[-1][-1], delta)} in its run {quoted(name)}")
    return lines


def _priced(charges: Sequence[Any], cost: Cost, delta: float) -> str:
    return f"{len(charges)} releases cost (epsilon = {cost(delta):.6g}, delta = {delta:g})"


def _event_of(plan: dict[str, Any]) -> dict[str, Any]:
    """The event of one charge of a plan, as `charges` have it."""
    fixed, of, n = plan["sampling"] == "fixed", plan["population"], plan["clients_per_round"]
    # To replace a client moves a sum twice as far.
    noise = {"type": "gaussian", "noise_multiplier": plan["noise_multiplier"] / (1 + fixed)}
    if not plan["private"]:
        return {"type": "non_private"}
    if plan.get("trust") == "local":
        noise["noise_multiplier"] = plan["noise_multiplier"] / math.sqrt(n) / 2
        return {"type": _FIXED, "population": 1, "clients": 1, "event": noise}
    if fixed:
        return {"type": _FIXED, "population": of, "clients": n, "event": noise}
    if plan["sampling"] == "truncated_poisson":
        cut = {"population": of, "probability": n / of, "at_most": plan["at_most"]}
        return {"type": "truncated_poisson", **cut, "noise_multiplier": plan["noise_multiplier"]}
    if plan["sampling"] == "min_separation":
        return {"type": "zero_out", "event": noise}
    if plan["sampling"] == "cyclic_poisson":
        n *= plan["separation"]
    if plan["sampling"] in ("poisson", "cyclic_poisson") and n != of:
        return {"type": "poisson_sampled", "probability": n / of, "event": noise}
    return noise


def least_missed(level: float, curve: Sequence[dict[str, float]]) -> float:
    """The least false negatives of any test with `level` false positives, of a privacy curve.

    Source: Dong, Roth, Su 2022, "Gaussian differential privacy", Proposition 2.12.
    """
    bounds = [0.0]
    for point in curve:
        growth = math.exp(min(point["epsilon"], 700.0))
        bounds += [1 - point["delta"] - growth * level, (1 - point["delta"] - level) / growth]
    return max(bounds)


def digest_of(content: Any) -> str:
    """The SHA-256 of JSON data, as ledgers and certificates have it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def check_file(path: Path, ledgers: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Compares a ledger's file with the `ledgers` of its key; returns the key, and what fits."""
    records, heads = [], ["0" * 64]
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        with at(f"line {number}"):
            record = parsed(line)
            digest, _ = record.pop("hash"), record.pop("bytes")
            need(digest_of(record) == digest, "was altered")
            need(record.pop("previous") == heads[-1], "does not follow the line before it")
            heads.append(digest)
            records.append(record)
    key, fitting = records[0]["key"] if records else "", dict[str, None]()
    for ledger in (ledger for ledger in ledgers if ledger["key"] == key):
        lines = ledger["lines"]
        need(heads[lines:][:1] == [ledger["head"]], f"line {lines} is not the certificate's last")
        charges, queries = ([r for r in records[:lines] if f in r] for f in ("event", "plan"))
        own = {**records[0], "charges": charges, "queries": queries}
        for name in ("population", "unit", "charges", "queries"):
            need(own[name] == ledger[name], f"does not have the certificate's {name}")
        every, more = [record for record in records if "event" in record], ""
        if len(every) > len(charges):
            whole = _priced(every, cost_of(every), ledger["delta"])
            later = f"{len(every) - len(charges)} later releases are not certified"
            more = f"; {later}: with them {whole}"
        fitting[f"{shown(path)}: fits{more}"] = None
    need(fitting, "is the ledger of none of these certificates")
    return key, [*fitting]


def check_weights(named: dict[str, str], folder: Path) -> str:
    """Compares the files of an export with their digests; returns the result in words."""
    need(named, "names no weights")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name, digest in named.items():
        fits = name in files and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        need(fits, f"{quoted(name)} in {shown(folder)} is not the file that it is for")
    others = ", ".join(map(quoted, sorted(files - {*named, "certificate.json"})))
    fit = f"  {shown(folder)}: {len(named)} files fit"
    return fit + (f"; not certified: {others}" if others else "")


def together(ledgers: Sequence[dict[str, Any]]) -> str:
    """The cost of all releases of several certificates, if they are of the same clients."""
    longest: dict[str, list[Any]] = {}
    for ledger in ledgers:
        before, now = longest.get(ledger["key"], []), ledger["charges"]
        same = min(len(before), len(now))
        need(before[:same] == now[:same], "two certificates of one ledger have other charges")
        longest[ledger["key"]] = max(before, now, key=len)
    need(len({ledger["unit"] for ledger in ledgers}) == 1, "two units have no common epsilon")
    charges = [charge for charges in longest.values() for charge in charges]
    delta = min(ledger["delta"] for ledger in ledgers)
    cost, on = cost_of(charges)(delta), len(longest)
    said = f"{len(charges)} releases on {on} ledgers cost (epsilon = {cost:.6g}, delta = {delta:g})"
    return f"together, if of the same clients: {said}"


def verified(
    paths: Sequence[Path], ledgers: Sequence[Path], weights: Path | None, joined: bool
) -> Iterator[str]:
    """Checks certificates; yields the results, a line each; raises Unfit."""
    every: list[dict[str, Any]] = []
    for path in paths:
        path = path / "certificate.json" if path.is_dir() else path
        with at(shown(path)):
            certificate = parsed(path.read_bytes())
            lines, stamp = check(certificate), certificate["stamp"]
            yield f"{shown(path)}: fits" + (f"; its stamp is {quoted(stamp, 200)}" if stamp else "")
            yield from lines
            every += certificate["ledgers"]
            if weights is not None:
                yield check_weights(certificate["weights"], weights)
    unread = {ledger["key"] for ledger in every}
    number = len(unread)
    for path in ledgers:
        with at(shown(path)):
            key, said = check_file(path, every)
            unread -= {key}
            yield from said
    if joined:
        yield together(every)
    left = f"{len(unread)} of {number} ledgers say the same (--ledger)"
    unchecked = f"whether {left}; " if unread else ""
    unchecked += "" if weights is not None else "weights (--weights); "
    yield f"not checked: {unchecked}releases on other ledgers; that the program did what it says"


def quoted(value: object, most: int = 60) -> str:
    """Another's text as JSON in ASCII: no control character, no other line, cut."""
    text = value if isinstance(value, str) else repr(value)
    return json.dumps(text if len(text) <= most else text[:most] + "...")


def shown(path: Path) -> str:
    """A path as it was named, or quoted where it has characters that may not be printed."""
    return str(path) if str(path).isprintable() else quoted(str(path), 1000)


def parsed(text: bytes) -> Any:
    """JSON without NaN, without infinities and without a name that an object has twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Readers would find different values for a name that an object has twice.
        need(len(dict(pairs)) == len(pairs), "names a field twice")
        return dict(pairs)

    return json.loads(
        text,
        object_pairs_hook=once,
        parse_constant=lambda number: need(False, f"has the number {number}"),
    )


def _require(what: str, record: Any) -> None:
    """Refuses a record that lacks or adds a field, or has a value of another type."""
    need(type(record) is dict, f"has {quoted(record)} where a {what} belongs")
    kinds = {name: kind for kind, names in _FIELDS[what].items() for name in names.split()}
    wrong = sorted(record.keys() ^ kinds.keys())
    need(not wrong, f"lacks or adds the fields {quoted(wrong)}")
    for name, kind in kinds.items():
        value = record[name]
        number = _within(value, -1e300, 1e300) or (name == "epsilon" and value is None)
        fits = number if kind == "number" else type(value).__name__ == kind
        need(fits, f"has the {name} {quoted(value)}, expected a value of the kind {kind}")


def _within(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


@contextmanager
def at(place: str) -> Iterator[None]:
    """Puts the place before what does not fit there, or cannot be used."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Unfit):
            raise Unfit(f"{place}: {error}") from None
        why = quoted(getattr(error, "strerror", None) or str(error), 200)
        raise Unfit(f"{place}: cannot be read: {type(error).__name__}: {why}") from None


def need(holds: Any, otherwise: str) -> None:
    if not holds:
        raise Unfit(otherwise)


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks the files that the command line names; ends with status 1 if one does not fit."""
    parser = argparse.ArgumentParser(prog="verify", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("certificates", metavar="CERTIFICATE", type=Path, nargs="+")
    parser.add_argument("--ledger", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--weights", type=Path, metavar="FOLDER")
    parser.add_argument("--together", action="store_true")
    options = parser.parse_args(arguments)
    try:
        for line in verified(
            options.certificates, options.ledger, options.weights, options.together
        ):
            sys.stdout.write(f"{line}\n")
    except Unfit as error:
        sys.exit(f"DOES NOT FIT: {error}")


if __name__ == "__main__":
    main()
