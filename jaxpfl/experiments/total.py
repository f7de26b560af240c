"""The privacy of a whole run: its rounds, and what else it released on the same clients."""

from collections.abc import Sequence

from dp_accounting import ComposedDpEvent, DpEvent

from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting
from jaxpfl.privacy.plan import Plan


def epsilon(
    plan: Plan, before: DpEvent | None, rounds: int, again: Sequence[DpEvent] = ()
) -> float:
    """Epsilon of all that a run released, at the plan's delta.

    Args:
      before: add-or-remove-one events released before the rounds; None for nothing.
      rounds: so many of the plan's first rounds.
      again: rounds that came out otherwise when they were replayed after a crash: a second release.

    Raises:
      InputError: `before` with cohorts of fixed size, which have another adjacency.
    """
    if before is not None and plan.sampling == "fixed":
        raise InputError("cohorts of fixed size cannot come after releases under add or remove one")
    if not plan.private or (before is None and not again):
        return plan.epsilon(rounds)
    events = [*([] if before is None else [before]), *again]
    if rounds:
        events.append(plan.event(rounds))
    return accounting.epsilon(
        ComposedDpEvent(events), plan.delta, plan.chosen_accountant, plan.adjacency
    )


def statement(
    plan: Plan, before: DpEvent | None, rounds: int, what: str, again: Sequence[DpEvent] = ()
) -> str:
    """The guarantee of the whole run in one line; `what` names the release `before`."""
    if not plan.private or (before is None and not again):
        return plan.statement(rounds)
    together = accounting.rounded_up(epsilon(plan, before, rounds, again))
    found = (
        f"(epsilon = {together}, delta = {plan.delta:g}), "
        f"unit = {plan.unit}, adjacency = {plan.adjacency.replace('_', ' ')} {plan.unit}, "
        f"accountant = {plan.chosen_accountant.upper()}, all releases of this run together"
    )
    if before is not None:
        alone = accounting.epsilon(before, plan.delta, plan.chosen_accountant, plan.adjacency)
        found += f"; {what} alone: epsilon = {accounting.rounded_up(alone)}"
    if again:
        found += f"; of which {len(again)} made again after a crash"
    return found
