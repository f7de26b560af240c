"""The privacy of a whole run: the rounds, and what was released on the same clients before them."""

from dp_accounting import ComposedDpEvent, DpEvent

from jaxpfl.privacy import accounting
from jaxpfl.privacy.plan import Plan


def epsilon(plan: Plan, before: DpEvent | None, rounds: int) -> float:
    """Epsilon of `before` and the first `rounds` rounds of `plan` together, at its delta.

    Args:
      before: add-or-remove-one events, as those of a Poisson plan; None for nothing.
    """
    if before is None or not plan.private:
        return plan.epsilon(rounds)
    events = [before]
    if rounds:
        events.append(plan.event(rounds))
    return accounting.epsilon(
        ComposedDpEvent(events), plan.delta, plan.chosen_accountant, plan.adjacency
    )


def statement(plan: Plan, before: DpEvent | None, rounds: int, what: str) -> str:
    """The guarantee of the whole run in one line; `what` names the release `before`."""
    if before is None or not plan.private:
        return plan.statement(rounds)
    alone = accounting.epsilon(before, plan.delta, plan.chosen_accountant, plan.adjacency)
    together = accounting.rounded_up(epsilon(plan, before, rounds))
    return (
        f"(epsilon = {together}, delta = {plan.delta:g}), "
        f"unit = {plan.unit}, adjacency = add or remove one {plan.unit}, accountant = "
        f"{plan.chosen_accountant.upper()}, all releases of this run together; {what} alone: "
        f"epsilon = {accounting.rounded_up(alone)}"
    )
