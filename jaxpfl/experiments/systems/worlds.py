"""Studies of several worlds: the same clients with another history in each.

runs/KIND_WORLD/             each model and the count, with a report of its own
worlds/WORLD/ledger.jsonl    the releases of a world
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpfl.experiments.report.page import Table, no_protection
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.workspace import Workspace, at_scale
from jaxpfl.privacy.guarantee import Guarantee

WORLD = "everything of a world"
RATE = "rate"
"""The kind of the count, in which all clients take part; the other kinds are models."""


@dataclass(frozen=True)
class Study(base.Study):
    """A study whose `plans`, one of them `RATE`, are the same in all worlds."""

    @property
    def worlds(self) -> Mapping[str, float]:
        """The share of clients or sentences that is changed, by world."""
        raise NotImplementedError

    def at_scale(self) -> dict[str, Guarantee]:
        """The cost of one world at `scaled_up`."""
        models, count = dict(self.plans), self.plans[RATE].noise_multiplier
        del models[RATE]
        return at_scale(WORLD, self.config.scaled_up, list(models.values()), [count])

    def together(self, delta: float | None) -> dict[str, Guarantee]:
        """The cost of one world, of all of them, and of one at `scaled_up`."""
        if delta is None:
            return self.at_scale()
        events, number = [plan.event() for plan in self.plans.values()], len(self.worlds)
        times = {WORLD: 1, f"all {number} worlds": number}
        costs = {name: Guarantee.of_events(events * n, delta) for name, n in times.items()}
        return costs | self.at_scale()


def ledger_of(directory: Path, world: str) -> Path:
    """The ledger of a world of the study in `directory`."""
    return directory / "worlds" / world / "ledger.jsonl"


def record_of(
    study: Study, workspace: Workspace, worlds: Mapping[str, Any], delta: float | None
) -> dict[str, Any]:
    """What the public record says of all `worlds`, the metrics by share among it."""
    ledgers = [ledger_of(workspace.directory, world) for world in worlds]
    composed = workspace.composed_guarantee(ledgers, delta)
    shares = {name: f"{share:g}" for name, share in study.worlds.items()}
    metrics = sorted(study.config.metrics - {"epsilon"})
    compared = {metric: {shares[n]: w[metric] for n, w in worlds.items()} for metric in metrics}
    return {
        "private": not workspace.stamp,
        # The page shows the models of all worlds, which are of the same clients.
        "privacy": composed["statement"],
        "metrics": {"epsilon": composed["epsilon"], **compared},
        "population": study.clients.name,
        "unit": study.clients.unit,
        "plans": {kind: plan.to_dict() for kind, plan in study.plans.items()},
        "worlds": worlds,
        "at_scale": {name: each.statement() for name, each in study.at_scale().items()},
    }


def page_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says of privacy, and which runs it links."""
    worlds = list(record["worlds"].values())
    costliest = max(worlds, key=lambda world: world["composed_guarantee"]["epsilon"] or 0.0)
    guarantee, costs = costliest["composed_guarantee"], costliest["privacy"] | record["at_scale"]
    return {
        "stamp": record["stamp"],
        "runs": [f"{kind}_{name}" for name in record["worlds"] for kind in record["plans"]],
        "privacy": f"{guarantee['statement']}, {WORLD}, everything on its ledger",
        "privacy_notes": [
            *no_protection(guarantee["epsilon"]),
            "This is the composed guarantee of all models and the count of one world, which a "
            "deployment would spend. This page shows several worlds of the same clients:",
            f"all {len(worlds)} worlds, everything on their ledgers: {record['privacy']}",
            *(f"{name}: {statement}" for name, statement in costs.items()),
        ],
    }


def ranked(titles: Sequence[str], number: str, rows: Sequence[Sequence[Any]]) -> Table:
    """Pairs of a text and a `number`, of all worlds side by side; one may have fewer."""
    heads = [text for title in titles for text in (title, number)]
    pairs = enumerate(itertools.zip_longest(*rows, fillvalue=("", "")), 1)
    shown = [(str(rank), *itertools.chain(*row)) for rank, row in pairs]
    return Table(("rank", *heads), shown, (0, *range(2, len(heads) + 1, 2)))
