"""Prints the epsilon of every plan that every config makes, and compares it with a stored list.

    .venv/bin/python tools/config_epsilons.py > epsilons.json
    .venv/bin/python tools/config_epsilons.py --compare epsilons.json

A change of the plans or of the accounting must leave these alone. Reads no data: the number of
training clients is stated below. With --compare it prints a table of old and new, and exits with 1
where an epsilon or a noise multiplier differs by more than 1e-4 of itself, or one of them is
missing. Takes a minute: calibrations are confirmed by a second accountant.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dp_accounting import ComposedDpEvent

from jaxpfl.algorithms.federated_metrics import MetricsPlan
from jaxpfl.experiments.config.reader import read_mapping
from jaxpfl.experiments.engine import study_runs
from jaxpfl.experiments.engine.build import build_plan
from jaxpfl.experiments.registry import load
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.systems.federated_training.build import build_fred_plan
from jaxpfl.privacy import accounting

ROOT = Path(__file__).parents[1]
# Training clients, as counted once with the data at hand; the last two as published.
CLIENTS = {
    "digits_cnn": 950,
    "fred_mixtures": 3_400,
    "fred_pipeline": 6_722,
    "gan_inversion": 430,
    "gan_inversion_examples": 430,
    "irc_word_lm": 6_722,
    "oov_concatenation": 14_004,
    "popri_small": 622,
    "quickstart": 7_424,
    "emnist_gan_inversion": 2_720,
    "stackoverflow_oov_concatenation": 342_477,
}
# What the released share of selected clients may be, at most and at least.
SHARES = (1.0, 0.05)
TOLERANCE = 1e-4

Figures = dict[str, dict[str, float | None]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Epsilons of all configs.")
    parser.add_argument("--compare", type=Path, help="what this script printed before")
    arguments = parser.parse_args()
    found = {path.stem: _of_file(path) for path in sorted((ROOT / "configs").glob("*.yaml"))}
    if arguments.compare is None:
        print(json.dumps(found, indent=1))
        return 0
    return _compare(json.loads(arguments.compare.read_text()), found)


def _of_file(path: Path) -> Figures:
    mapping = read_mapping(path)
    if "base" not in mapping:
        return _of_config(load(path), CLIENTS[path.stem])
    clients = CLIENTS[Path(mapping["base"]).stem]
    # Points that differ in what costs nothing have equal figures.
    figures: dict[str, dict[str, float | None]] = {}
    for point in load_sweep(path).points:
        for what, each in _of_config(point.config, clients).items():
            if each not in figures.values():
                figures[f"{point.name}: {what}"] = each
    return figures


def _of_config(config: Any, clients: int) -> Figures:
    system = config.system
    if system == "gan_inversion":
        return dict(_of_gan_inversion(config, clients))
    if system == "oov_concatenation":
        plans = {
            name: build_plan(part.privacy, part.training, clients)
            for name, part in (("words", config.words), ("characters", config.characters))
        }
        figures = {name: _figures(plan) for name, plan in plans.items()}
        return {**figures, **_scaled(study_runs.at_scale(config.scaled_up, plans))}
    if system == "synthetic_text" and config.method in ("public", "generator"):
        return {}
    fred = build_fred_plan(config) if system == "federated_training" else None
    if fred is None or not fred.private:
        return {"rounds": _figures(build_plan(config.privacy, config.training, clients))}
    plan = build_plan(config.privacy, config.training, clients, prior_releases=fred.event())
    both = accounting.epsilon(
        ComposedDpEvent([fred.event(), plan.event()]),
        plan.delta,
        plan.chosen_accountant,
        plan.adjacency,
    )
    figures = {"rounds": _figures(plan), "fred": _number(fred.epsilon(), fred.delta)}
    for name, multiplier in zip(("count", "mean", "covariance"), fred.multipliers, strict=True):
        figures[f"fred {name}"] = _number(fred.epsilons()[name], fred.delta, multiplier)
    return {**figures, "fred and rounds": _number(both, plan.delta)}


def _of_gan_inversion(config: Any, clients: int) -> Iterator[tuple[str, dict[str, float | None]]]:
    metrics = MetricsPlan.calibrated(
        epsilon=config.selection.epsilon, delta=config.privacy.delta, population=clients
    )
    yield "histogram", _number(metrics.epsilon(), metrics.delta, metrics.noise_multiplier)
    plans, before = {}, {}
    for share in SHARES:
        sampled = min(clients, round(config.training.clients_per_round / share))
        training = dataclasses.replace(config.training, clients_per_round=sampled)
        name = f"{sampled} clients a round"
        plans[name] = build_plan(config.privacy, training, clients)
        yield name, _figures(plans[name])
        if config.selection.by == "client":
            before[name] = [metrics.noise_multiplier]
    yield from _scaled(study_runs.at_scale(config.scaled_up, plans, before)).items()


def _scaled(record: dict[str, Any] | None) -> Figures:
    if record is None:
        return {}
    parts = {**record["runs"], "all": record["composed_guarantee"]}
    return {
        f"{name}, scaled up": _number(
            part["epsilon"], record["delta"], part.get("noise_multiplier")
        )
        for name, part in parts.items()
    }


def _figures(plan: Any) -> dict[str, float | None]:
    return _number(plan.epsilon(), plan.delta, plan.noise_multiplier)


def _number(
    epsilon: float, delta: float, noise_multiplier: float | None = None
) -> dict[str, float | None]:
    shown = epsilon if math.isfinite(epsilon) else None  # no number in JSON
    return {"epsilon": shown, "delta": delta, "noise_multiplier": noise_multiplier}


def _compare(old: dict[str, Figures], new: dict[str, Figures]) -> int:
    wrong = 0
    print(f"{'plan':78}{'epsilon':>12}{'now':>12}{'multiplier':>12}{'now':>12}")
    for config in sorted(old | new):
        for what in old.get(config, {}) | new.get(config, {}):
            pair = [side.get(config, {}).get(what, {}) for side in (old, new)]
            names = ("epsilon", "noise_multiplier")
            differs = not all(pair) or any(
                not _equal(*(side[name] for side in pair)) for name in names
            )
            values = [_text(side.get(name)) for name in names for side in pair]
            wrong += differs
            print(f"{f'{config}, {what}':78}" + "".join(f"{v:>12}" for v in values), end="")
            print("  DIFFERS" if differs else "")
    print(f"{wrong} differ by more than {TOLERANCE:g} of themselves")
    return int(wrong > 0)


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


if __name__ == "__main__":
    sys.exit(main())
