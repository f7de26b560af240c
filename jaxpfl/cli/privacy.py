"""What releases cost: `jaxpfl budget`, `verify`, `calibrate` and `audit`."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from jaxpfl import checks
from jaxpfl.cli import common
from jaxpfl.errors import InputError

EXCEEDED = 5
"""The exit code of an audit that refutes a stated epsilon, or that texts do not pass."""


BUDGET = {
    "ledgers LEDGER+": "a ledger, such as a run's ledger.jsonl; several: also their joint cost",
    "--delta DELTA!": "such as 1e-5",
    "--accountant ACCOUNTANT": "",
}


def budget(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    delta = checks.open_fraction("--delta", arguments.delta)
    from jaxpfl.privacy.accounting import rounded_up
    from jaxpfl.privacy.ledger import Ledger, together

    ledgers = [Ledger.read(path) for path in arguments.ledgers]
    records = [
        {"ledger": str(file.path), **file.summary(delta, arguments.accountant)} for file in ledgers
    ]
    number = sum(record["charges"] for record in records)
    cost = together(ledgers, delta, arguments.accountant)
    text = f"{cost.statement()}, {number} releases"
    if len(records) == 1:
        return {**records[0], "text": text}
    from jaxpfl.experiments.report.page import Table, text_lines

    rows = [(r["ledger"], rounded_up(r["epsilon"]), str(r["charges"])) for r in records]
    lines = text_lines(Table(("ledger", "epsilon", "releases"), rows, (1, 2)))
    whole = {"epsilon": cost.epsilon(), "delta": delta, "charges": number, "ledgers": records}
    return {**whole, "text": "\n".join([*lines, f"all, if of the same clients: {text}"])}


VERIFY = {
    "files CERTIFICATE+": "a certificate.json, or the directory of its run",
    "--ledger FILE*": "a ledger that a certificate names; may be repeated",
    "--weights FOLDER": "what `export` wrote",
    "--together": "also show their joint cost",
}


def verify(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.privacy.verify import Unfit, verified

    terms = arguments.files, arguments.ledger, arguments.weights, arguments.together
    try:
        lines = list(verified(*terms))
    except Unfit as error:
        raise InputError(str(error)) from None
    return {"found": lines, "text": "\n".join(lines)}


CALIBRATE = {
    "--delta DELTA!": "below 1 / population",
    "--rounds ROUNDS!": "number of releases",
    "--population CLIENTS": "number of clients",
    "--clients-per-round CLIENTS": "expected cohort size",
    "--check-in-rate SHARE": "compare all mechanisms, where this share of clients can take part in "
    "a round, by default for 10,000 to 10,000,000 clients, in cohorts of all who can",
    "--separation ROUNDS": "with --check-in-rate: a client takes part at most once in so many "
    "rounds, where the sampling has a choice (default: as many as there can be, clients / cohort)",
    "--out FILE": "with --check-in-rate, a picture (PNG)",
    "--epsilon EPSILON": "find the noise for this epsilon",
    "--noise-multiplier MULTIPLIER": "instead, find the epsilon of this noise",
    "--accountant ACCOUNTANT": "",
    "--sampling {poisson,fixed}": "default: poisson",
}


def calibrate(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if (arguments.epsilon is None) == (arguments.noise_multiplier is None):
        raise InputError("jaxpfl calibrate: expected one of --epsilon and --noise-multiplier")
    if arguments.check_in_rate is not None:
        return _compared_mechanisms(arguments)
    if arguments.population is None or arguments.clients_per_round is None:
        raise InputError(
            "jaxpfl calibrate: expected --population and --clients-per-round, or --check-in-rate"
        )
    from jaxpfl.privacy import Clip, Noise, Plan, participation

    shared: Any = {name: getattr(arguments, name) for name in ("delta", "rounds", "accountant")}
    sampling = arguments.sampling or "poisson"
    cohorts = participation.of(sampling, arguments.population, arguments.clients_per_round)
    # The cost of a round does not depend on the clip norm, because noise is relative to it.
    shared |= {"participation": cohorts, "clip": Clip(1.0)}
    if arguments.epsilon is not None:
        plan = Plan.calibrated(epsilon=arguments.epsilon, **shared)
    else:
        plan = Plan(noise=Noise(arguments.noise_multiplier), **shared)
    names = ("noise_multiplier", "delta", "rounds", "population", "clients_per_round", "sampling")
    record = {name: getattr(plan, name) for name in (*names, "unit", "adjacency")}
    record |= {"epsilon": plan.epsilon(), "accountant": plan.guarantee().accountant}
    record["confirmed_epsilon"] = plan.guarantee().confirmed_epsilon()
    text = f"noise multiplier = {plan.noise_multiplier:.4g}\n{plan.statement()}"
    return {**record, "text": text}


def _compared_mechanisms(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.epsilon is None or arguments.accountant or arguments.sampling:
        expected = "expected --epsilon, and neither --accountant nor --sampling: all are compared"
        raise InputError(f"jaxpfl calibrate --check-in-rate: {expected}")
    from jaxpfl.experiments.report.page import Table, text_lines
    from jaxpfl.privacy.alternatives import POPULATIONS, alternatives

    names = ("epsilon", "rounds", "check_in_rate", "separation")
    terms = {name: getattr(arguments, name) for name in names}
    terms["delta"] = checks.open_fraction("--delta", arguments.delta)
    populations = POPULATIONS if arguments.population is None else (arguments.population,)
    most = arguments.clients_per_round
    mechanisms = alternatives(**terms, populations=populations, most_clients=most)
    rows, cells = [mechanism.row() for mechanism in mechanisms], []
    forms = dict.fromkeys(("population", "clients_per_round", "separation"), ",")
    forms |= {"noise_multiplier": ".4g", "noise_to_batch_ratio": ".3g", "noise_of_sums": ".3g"}
    for row in rows:
        of_all = [other for other in rows if other["population"] == row["population"]]
        least = min(other["noise_of_sums"] or math.inf for other in of_all)
        numbers = [format(row[name], form) if row[name] else "" for name, form in forms.items()]
        words = row["mechanism"], row["adjacency"].replace("_", " ")
        mark = "least" if row["noise_of_sums"] == least else ""
        cells.append((numbers[0], *words, *numbers[1:], mark))
    titles = ("clients", "sampling, noise", "adjacency", "in a round", "once in rounds")
    titles = (*titles, "noise multiplier", "noise-to-batch ratio", "noise of sums", "")
    lines = text_lines(Table(titles, cells, (0, 3, 4, 5, 6, 7)))
    terms = f"epsilon = {arguments.epsilon:g} at delta = {arguments.delta:g}, {arguments.rounds:,} "
    lines.append(f"{terms}rounds; noise in clip norms, of one round's mean and of sums of means")
    if arguments.out is not None:
        from jaxpfl.experiments.report.plots import draw_mechanisms

        draw_mechanisms(arguments.out, rows, terms + "rounds")
        lines.append(str(arguments.out))
    return {"mechanisms": rows, "text": "\n".join(lines)}


AUDIT = {
    "config CONFIG?": "",
    "--texts TEXTS": "instead of a config: published texts, a SOURCE or the directory of a run; "
    "they must not repeat training clients more than held-out ones",
    "--training SOURCE": "training clients to compare --texts with (default: the run's)",
    "--held-out SOURCE": "held-out clients to compare --texts with (default: the run's)",
    "--canaries N=1000": "canaries in each run (default: 1000)",
    "--runs N=8": "runs of each release (default: 8)",
    "--rounds N=20": "the most rounds of a run (default: 20)",
    "--confidence SHARE=0.99": "probability that all bounds hold (default: 0.99)",
    "--seed N=0": "seed of the audit's draws (default: 0)",
    "--out FILE": "also write the record as JSON; with --texts, a folder for private/leakage.html",
}


def audit(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    if (arguments.config is None) == (arguments.texts is None):
        raise InputError("jaxpfl audit: expected a CONFIG, or --texts and no CONFIG")
    if arguments.texts is not None:
        if overrides:
            raise InputError(f"jaxpfl audit --texts: unexpected argument {overrides[0]!r}")
        from jaxpfl.experiments.audit import audit_texts

        sides, out = (arguments.training, arguments.held_out), arguments.out
        record = audit_texts(arguments.texts, *sides, out=out, seed=arguments.seed)
        return {**record, "exit_code": 0 if record["verdict"] == "passes" else EXCEEDED}
    from jaxpfl.experiments.config import shipped

    config = common.load(shipped.find(arguments.config), overrides)
    from jaxpfl import files
    from jaxpfl.experiments.audit import AuditSettings
    from jaxpfl.experiments.audit import audit as carried_out

    names = ("canaries", "runs", "rounds", "confidence", "seed")
    settings = AuditSettings(**{name: getattr(arguments, name) for name in names})
    record = carried_out(config, settings)
    if arguments.out is not None:
        files.write_json(arguments.out, {name: record[name] for name in record if name != "text"})
    return {**record, "exit_code": EXCEEDED if record["exceeded"] else 0}
