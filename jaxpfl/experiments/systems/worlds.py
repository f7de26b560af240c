"""Studies of several worlds: the same clients with another history in each.

vocabulary.json              the words of the public corpus
artifacts/                   public models, and what the private ones generate
runs/KIND_WORLD/             each model and the count, with a report of its own
worlds/WORLD/ledger.jsonl    the releases of a world; the page also states the cost of all worlds
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.federated_metrics import COLUMN, Rates, federated_sums, plan_of_everyone
from jaxpfl.data.population import Population
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.config.sections import DataConfig
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.report.page import Table, no_protection
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.workspace import Workspace, at_scale, params_digest, restate
from jaxpfl.federated.audits.rehearsal import column, rehearse
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

WORLD = "everything of a world"
RATE = "rate"
"""The kind of the count, in which all clients take part; the other kinds are models."""


class Kind(NamedTuple):
    """A kind of model: its section of the config, and the columns of its examples."""

    section: Any
    model: Any
    columns: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Study(base.Study):
    """Models and a count of what clients hold, with the same plans in all worlds.

    A system gives the properties `worlds`, the share of clients or sentences that is changed, by
    world; `kinds`, by name, of which the first one's section has the `rate_epsilon` of the count;
    and `most`, the greatest number that a client counts.
    """

    vocabulary: Any
    rates: ClassVar[tuple[str, str]]
    """The names, in a world's record, of the counted share and of its noise."""
    worlds: ClassVar[Any]
    kinds: ClassVar[Any]
    most: ClassVar[Any]

    @property
    def counted(self) -> Any:
        """The section of the config by which clients are asked to count."""
        return next(iter(self.kinds.values())).section

    @cached_property
    def plans(self) -> dict[str, Plan]:
        plans, number = {}, len(self.clients)
        for kind, (section, *_) in self.kinds.items():
            plans[kind] = description.cached_plan(section.privacy, section.training, number)
        epsilon, delta = self.counted.rate_epsilon, self.counted.privacy.delta
        return {**plans, RATE: plan_of_everyone(number, self.most, epsilon, delta)}

    def algorithm(self, kind: str, start: Any = None) -> Algorithm:
        """Trains a model, with `start` as in `algorithms.fed_avg`, or counts."""
        if kind == RATE:
            most = self.counted.training.max_examples
            return federated_sums(self.plans[RATE], length=2, max_examples=most)
        section, model, _ = self.kinds[kind]
        return build.build_algorithm(model, section.training, self.plans[kind], start)

    def describe(self) -> description.Description:
        models, rounds = {}, {}
        for kind, (_, model, columns) in self.kinds.items():
            with description.tracing(f"a round of {kind}"):
                models[kind] = description.Sized.of(model.name, description.shapes_of(model))
                rounds[kind] = rehearse(partial(self.algorithm, kind), columns)
        pairs = {COLUMN: column((2,), np.float32)}
        rounds[RATE] = rehearse(partial(self.algorithm, RATE), pairs)
        releases, delta = super().describe().releases, self.counted.privacy.delta
        together, number = self.at_scale(), len(self.worlds)
        if delta is not None:
            events = [plan.event() for plan in self.plans.values()]
            times = {WORLD: 1, f"all {number} worlds": number}
            costs = {name: Guarantee.of_events(events * n, delta) for name, n in times.items()}
            together = costs | together
        return description.Description(models, rounds, releases, together=together)

    def at_scale(self) -> dict[str, Guarantee]:
        """The cost of one world at `scaled_up`."""
        models, count = dict(self.plans), self.plans[RATE].noise_multiplier
        del models[RATE]
        return at_scale(WORLD, self.config.scaled_up, list(models.values()), [count])


def opened(
    data: DataConfig, vocab_size: int
) -> tuple[Population, Population, Vocabulary, PrivateContent]:
    """The training clients, the PUBLIC corpus, its words, and what no public text may repeat."""
    parts = build.split_clients(build.read_clients(data), data)
    private, source = PrivateContent(parts["train"]), cast(str, data.public)
    public = build.open_public(source, parts["public"], private, "data.public")
    words = data.vocabulary or public
    vocabulary = build.public_vocabulary(words, parts["public"], private, vocab_size)
    return parts["train"], public, vocabulary, private


def store_vocabulary(study: Study, workspace: Workspace) -> str:
    """Writes the words, and returns what identifies them."""
    path, words = workspace.directory / "vocabulary.json", study.vocabulary
    decide("the vocabulary", lambda: words.save(path))
    return hashlib.sha256("\n".join(words.tokens).encode()).hexdigest()[:12]


def ledger_of(directory: Path, world: str) -> Path:
    """The ledger of a world of the study in `directory`."""
    return directory / "worlds" / world / "ledger.jsonl"


def carried_out(
    study: Study,
    workspace: Workspace,
    starts: Mapping[str, tuple[Any, str]],
    changed: Callable[[float], tuple[Population, Callable[[str], Population]]],
    drawn: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Carries out what is left of all worlds; what the public record says of them.

    Args:
      starts: by kind, what it starts from and what identifies that.
      changed: of a world's share, the clients, and what each kind reads of them.
      drawn: what the models generate, of their parameters by kind.
    """
    worlds, delta = {}, study.counted.privacy.delta
    for name, share in study.worlds.items():
        (clients, examples), results = changed(share), {}
        ledger = ledger_of(workspace.directory, name)
        for kind, (start, identity) in starts.items():
            counts = kind == RATE
            results[kind] = workspace.train(
                study.algorithm(kind, start)._replace(name=f"{kind}_{name}"),
                clients if counts else examples(kind),
                name=f"{kind}_{name}",
                privacy=(study.counted if counts else study.kinds[kind].section).privacy,
                ledger=ledger,
                start=identity,
                ask=partial(examples, RATE) if counts else None,
            )
        params = {kind: results[kind].params for kind in study.kinds}
        generated = workspace.artifacts().load_or_compute(
            f"generated_{name}",
            lambda params=params: Artifact(drawn(params)),
            {kind: params_digest(of_kind) for kind, of_kind in params.items()},
        )
        (rate,), (noise,) = Rates.of(study.plans[RATE], results[RATE].state)
        worlds[name] = {
            "share": share,
            "composed_guarantee": workspace.composed_guarantee([ledger], delta),
            "privacy": {kind: restate(result.out, ledger) for kind, result in results.items()},
            **dict(zip(study.rates, (rate, noise), strict=True)),
            **generated.record,
        }
    ledgers = [ledger_of(workspace.directory, world) for world in worlds]
    composed = workspace.composed_guarantee(ledgers, delta)
    compared = {
        metric: {f"{world['share']:g}": world[metric] for world in worlds.values()}
        for metric in sorted(study.config.metrics - {"epsilon"})
    }
    return {
        "private": not workspace.stamp,
        # The page shows the models of all worlds, which are of the same clients.
        "privacy": composed["statement"],
        "metrics": {"epsilon": composed["epsilon"], **compared},
        "population": study.clients.name,
        "unit": study.clients.unit,
        "plans": {kind: plan.to_dict() for kind, plan in study.plans.items()},
        "drawn": dataclasses.asdict(study.config.drawn),
        "worlds": worlds,
        "at_scale": {name: cost.statement() for name, cost in study.at_scale().items()},
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
