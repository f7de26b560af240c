"""The entry of a run in the registry of differential privacy deployments, from its certificate.

The fields, in deployment.yaml.jinja, are those of the registry's template for the highest tier
(OpenDP, `deployments-registry-data`, 2026). What a certificate says is filled in; what only a
person can know begins with `FILL_IN`. The certificate is checked first, by `privacy.verify`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.printable import template
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.verify import Unfit, at, check, cost_of

FILL_IN = "FILL IN: "

_UNITS = {
    "client": "client: everything that one client holds, in all its releases together",
    "example": "example: one example of a client, in all releases together",
}


def entry(run: str | Path) -> dict[str, Any]:
    """Returns the entry of what the folder `run` is certified for, of a run or of its export.

    `InputError`: there is no certificate, it does not fit, or what it is of is not private.
    """
    path = files.user_path(run) / CERTIFICATE
    certificate = files.read_record(path, {"stamp": str, "statement": str, "ledgers": list})
    # That of clients first, if there are several units.
    ledgers = sorted(certificate["ledgers"], key=lambda ledger: ledger["unit"] != "client")
    try:
        with at(str(path)):
            check(certificate)
            # The worlds of a study have ledgers of their own, and clients in common.
            charges = [x["charges"] for x in ledgers if x["unit"] == ledgers[0]["unit"]]
            together = cost_of([c for own in charges for c in own]) if charges[1:] else None
    except Unfit as error:
        raise InputError(str(error)) from None
    if reason := certificate["stamp"] or ("" if ledgers else "nothing was released from clients"):
        raise InputError(f"{path}: is of no private deployment: {reason}")
    first, exported, uncovered = ledgers[0], certificate["weights"], certificate["not_covered"]
    product = "Machine learning model" if exported else FILL_IN + "such as Synthetic data"
    if any(name.startswith("corpus/") for name in exported):
        product = "Synthetic data"
    # None where everyone takes part, and their number may be private.
    populations = [query["plan"]["population"] or 0 for query in first["queries"]]
    number = f", of {max(populations):,}" if any(populations) else ""
    curve = [f"{p['epsilon']:.4g} at delta {p['delta']:g}" for p in first["curve"]]
    own = [f"{x['epsilon']:.4g} at {x['delta']:g} for each {x['unit']}" for x in ledgers]
    several = f"{len(charges)} ledgers together, if of the same clients" if together else ""
    further = f"; {several}; by ledger: {', '.join(own)}" if ledgers[1:] else ""
    queries = [query for ledger in ledgers for query in ledger["queries"]]
    events = [charge["event"] for ledger in ledgers for charge in ledger["charges"]]
    means = [event["mean"] for event in events if event["type"] == "repeated_and_selected"]
    versions = ", ".join(f"{name} {number}" for name, number in certificate["versions"].items())
    heads = [f"{ledger['name']}: head {ledger['head']}" for ledger in ledgers]
    content = template(__package__ or "", "deployment.yaml.jinja").render(
        slug=re.sub(r"[^a-z0-9]+", "-", path.absolute().parent.name.lower()).strip("-"),
        product=product,
        unprotected=[f"the number of {first['unit']}s, rounds and clip norms", *uncovered],
        unit=_UNITS[first["unit"]],
        neighbours=f"{_words(first['adjacency'])} {first['unit']}{number}",
        epsilon=first["epsilon"] if together is None else together(first["delta"]),
        delta=first["delta"],
        guarantee=f"{certificate['statement']}; the same guarantee is epsilon "
        f"{', '.join(curve)}{further}",
        local=bool(queries) and all("trust" in query["plan"] for query in queries),
        releases=len(events),
        mean=means[0] if means else None,
        mechanisms=list(dict.fromkeys(_mechanisms(ledgers))),
        versions=[versions, f"certificate {certificate['seal']}", *heads],
    )
    return yaml.safe_load(content)


def left(content: Any) -> Iterator[str]:
    """Yields what a person must fill in."""
    if isinstance(content, str) and content.startswith(FILL_IN):
        yield content.removeprefix(FILL_IN)
    inner = content.values() if isinstance(content, Mapping) else content
    if not isinstance(content, str) and isinstance(inner, Sequence | type({}.values())):
        for part in inner:
            yield from left(part)


def _mechanisms(ledgers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The kinds of releases in words, with what their plans say."""
    for ledger in ledgers:
        for query in ledger["queries"]:
            plan, cohorts = query["plan"], "all take part"
            if plan["clients_per_round"] is not None:
                taken, number = plan["clients_per_round"], plan["population"]
                cohorts = f"{_words(plan['sampling'])} cohorts of {taken:,} of {number:,}"
            yield (
                f"{query['label']}: Gaussian noise ({plan['noise']}, added by "
                f"{'each client' if 'trust' in plan else 'the server'}), multiplier "
                f"{plan['noise_multiplier']:.4g} of a sum clipped at {plan['clip_norm']:g}, "
                f"{plan['rounds']} rounds, {cohorts}"
            )
        if not ledger["queries"]:
            for charge in ledger["charges"]:
                yield f"{charge['label']}: {_words(charge['event']['type'])}"


def _words(name: str) -> str:
    return name.replace("_", " ")
