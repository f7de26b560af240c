"""`jaxpfl run CONFIG --dry-run`: what a config would do, found out without its clients.

Its models and the programs of its rounds are built as shapes, noise is calibrated, and epsilon is
stated for the number of clients that it declares. Nothing is downloaded, charged or written.
"""

from dataclasses import asdict, replace
from typing import Any

from rich.filesize import decimal

from jaxpfl.data.open import why_missing
from jaxpfl.errors import named
from jaxpfl.experiments.config.reader import to_yaml
from jaxpfl.experiments.config.sections import PUBLIC_PART
from jaxpfl.experiments.engine.description import Clients, made_up
from jaxpfl.experiments.registry import system_of
from jaxpfl.experiments.sweep.config import Point, Sweep
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.text.tokenisers import public_words

_FIRST = "dry run: no client was read, nothing was fetched, charged or written"


def dry_run(config: Any) -> dict[str, Any]:
    """Checks a config of any system; returns its description as plain data, and as "text"."""
    description = system_of(config.system).describe(config)
    data, evaluation = config.data, getattr(config, "evaluation", None)
    places = {f"data.{name}": getattr(data, name) for name in ("source", "public", "vocabulary")}
    places["evaluation.source"] = None if evaluation is None else evaluation.source
    sources: dict[str, dict[str, str]] = {}
    for key, source in {**places, **description.sources}.items():
        if source is not None:
            # A vocabulary may be a file that holds no clients.
            why = public_words.why_missing if key == "data.vocabulary" else why_missing
            missing = "" if source == PUBLIC_PART else why(source)
            sources[key] = {"source": source, "missing": missing}
    record = {
        "system": config.system,
        "clients": Clients.of(data)._asdict(),
        "sources": sources,
        "models": {
            name: {"about": model.about, "parameters": model.parameters, "bytes": model.size}
            for name, model in description.models.items()
        },
        "rounds": {
            name: {"server": round.state, "queries": list(map(asdict, round.queries))}
            for name, round in description.rounds.items()
        },
        "privacy": {
            name: {
                "times": release.times,
                "noise_multiplier": release.noise_multiplier,
                **cost_of(release.guarantee),
            }
            for name, release in description.releases.items()
        },
        "together": {name: cost_of(cost) for name, cost in description.together.items()},
        "notes": [*description.notes],
    }
    parts = [_FIRST], _source_lines(record), _model_lines(record), _privacy_lines(record)
    return {**record, "text": "\n\n".join("\n".join(lines) for lines in parts if lines)}


def dry_run_sweep(sweep: Sweep, *, selection: bool = False) -> dict[str, Any]:
    """Checks every point of a sweep; points that differ in the seed alone are checked once.

    Of a private selection it says what it costs, and the points are those that would be tried.
    """
    lines = [_FIRST, "", f"points    {len(sweep.points)}"]
    if selection:
        from jaxpfl.experiments.sweep.selection import Selection

        chosen = Selection(sweep, made_up(Clients.of(sweep.points[0].config.data).train))
        sweep = replace(sweep, points=chosen.points)
        lines += [f"selection {what}: {value}" for what, value in chosen.facts()]
    records: dict[str, dict[str, Any]] = {}
    different: dict[str, Point] = {}
    for point in sweep.points:
        run = replace(point.config.run, seed=0)
        different.setdefault(to_yaml(replace(point.config, run=run)), point)
    for point in different.values():
        with named(f"point {point.name}"):
            records[point.name] = dry_run(point.config)
    lines[2] += f", {len(records)} of them different"
    # What all points have in common; their models and costs follow one by one.
    lines += ["", *_source_lines(next(iter(records.values()))), ""]
    said: set[str] = set()
    for name, record in records.items():
        record.pop("text")
        # Most points have models and memory in common, which are said once.
        new = [line for line in _model_lines(record) if line not in said]
        said.update(new)
        lines += [name, *(f"  {line}" for line in [*new, *_privacy_lines(record)])]
    return {"points": records, "text": "\n".join(lines)}


_costs: dict[str, dict[str, Any]] = {}


def cost_of(guarantee: Guarantee) -> dict[str, Any]:
    """Epsilon, delta and the statement of a guarantee, as plain data."""
    # The points of a sweep share most of their costs, and each takes a second to compute.
    if (name := repr(guarantee)) not in _costs:
        epsilon = guarantee.epsilon() if guarantee.private else None
        stated = {"delta": guarantee.delta, "statement": guarantee.statement()}
        _costs[name] = {"epsilon": epsilon, **stated}
    return _costs[name]


def _source_lines(record: dict[str, Any]) -> list[str]:
    clients = record["clients"]
    number = "data.clients" if clients["declared"] else "ASSUMED: data.clients gives no number"
    lines = [
        f"clients   {clients['all']:,} ({number}), about {clients['train']:,} of them train; the "
        "split decides how many, and the run's epsilon or noise is for that number"
    ]
    for key, source in record["sources"].items():
        name = source["source"]
        here = "installed" if name.startswith(("digits", "docstrings:")) else "found"
        state = f"NOT AVAILABLE: {source['missing']}" if source["missing"] else here
        lines.append(f"source    {key} = {name}: {state}")
    return lines


def _model_lines(record: dict[str, Any]) -> list[str]:
    lines = []
    for name, model in record["models"].items():
        size = ""
        if model["parameters"] is not None:
            size = f": {model['parameters']:,} parameters, {decimal(model['bytes'])}"
        lines.append(f"model     {name} ({model['about']}){size}")
    for name, round in record["rounds"].items():
        if round["server"]:
            lines.append(f"memory    {name}: server {decimal(round['server'])}")
        for query in round["queries"]:
            down, up, many = query["down"], query["up"], query["side_by_side"]
            lines.append(
                f"memory    {name}, {query['label']}: a client receives {decimal(down)} and sends "
                f"{decimal(up)}; bucket {decimal(query['bucket'])}, sums {decimal(query['sums'])}, "
                f"{many} client{'s' if many > 1 else ''} at a time: {decimal(many * up)} of "
                "changes, as much of gradients, and their activations"
            )
    return lines


def _privacy_lines(record: dict[str, Any]) -> list[str]:
    lines = []
    for name, release in record["privacy"].items():
        noise = f"noise multiplier {release['noise_multiplier']:.4g}, "
        lines.append(f"privacy   {name} ({release['times']}): {noise}{release['statement']}")
    for name, cost in record["together"].items():
        lines.append(f"privacy   {name}: {cost['statement']}")
    if not record["privacy"]:
        lines.append("privacy   clients send nothing (epsilon = 0)")
    return [*lines, *(f"note      {note}" for note in record["notes"])]
