"""Certificates: the releases of ledgers and their cost, in a file that others can check.

A certificate holds the queries and charges of ledgers and their consequences: an epsilon of
everything, epsilons at other deltas, and how well any test for a client's membership can do.
`privacy.verify`, which imports nothing of this package, computes all of it again. Everything in a
certificate is public: hashes of data are keyed, as in a ledger.
"""

import math
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.verify import DELTAS, FORMAT, digest_of, least_missed

NAME = "certificate.json"
WITHOUT_NOISE = 1e-6
FALSE_POSITIVES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)

NOT_COVERED = (
    "releases of the same clients on other ledgers",
    "data that was declared public, such as evaluation data and corpora",
    "what somebody concluded by looking at clients' data in another way",
    "whether the program that ran was the one that the ledger's identities stand for",
)
ROUNDED = "noise is drawn in float32, whose last bits are not those of an exact Gaussian"


def certificate(
    system: str, ledgers: Mapping[str, Ledger], delta: float, *, statement: str, stamp: str
) -> dict[str, Any]:
    """Returns the certificate of all releases on some ledgers, by the names that they are known by.

    `delta` is that of the stated epsilons; `statement` and `stamp` are as they are printed.
    """
    records = [_of(name, ledger, delta) for name, ledger in ledgers.items()]
    if not stamp and any(record["epsilon"] is None for record in records):
        # The releases of another run, which share the ledger.
        stamp = "NOT PRIVATE: not everything on its ledgers has noise"
    content = {
        "format": FORMAT,
        "system": system,
        "stamp": stamp,
        "statement": statement,
        "versions": {name: version(name) for name in ("jaxpfl", "dp-accounting", "jax")},
        "ledgers": records,
        "not_covered": [*NOT_COVERED, *([] if all(map(_exact, ledgers.values())) else [ROUNDED])],
        "weights": {},
    }
    return sealed(files.jsonable(content))


def certify(
    directory: Path,
    system: str,
    plans: Iterable[Any],
    *,
    statement: str,
    stamp: str,
    ledgers: Iterable[Path],
) -> None:
    """Writes the `certificate.json` of a run, when its result is written.

    Args:
      plans: of the run's queries; the first one with noise gives the delta, which is else
        `WITHOUT_NOISE`, for the charges of other runs on these ledgers.
      ledgers: files of the releases that the statement covers; absent for a run that asks nobody.
    """
    by_name: dict[str, Ledger] = {}
    for path in ledgers:
        ledger = Ledger.read(path) if path.exists() else None
        # One file may have several names, and files in several folders one name.
        if ledger is not None and all(ledger.head != other.head for other in by_name.values()):
            inside = path.is_relative_to(directory)
            name = path.relative_to(directory).as_posix() if inside else path.name
            by_name[name if name not in by_name else f"{name} ({len(by_name) + 1})"] = ledger
    delta = next((plan.delta for plan in plans if plan.private), WITHOUT_NOISE)
    record = certificate(system, by_name, delta, statement=statement, stamp=stamp)
    files.write_json(directory / NAME, record)


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a certificate with its seal, a hash of all else."""
    rest = {name: value for name, value in content.items() if name != "seal"}
    return {**rest, "seal": digest_of(rest)}


def with_weights(path: Path, folder: Path) -> None:
    """Writes the certificate in `path` into the folder of an export, with hashes of its files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    weights = {path.relative_to(folder).as_posix(): files.sha256_file(path) for path in paths}
    files.write_json(folder / NAME, sealed({**files.read_record(path), "weights": weights}))


def _exact(ledger: Ledger) -> bool:
    """Whether all charges are of queries whose noise is exact."""
    exact = [(q["run"], q["label"]) for q in ledger.queries if "exact" in q["plan"]["noise"]]
    return all((charge.run, charge.label) in exact for charge in ledger.charges)


def _of(name: str, ledger: Ledger, delta: float) -> dict[str, Any]:
    # Epsilons at several deltas, which all hold; none if a release has no noise.
    deltas = sorted({delta, *DELTAS}, reverse=True)
    curve = [{"delta": point, "epsilon": ledger.spent(point)} for point in deltas]
    curve = [point for point in curve if math.isfinite(point["epsilon"])]
    spent = ledger.spent(delta)
    return {
        "name": name,
        "unit": ledger.unit,
        "adjacency": ledger.adjacency,
        "population": ledger.population,
        "key": ledger.key,
        "head": ledger.head,
        "lines": len(ledger.lines),
        "charges": [fields for fields in ledger.lines if "event" in fields],
        "queries": ledger.queries,
        "delta": delta,
        # JSON has no infinity.
        "epsilon": spent if math.isfinite(spent) else None,
        "curve": curve,
        "trade_off": [
            {"false_positives": level, "false_negatives": least_missed(level, curve)}
            for level in FALSE_POSITIVES
            if curve
        ],
    }
