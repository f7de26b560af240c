"""`jaxpfl calibrate`."""

import argparse
from collections.abc import Sequence
from typing import Any

from jaxpfl.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delta", type=float, required=True, help="below 1 / population")
    parser.add_argument("--rounds", type=int, required=True, help="number of releases")
    parser.add_argument("--population", type=int, required=True, help="clients in all")
    parser.add_argument("--clients-per-round", type=int, required=True, help="expected cohort size")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--epsilon", type=float, help="find the noise for it")
    wanted.add_argument("--noise-multiplier", type=float, help="find the epsilon of it")
    parser.add_argument("--accountant", help="pld, rdp ...; default: by the sampling")
    parser.add_argument(
        "--sampling", choices=("poisson", "fixed"), help="default: poisson, with PLD"
    )
    parser.add_argument(
        "--as-published",
        choices=("augenstein",),
        metavar="PAPER",
        help="augenstein: the epsilon in that paper's form, which is NOT valid, and the valid ones",
    )


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.as_published is not None:
        return _as_published(arguments)
    from jaxpfl.privacy import Clip, Noise, Plan, participation

    shared: dict[str, Any] = {
        "delta": arguments.delta,
        "rounds": arguments.rounds,
        # The cost of a round does not depend on the clip norm, because noise is relative to it.
        "clip": Clip(1.0),
        "participation": participation.of(
            arguments.sampling or "poisson", arguments.population, arguments.clients_per_round
        ),
        "accountant": arguments.accountant,
    }
    if arguments.epsilon is not None:
        plan = Plan.calibrated(epsilon=arguments.epsilon, **shared)
    else:
        plan = Plan(noise=Noise(arguments.noise_multiplier), **shared)
    epsilon = plan.epsilon()
    return {
        "noise_multiplier": plan.noise_multiplier,
        "epsilon": epsilon,
        "delta": plan.delta,
        "rounds": plan.rounds,
        "population": plan.population,
        "clients_per_round": plan.clients_per_round,
        "sampling": plan.sampling,
        "accountant": plan.chosen_accountant,
        "confirmed_epsilon": plan.confirmed_epsilon(),
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        "text": f"noise multiplier = {plan.noise_multiplier:.4g}\n{plan.statement()}",
    }


def _as_published(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.noise_multiplier is None:
        raise InputError("--as-published needs --noise-multiplier, whose epsilon it computes")
    if arguments.accountant is not None or arguments.sampling is not None:
        raise InputError("--as-published shows every form: give no --accountant and no --sampling")
    from jaxpfl.privacy.published import as_published

    names = ("noise_multiplier", "delta", "rounds", "population", "clients_per_round")
    setting = {name: getattr(arguments, name) for name in names}
    found = as_published(arguments.as_published, **setting)
    lines = [
        f"paper's form ({found.paper}): {found.statement()}",
        f"valid, fixed-size rounds:     {found.fixed.statement()}",
        f"valid, Poisson rounds:        {found.poisson.statement()}",
    ]
    if found.fixed.allow_large_delta is not None:
        lines.append("delta is 1 / N, as published, but a delta should be well below 1 / N")
    return {**setting, **found.to_dict(), "text": "\n".join(lines)}
