"""What noise costs that each client adds to its own update, because no server is trusted to.

The multiplier z of a `Noise` with trust "local" is that of a sum of n clients: each adds z S /
sqrt(n). Whoever sees a client's messages sees a Gaussian in each round in which it takes part.
Other data in its place move it by 2 S, and who sends a message is seen, so that nothing is
amplified. The charge of a round, or of an epoch, in which a client takes part at most once, is
therefore one Gaussian of multiplier z / (2 sqrt(n)) on everyone, under replace-one.

Whoever sees sums alone may count on the noise of all n clients, where n is the same in every round,
and if the client in question is zeroed: its noise leaves with its message.

`plan` is a `Plan`, which imports this module.
"""

import math
from typing import Any

import dp_accounting

from jaxpfl.errors import InputError
from jaxpfl.privacy.events import ZeroOut
from jaxpfl.privacy.guarantee import Guarantee

LABEL = "LOCAL NOISE, added by each client: "


def require_support(plan: Any) -> None:
    """Refuses what clients cannot add noise for by themselves."""
    if plan.unit != "client" or plan.clip.adaptive is not None or plan.simulates is not None:
        raise InputError(
            "trust = 'local', where each client adds noise, needs unit = 'client', a constant clip "
            "norm (no adaptive_clip), and no larger population that is simulated"
        )


def client_multiplier(plan: Any) -> float:
    """Returns z / sqrt(n): the standard deviation of the noise in a message / S."""
    return plan.noise_multiplier / math.sqrt(plan.clients_per_round)


def of_sums(plan: Any, rounds: int | None = None) -> Guarantee | None:
    """Returns what holds against those who see the sums of `rounds` rounds alone, if anything."""
    everyone = plan.clients_per_round == plan.population
    if not everyone and plan.sampling not in ("fixed", "min_separation"):
        return None
    charges = plan.participation.charge_number(plan.rounds if rounds is None else rounds)
    one = ZeroOut(dp_accounting.GaussianDpEvent(plan.noise_multiplier))
    total = dp_accounting.SelfComposedDpEvent(one, charges)
    return Guarantee(total, plan.delta, plan.unit, "zero_out_one")


def statement(plan: Any, messages: str, rounds: int | None = None) -> str:
    """Returns the statement of a plan, named as local, beside that on its sums alone.

    The latter is of a plan alone: whoever sees a run's sums may see those of others on its ledger.
    """
    if not plan.local:
        return messages
    sums = of_sums(plan, rounds)
    more = "" if sums is None else f"; to those who see these sums alone: {sums.statement()}"
    return f"{LABEL}{messages}{more}"
