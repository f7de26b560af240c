"""The entry of a run in the registry of differential privacy deployments, from its certificate.

The fields are those of the registry's template for the highest tier (OpenDP,
`deployments-registry-data`, 2026). What a certificate says is filled in; what only a person can
know begins with `FILL_IN`. The certificate is checked first, by `privacy.verify`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.verify import Unfit, at, check, cost_of

FILL_IN = "FILL IN: "

_UNITS = {
    "client": "client: everything that one client holds, in all its releases together",
    "example": "example: one example of a client, in all releases together",
}


def entry(run: str | Path) -> dict[str, Any]:
    """Returns the entry of what the folder `run` is certified for, of a run or of its export.

    Raises:
      InputError: there is no certificate, it does not fit, or what it is of is not private.
    """
    path = files.user_path(run) / CERTIFICATE
    certificate = files.read_record(path, {"stamp": str, "statement": str, "ledgers": list})
    # That of clients first, if there are several units.
    ledgers = sorted(certificate["ledgers"], key=lambda ledger: ledger["unit"] != "client")
    try:
        with at(str(path)):
            check(certificate)
            privacy = _privacy(certificate, ledgers) if ledgers else {}
    except Unfit as error:
        raise InputError(str(error)) from None
    if certificate["stamp"] or not ledgers:
        said = certificate["stamp"] or "nothing was released from clients"
        raise InputError(f"{path}: is of no private deployment: {said}")
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", path.absolute().parent.name.lower()).strip("-"),
        "deployment": {
            "basic": _basic(certificate["weights"]),
            **privacy,
            "deployment_model": _model(ledgers),
            "implementation": _implementation(certificate, ledgers),
            "administrative": {
                "evidence_sources": FILL_IN + "publications and code, as the registry asks",
                "status": "Draft",
                "registry_authors": [FILL_IN + "who writes this entry"],
                "tier": 3,
            },
        },
    }


def left(content: Any) -> Iterator[str]:
    """Yields what a person must fill in."""
    if isinstance(content, str) and content.startswith(FILL_IN):
        yield content.removeprefix(FILL_IN)
    inner = content.values() if isinstance(content, Mapping) else content
    if not isinstance(content, str) and isinstance(inner, Sequence | type({}.values())):
        for part in inner:
            yield from left(part)


def _basic(exported: Mapping[str, str]) -> dict[str, Any]:
    product = "Machine learning model" if exported else FILL_IN + "such as Synthetic data"
    if any(name.startswith("corpus/") for name in exported):
        product = "Synthetic data"
    return {
        "name": FILL_IN + "name of the deployment",
        "data_curators": [
            {
                "data_curator_name": FILL_IN + "who holds the data",
                "data_curator_type": FILL_IN + "such as Government",
            }
        ],
        "description": FILL_IN + "what was made from the data",
        "intended_use": FILL_IN + "what it is for",
        "data_product_type": product,
        "data_product_region": FILL_IN + "where the people are",
        "data_product_sector": FILL_IN + "such as Technology",
        "publication_date": FILL_IN + "year-month-day",
    }


def _privacy(certificate: Mapping[str, Any], ledgers: Sequence[Mapping[str, Any]]) -> Any:
    first = ledgers[0]
    # None where everyone takes part, and their number may be private.
    populations = [query["plan"]["population"] or 0 for query in first["queries"]]
    number = f", of {max(populations):,}" if any(populations) else ""
    # The worlds of a study have ledgers of their own, and clients in common.
    charges = [x["charges"] for x in ledgers if x["unit"] == first["unit"]]
    every = [charge for own in charges for charge in own]
    epsilon = cost_of(every)(first["delta"]) if charges[1:] else first["epsilon"]
    public = [
        f"the number of {first['unit']}s, rounds and clip norms",
        *certificate["not_covered"],
    ]
    curve = [f"{p['epsilon']:.4g} at delta {p['delta']:g}" for p in first["curve"]]
    own = [f"{x['epsilon']:.4g} at {x['delta']:g} for each {x['unit']}" for x in ledgers]
    together = f"{len(charges)} ledgers together, if of the same clients" if charges[1:] else ""
    further = f"; {together}; by ledger: {', '.join(own)}" if ledgers[1:] else ""
    return {
        "dp_variant": {
            "variant_name": "Approximate DP",
            "data_domain": FILL_IN + "what one client holds, such as the texts of one device",
            "unprotected_quantities": "; ".join(public),
        },
        "privacy_loss": {
            "privacy_unit": _UNITS[first["unit"]],
            "privacy_unit_details": f"neighbouring data sets: {_words(first['adjacency'])} "
            f"{first['unit']}{number}",
            # By which neighbouring data sets differ.
            "number_of_privacy_units": 1,
            "privacy_parameters": {"epsilon": epsilon, "delta": first["delta"]},
            "privacy_parameters_details": f"{certificate['statement']}; the same guarantee is "
            f"epsilon {', '.join(curve)}{further}",
        },
    }


def _model(ledgers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    releases = sum(len(ledger["charges"]) for ledger in ledgers)
    queries = [query for ledger in ledgers for query in ledger["queries"]]
    local = bool(queries) and all("trust" in query["plan"] for query in queries)
    details = "clients send bounded updates; a server sums them and adds the noise"
    trusted = "the server is trusted with each update, and to add the noise"
    if local:
        details = "each client adds noise to its bounded update; a server sums them"
        trusted = "nobody is trusted with an update without noise"
    return {
        "model_name": "Local" if local else "Central",
        "model_name_details": details,
        "trust_assumptions": f"{trusted}. jaxpfl has no cryptography",
        "actors": FILL_IN + "who runs the server, who gets the result",
        "release_type": "Many releases" if releases > 1 else FILL_IN + "one release",
        "release_type_details": f"{releases} releases, all charged to the ledgers below",
        "data_source_type": "Static",
        "data_source_type_details": "a client's data is as it was when the run began",
        "access_type": "Non-interactive",
        "access_type_details": "nobody asks further queries: a run asks those of its config, and "
        "what it sends to clients depends on earlier releases alone",
    }


def _implementation(certificate: Mapping[str, Any], ledgers: Sequence[Mapping[str, Any]]) -> Any:
    events = {ledger["name"]: [c["event"] for c in ledger["charges"]] for ledger in ledgers}
    selected = [e for all in events.values() for e in all if e["type"] == "repeated_and_selected"]
    tuning = FILL_IN + "how settings were chosen: nothing of it is in the epsilon above"
    if selected:
        mean = selected[0]["mean"]
        tuning = (
            f"the best of a secret random number of runs, {mean:g} on average, which the epsilon "
            "above covers (Papernot and Steinke 2022). FILL IN: what else was tried"
        )
    heads = [f"{ledger['name']}: head {ledger['head']}" for ledger in ledgers]
    versions = ", ".join(f"{name} {number}" for name, number in certificate["versions"].items())
    return {
        "preprocessing_and_hyperparameter_tuning": tuning,
        "mechanisms": "; ".join(dict.fromkeys(_mechanisms(ledgers))),
        "composition": "all releases of a ledger together, by privacy loss distributions, exact "
        "Gaussians or Renyi divergences, confirmed by a second accountant where there is one",
        "post_processing": "everything after the noisy sums",
        "justification": FILL_IN + "why this unit, epsilon and delta",
        "utility": FILL_IN + "how good the result is, beside one without noise",
        "additional_information": f"{versions}; certificate {certificate['seal']}; "
        + "; ".join(heads),
    }


def _mechanisms(ledgers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The kinds of releases in words, with what their plans say."""
    for ledger in ledgers:
        for query in ledger["queries"]:
            plan = query["plan"]
            yield (
                f"{query['label']}: Gaussian noise ({plan['noise']}, added by "
                f"{'each client' if 'trust' in plan else 'the server'}), multiplier "
                f"{plan['noise_multiplier']:.4g} of a sum clipped at {plan['clip_norm']:g}, "
                f"{plan['rounds']} rounds, {plan['sampling']} cohorts of "
                f"{plan['clients_per_round']:,} of {plan['population']:,}"
            )
        if not ledger["queries"]:
            for charge in ledger["charges"]:
                yield f"{charge['label']}: {_words(charge['event']['type'])}"


def _words(name: str) -> str:
    return name.replace("_", " ")
