"""The best point of a sweep, at the price of a private selection (`privacy.selection`).

    selection.json       what was released: the best point, its score, the statement, what was tried
    selected/            what the best point made, as `jaxpfl export` writes it
    ledger.jsonl         the one charge, unless the configs name another ledger
    certificate.json, report.html, points.json
    private/selection/   the secret from which the number of points and their draws follow
    private/points/N/    the runs of all points, with their own ledgers; N counts from 1

The number of points is drawn, and each point uniformly from the grid, with replacement. Everything
is charged once, before the first point. After a kill the same command goes on with the same secret,
and so the same number, points and charge.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from signal import SIGINT
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError, Interrupted
from jaxpfl.experiments.engine.cost import both_statements
from jaxpfl.experiments.engine.run_directory import saved_secret
from jaxpfl.experiments.export import export_selected
from jaxpfl.experiments.registry import ONE_RUN, system_of
from jaxpfl.experiments.report.page import Page, Section, Table, write_page
from jaxpfl.experiments.sweep.config import Point, Sweep
from jaxpfl.experiments.sweep.directory import SELECTION, PointFolder, begin
from jaxpfl.experiments.sweep.points import carry_out_point, here
from jaxpfl.experiments.sweep.results import higher_is_better, point_of
from jaxpfl.experiments.systems.workspace import budget_of
from jaxpfl.federated import mesh
from jaxpfl.privacy import events, selection
from jaxpfl.privacy.accounting import rounded_up, smallest_multiplier
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.certificate import certify
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Ledger

RECORD, SELECTED = "selection.json", "selected"


@dataclass(frozen=True)
class Selection:
    """A sweep whose best point is released, for clients that are counted only, or are PRIVATE.

    Each point releases the same event, so that the cost does not depend on which ones are drawn. A
    `privacy.epsilon` is that of the whole selection, and the points get more noise.
    """

    sweep: Sweep
    clients: Any  # `Population`

    @cached_property
    def mean(self) -> float:
        """The expected number of points: the config's, else as many as the grid has."""
        return float(self.sweep.selection.mean or len(self.sweep.points))

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The points as they are carried out: on ledgers of their own, with the selection's noise.

        `InputError`: a point is not private, or costs something else than the others.
        """
        first, target = self.sweep.points[0], _epsilon_of(self.sweep.points[0].config)

        def guarantee_at(z: float) -> Guarantee:
            return self._guarantee(_alone(first.config, z), self._selected)

        for point in self.sweep.points:
            if point.config.system not in ONE_RUN:
                several = f"found {point.config.system}, which asks its clients in several runs"
                systems = f"for the systems {', '.join(ONE_RUN)}"
                raise InputError(f"{point.name}: --private-selection is {systems}, {several}")
            if (point.config.data, _epsilon_of(point.config)) != (first.config.data, target):
                same = "all points of a selection must have the same data and privacy.epsilon"
                raise InputError(f"{point.name}: {same}; this one differs from {first.name}")
            if self._study(_alone(point.config, 1.0)).stamp:
                kind = "whose noise is not reproducible and whose clients are not simulated"
                raise InputError(f"{point.name}: --private-selection needs private points, {kind}")
        z = 1.0 if target is None else smallest_multiplier(guarantee_at, target)
        points = tuple(replace(p, config=_alone(p.config, z)) for p in self.sweep.points)
        guarantees = [self._guarantee(point.config) for point in points]
        # Counts have no adjacency, which may differ between releases that cost the same.
        costs = [(events.counts(g.event), g.delta, g.unit, g.adjacency) for g in guarantees]
        for point, cost in zip(points, costs, strict=True):
            if cost != costs[0]:
                same = "all points of a selection must release, and so cost, the same"
                terms = "in rounds, clients a round, sampling, noise or delta"
                other = f"this one differs from {first.name} {terms}"
                raise InputError(f"{point.name}: {same}; {other}")
        return points

    @cached_property
    def one(self) -> Guarantee:
        """What a single point costs."""
        return self._guarantee(self.points[0].config)

    @cached_property
    def guarantee(self) -> Guarantee:
        return self._guarantee(self.points[0].config, self._selected)

    @cached_property
    def naive(self) -> Guarantee:
        """What every point of the grid once costs, as whoever compares all of them pays."""
        number = len(self.points)
        return self._guarantee(self.points[0].config, lambda one: SelfComposedDpEvent(one, number))

    def facts(self) -> list[tuple[str, str]]:
        """What is tried and what it costs; public, and known beforehand."""
        costs = {"the selection": self.guarantee, "one point alone": self.one}
        costs["each of the grid once"] = self.naive
        number = f"secret; {self.sweep.selection.law}, on average {self.mean:g}"
        facts = [("the grid", f"{len(self.points)} points, drawn with replacement")]
        facts.append(("the number of points that are tried", number))
        for name, cost in costs.items():
            epsilon = f"{rounded_up(cost.epsilon())} at delta = {cost.delta:g}"
            facts.append((f"epsilon of {name}", epsilon))
        return facts

    def _selected(self, event: DpEvent) -> DpEvent:
        return RepeatAndSelectDpEvent(event, self.mean, selection.SHAPES[self.sweep.selection.law])

    def _guarantee(
        self, config: Any, made_of: Callable[[DpEvent], DpEvent] = lambda one: one
    ) -> Guarantee:
        """The cost of what is made of everything that the clients release in a config's run."""
        plans = [*self._study(config).plans.values()]
        if len({plan.unit for plan in plans}) != 1:
            raise InputError("the releases of a selection's points must protect one unit")
        event = made_of(ComposedDpEvent([plan.event() for plan in plans]))
        return Guarantee.of_events([event], plans[0].delta, plans[0].unit)

    def _study(self, config: Any) -> Any:
        return system_of(config.system).part("study").Study(config, self.clients)


def _epsilon_of(config: Any) -> float | None:
    return getattr(getattr(config, "privacy", None), "epsilon", None)


def _alone(config: Any, noise_multiplier: float) -> Any:
    """A config without a ledger that it shares, and with this noise where its own is calibrated."""
    if (privacy := getattr(config, "privacy", None)) is None:
        return config
    privacy = replace(privacy, ledger=None, budget_epsilon=None)
    if privacy.epsilon is not None:
        privacy = replace(privacy, epsilon=None, noise_multiplier=noise_multiplier)
    return replace(config, privacy=privacy)


def select(sweep: Sweep, out: str | Path) -> dict[str, Any]:
    """Carries out a private selection in the directory `out`; returns the public record.

    After an interrupt or a failure the same call goes on. `InputError`: the points do not go
    together, or the directory holds another sweep. `BudgetExhausted`: nothing was carried out.
    """
    mesh.require_one_process("a private selection", "carry it out with one process")
    mesh.all_devices()
    out = files.user_path(out)
    with files.exclusive(out):
        private = files.private_directory(out / "private")
        begin(sweep, out, asdict(sweep.selection))
        if (out / RECORD).exists():
            return files.read_record(out / RECORD)
        config = sweep.points[0].config
        clients = system_of(config.system).part("study").prepare(config).clients
        chosen = Selection(sweep, clients)
        place = out / SELECTION / "secret.json"
        if (private / "points").exists() and not place.exists():
            lost = "is missing, so nobody knows which points were drawn; the charge stays"
            raise CorruptFile(f"{place}: {lost}. Begin another selection with another --out")
        secret = saved_secret(place, reproducible_seed=None, purpose="selection")
        path, name = sweep.ledger or out / "ledger.jsonl", secret.public_name
        # The whole selection is charged, once, before anybody is asked.
        (event,) = events.counts(chosen.guarantee.event)
        tried = [[point.name, repr(point.config)] for point in chosen.points]
        content = {"event": events.to_json(event), "metric": sweep.metric, "points": tried}
        identity = secret.digest("charge", json.dumps(content, sort_keys=True))
        privacy = getattr(config, "privacy", None)
        budget = None if privacy is None else budget_of(privacy)
        with Ledger(path, chosen.clients, budget=budget, unit=chosen.one.unit) as ledger:
            label = f"private selection of {sweep.title}"
            ledger.charge(event, label, run=name, round=1, identity=identity)
        draw = secret.seed("selection", "number")
        number = selection.number(sweep.selection.law, chosen.mean, draw)
        runs = list(_carried_out(chosen, secret, number, private / "points"))
        record = _released(chosen, runs, out, path, name)
        files.write_json(out / RECORD, record)
        return record


def _carried_out(
    chosen: Selection, secret: Any, number: int, points: Path
) -> Iterator[tuple[Point, PointFolder]]:
    """Carries out so many points, drawn uniformly with replacement; PRIVATE."""
    memory: dict[Any, Any] = {}
    planned = events.counts(chosen.one.event)
    for count in range(1, number + 1):
        drawn = secret.seed("selection", f"point {count}") % len(chosen.points)
        point, folder = chosen.points[drawn], PointFolder(points / f"{count:05d}")
        # No message names a point or its number: how many were tried is secret.
        try:
            carry_out_point(point, folder, folder.failure, partial(here, memory))
        except KeyboardInterrupt as error:
            signal = getattr(error, "number", SIGINT)
            raise Interrupted(signal, "interrupted; the same command goes on") from None
        if not folder.finished:
            left = "nothing was released, and the same command goes on"
            raise InputError(f"a point of the selection failed, see {points}; {left}")
        charged = Counter[DpEvent]()
        for path in folder.path.rglob("ledger.jsonl"):
            for charge in Ledger.read(path).charges:
                charged += events.counts(charge.event)
        if charged - planned:
            more = "a point released more than its plan says, for which the selection was charged"
            raise CorruptFile(f"{points}: {more}: nothing of it is released")
        yield point, folder


def _released(
    chosen: Selection, runs: Sequence[tuple[Point, PointFolder]], out: Path, path: Path, name: str
) -> dict[str, Any]:
    """Writes what the best point made, the certificate and the page; returns the record."""
    sweep, delta = chosen.sweep, chosen.one.delta
    statement = both_statements(Ledger.read(path), [name], delta)
    statement += "; the best of a secret random number of points"
    system = sweep.points[0].config.system
    plans = system_of(system).part("study").Study(chosen.points[0].config, chosen.clients).plans
    certify(out, system, plans.values(), statement=statement, stamp="", ledgers=[path])
    best, scored_on = None, ""
    scored = [point_of(point, folder.state(), sweep.metric) for point, folder in runs]
    if runs:
        # The first of equal ones, as chance would have it.
        place = max(range(len(runs)), key=lambda run: _rank(sweep.metric, scored[run]))
        (point, folder), scored_on = runs[place], scored[place]["scored_on"]
        best = {"point": point.name, "values": point.values, sweep.metric: scored[place]["value"]}
        card: Any = {"title": f"the best point of {sweep.title}", "statement": statement}
        card["certificate"] = out / CERTIFICATE
        written = export_selected(folder.path, out / SELECTED, **card)
        best["files"] = [f"{SELECTED}/{file}" for file in written]
    alone, naive = chosen.one, chosen.naive
    record = {"title": sweep.title, "metric": sweep.metric, "scored_on": scored_on}
    record |= {"selected": best, "privacy": statement, "ledger": path.name}
    record |= {"epsilon": chosen.guarantee.epsilon(), "delta": delta}
    record["one"] = {"epsilon": alone.epsilon(), "statement": alone.statement()}
    record["naive"] = {"epsilon": naive.epsilon(), "statement": naive.statement()}
    record |= {"law": sweep.selection.law, "mean": chosen.mean, "facts": chosen.facts()}
    write_page(out, page_of(record))
    return files.jsonable(record)


def _rank(metric: str, scored: Mapping[str, Any]) -> float:
    """Larger for a better score, which is by data declared public, or has noise of its own."""
    value = scored["value"]
    if isinstance(value, dict) or not scored["private"]:
        other = "several" if scored["private"] else "one that is not private"
        raise InputError(f"metric {metric!r} must be one private number of a point, found {other}")
    if value is None:
        return -math.inf
    return value if higher_is_better(metric) else -value


def page_of(record: Mapping[str, Any]) -> Page:
    best, metric = record["selected"], record["metric"]
    rows = [("the best point", "none: the number of points came to 0")]
    if best is not None:
        on = f" on {record['scored_on']}" if record["scored_on"] else ""
        score = "not finite" if best[metric] is None else f"{best[metric]:.5g}"
        rows = [("the best point", best["point"]), (f"its {metric}{on}", score)]
    tried = Table(("", ""), [tuple(row) for row in record["facts"]])
    sections = [Section("Released", table=Table(("", ""), rows))]
    sections.append(Section("What was tried, and what it costs", table=tried))
    title = f"Private selection: {record['title']}"
    lead = f"the best of a secret number of points by {metric}"
    return Page(title, lead, privacy=record["privacy"], sections=sections)
