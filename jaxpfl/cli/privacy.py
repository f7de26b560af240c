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


def add_budget(parser: argparse.ArgumentParser) -> None:
    text = "a ledger, such as a run's ledger.jsonl; several: also their joint cost"
    parser.add_argument("ledgers", metavar="LEDGER", type=common.path, nargs="+", help=text)
    parser.add_argument("--delta", type=float, required=True, help="such as 1e-5")
    common.add(parser, "--accountant")


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


def add_verify(parser: argparse.ArgumentParser) -> None:
    text = "a certificate.json, or the directory of its run"
    parser.add_argument("files", metavar="CERTIFICATE", type=common.path, nargs="+", help=text)
    text = "a ledger that a certificate names; may be repeated"
    parser.add_argument(
        "--ledger", type=common.path, action="append", default=[], metavar="FILE", help=text
    )
    parser.add_argument("--weights", type=common.path, metavar="FOLDER", help="what `export` wrote")
    parser.add_argument("--together", action="store_true", help="also show their joint cost")


def verify(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.privacy.verify import Unfit, verified

    try:
        lines = list(
            verified(arguments.files, arguments.ledger, arguments.weights, arguments.together)
        )
    except Unfit as error:
        raise InputError(str(error)) from None
    return {"found": lines, "text": "\n".join(lines)}


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delta", type=float, required=True, help="below 1 / population")
    parser.add_argument("--rounds", type=int, required=True, help="number of releases")
    parser.add_argument("--population", type=int, help="number of clients")
    parser.add_argument("--clients-per-round", type=int, help="expected cohort size")
    text = "compare all mechanisms, where this share of clients can take part in a round, by "
    text += "default for 10,000 to 10,000,000 clients, in cohorts of all who can"
    parser.add_argument("--check-in-rate", type=float, metavar="SHARE", help=text)
    text = "with --check-in-rate: a client takes part at most once in so many rounds, where the "
    text += "sampling has a choice (default: as many as there can be, clients / cohort)"
    parser.add_argument("--separation", type=int, metavar="ROUNDS", help=text)
    common.add_path(parser, "--out", "FILE", "with --check-in-rate, a picture (PNG)")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--epsilon", type=float, help="find the noise for this epsilon")
    wanted.add_argument("--noise-multiplier", type=float, help="find the epsilon of this noise")
    common.add(parser, "--accountant")
    parser.add_argument("--sampling", choices=("poisson", "fixed"), help="default: poisson")


def calibrate(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.check_in_rate is not None:
        return _compared_mechanisms(arguments)
    if arguments.population is None or arguments.clients_per_round is None:
        raise InputError(
            "jaxpfl calibrate: expected --population and --clients-per-round, or --check-in-rate"
        )
    from jaxpfl.privacy import Clip, Noise, Plan, participation

    sampling = arguments.sampling or "poisson"
    shared: dict[str, Any] = {
        "delta": arguments.delta,
        "rounds": arguments.rounds,
        # The cost of a round does not depend on the clip norm, because noise is relative to it.
        "clip": Clip(1.0),
        "participation": participation.of(
            sampling, arguments.population, arguments.clients_per_round
        ),
        "accountant": arguments.accountant,
    }
    if arguments.epsilon is not None:
        plan = Plan.calibrated(epsilon=arguments.epsilon, **shared)
    else:
        plan = Plan(noise=Noise(arguments.noise_multiplier), **shared)
    names = ("noise_multiplier", "delta", "rounds", "population", "clients_per_round", "sampling")
    return {
        **{name: getattr(plan, name) for name in (*names, "unit", "adjacency")},
        "epsilon": plan.epsilon(),
        "accountant": plan.guarantee().accountant,
        "confirmed_epsilon": plan.guarantee().confirmed_epsilon(),
        "text": f"noise multiplier = {plan.noise_multiplier:.4g}\n{plan.statement()}",
    }


def _compared_mechanisms(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.epsilon is None or arguments.accountant or arguments.sampling:
        raise InputError(
            "jaxpfl calibrate --check-in-rate: expected --epsilon, and neither --accountant nor "
            "--sampling: it compares all samplings, each by its own accountant"
        )
    from jaxpfl.experiments.report.page import Table, text_lines
    from jaxpfl.privacy.alternatives import POPULATIONS, alternatives

    given = arguments.population
    mechanisms = alternatives(
        epsilon=arguments.epsilon,
        delta=checks.open_fraction("--delta", arguments.delta),
        rounds=arguments.rounds,
        check_in_rate=arguments.check_in_rate,
        populations=POPULATIONS if given is None else (given,),
        most_clients=arguments.clients_per_round,
        separation=arguments.separation,
    )
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


_AUDIT = (
    ("--canaries", "M", 1_000, "canaries in each run"),
    ("--runs", "K", 8, "runs of each release"),
    ("--rounds", "T", 20, "the most rounds of a run"),
    ("--confidence", "C", 0.99, "probability that all bounds hold"),
    ("--seed", "N", 0, "seed of the audit's draws"),
)


def add_audit(parser: argparse.ArgumentParser) -> None:
    common.add(parser, "config", nargs="?")
    text = "instead of a config: published texts, a SOURCE or the directory of a run; they must "
    text += "not repeat training clients more than held-out ones"
    parser.add_argument("--texts", metavar="TEXTS", help=text)
    for name in ("--training", "--held-out"):
        text = f"{name[2:]} clients to compare --texts with (default: the run's)"
        parser.add_argument(name, metavar="SOURCE", help=text)
    for name, metavar, default, what in _AUDIT:
        text = f"{what} (default: {default})"
        parser.add_argument(name, type=type(default), metavar=metavar, default=default, help=text)
    text = "also write the record as JSON; with --texts, a folder for private/leakage.html"
    common.add_path(parser, "--out", "FILE", text)


def audit(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    if (arguments.config is None) == (arguments.texts is None):
        raise InputError("jaxpfl audit: expected a CONFIG, or --texts and no CONFIG")
    if arguments.texts is not None:
        if overrides:
            raise InputError(f"jaxpfl audit --texts: unexpected argument {overrides[0]!r}")
        from jaxpfl.experiments.audit import audit_texts

        record = audit_texts(
            arguments.texts,
            arguments.training,
            arguments.held_out,
            out=arguments.out,
            seed=arguments.seed,
        )
        return {**record, "exit_code": 0 if record["verdict"] == "passes" else EXCEEDED}
    from jaxpfl.experiments.config import shipped

    config = common.load(shipped.find(arguments.config), overrides)
    from jaxpfl import files
    from jaxpfl.experiments.audit import AuditSettings
    from jaxpfl.experiments.audit import audit as carried_out

    settings = {name.strip("-"): getattr(arguments, name.strip("-")) for name, *_ in _AUDIT}
    record = carried_out(config, AuditSettings(**settings))
    if arguments.out is not None:
        files.write_json(arguments.out, {name: record[name] for name in record if name != "text"})
    return {**record, "exit_code": EXCEEDED if record["exceeded"] else 0}
