"""What a config describes, without its clients: models, rounds, releases.

A study makes its `Description`, `experiments.dry_run` prints it, and `experiments.audit` plays its
releases. Nothing is read but the small files of published models; nothing is charged or written.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self, cast

import jax
import numpy as np
import pyarrow as pa

from jaxpfl.algorithms.canaries import MomentCanaries
from jaxpfl.algorithms.fred import FredPlan, fred
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.published import PublishedModel, architecture_of
from jaxpfl.experiments.config import sections
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.engine.build import build_plan
from jaxpfl.federated.audits.canaries import MakeQuestions
from jaxpfl.federated.audits.rehearsal import Rehearsed, ask, column, size_of
from jaxpfl.models import count_parameters
from jaxpfl.models.checkpoints import hub, model_files, pretrained
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.decoder.quantise import quantise
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.models.resnet import MultiLabelResNet
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import embedder

ASSUMED = 10_000
"""The number of clients that is assumed where `data.clients` is not given."""

KEY = jax.eval_shape(lambda: jax.random.key(0))
"""The shape of a typed key."""


@dataclass(frozen=True)
class Sized:
    """A model by its shapes; without parameters and size (bytes) where it is not available."""

    about: str
    parameters: int | None = None
    size: int | None = None

    @classmethod
    def of(cls, about: str, shapes: Any) -> Self:
        return cls(about, count_parameters(shapes), size_of(shapes))


@dataclass(frozen=True)
class PlannedRelease:
    """What clients release, and its cost: `plans`, one for each query, cost the guarantee together.

    `times` says how often, in words. `questions` is how an audit asks the client functions
    themselves; with None, canaries train a model of their own.
    """

    guarantee: Guarantee
    times: str
    noise_multiplier: float
    plans: tuple[Plan, ...]
    questions: MakeQuestions | None = None

    @classmethod
    def of_rounds(cls, plan: Plan, questions: MakeQuestions | None = None) -> Self:
        rounds = "1 round" if plan.rounds == 1 else f"{plan.rounds:,} rounds"
        times = f"{rounds} of {round(plan.denominator):,} of {plan.population:,} clients"
        times += ", each of which adds its own noise" if plan.local else ""
        if plan.simulates is not None:
            larger = plan.scaled_to(plan.simulates).statement()
            times = f"{times}; {plan.simulation}; the larger population would have {larger}"
        return cls(plan.guarantee(), times, plan.noise_multiplier, (plan,), questions)

    @classmethod
    def of_moments(cls, plan: FredPlan, units: int) -> Self:
        """FreD's one query of so many units."""
        what = "count, mean and covariance" if "count" in plan.moments else "mean and covariance"
        times = "; ".join(filter(None, [what, plan.simulation]))
        canaries, noise = partial(MomentCanaries, plan), plan.multipliers[1]
        return cls(plan.guarantee(), times, noise, plan.plans(units), canaries)


@dataclass(frozen=True)
class Description:
    """What a run would be; public.

    `sources` are the system's own, by the key that names them; `together` is what several releases
    cost together, by name; `notes` are sentences on what was not checked.
    """

    models: Mapping[str, Sized] = field(default_factory=dict)
    rounds: Mapping[str, Rehearsed] = field(default_factory=dict)
    releases: Mapping[str, PlannedRelease] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    together: Mapping[str, Guarantee] = field(default_factory=dict)
    notes: Sequence[str] = ()


class Clients(NamedTuple):
    """How many clients a dry run is for: the declared number or `ASSUMED`; `train` is expected."""

    all: int
    train: int
    declared: bool

    @classmethod
    def of(cls, data: sections.DataConfig) -> Self:
        number = ASSUMED if data.clients is None else data.clients
        return cls(number, max(1, round(number * data.split.train)), data.clients is not None)


def made_up(number: int) -> Population:
    """So many clients to train with, who have no examples."""
    ids = pa.array(map(str, range(number)), pa.large_string())
    offsets = np.zeros(number + 1, np.int64)
    return Population({"none": column((), np.int8)}, offsets, ids, "made up")


@contextmanager
def tracing(what: str) -> Iterator[None]:
    """Reports shapes that do not fit together as bad input."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, AssertionError, ArithmeticError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{what} cannot be computed, its shapes do not fit: {lines[0]}") from error


def shapes_of(model: Any) -> Any:
    """The parameters of a model as shapes; nothing is allocated."""
    return jax.eval_shape(model.init, KEY)


def example_columns(section: Any) -> dict[str, np.ndarray]:
    """Columns without examples, of the shapes and types that a section's model is trained on."""
    if hasattr(section, "sequence_length"):
        return {"tokens": column((section.sequence_length + 1,), np.int32)}
    inputs, labels = section.columns
    if isinstance(section, MultiLabelResNet):
        shape = (section.classes,)
        return {inputs: column(section.input_shape, np.uint8), labels: column(shape, np.uint8)}
    return {inputs: column(section.input_shape, np.float32), labels: column((), np.int32)}


cached_plan = lru_cache(maxsize=256)(build_plan)
"""`build_plan`, whose calibrations the points of a sweep share."""


def of_moments(name: str, plan: FredPlan, units: int, embedders: Mapping[str, str]) -> Description:
    """FreD's one query of so many units, and its round; a note where an embedder is not available.

    Embedders are by column. Its server computes with numpy.
    """
    releases = {name: PlannedRelease.of_moments(plan, units)}
    sizes = {column: embedding_size(embedder) for column, embedder in embedders.items()}
    if notes := tuple(note for _, of_column in sizes.values() for note in of_column):
        return Description(releases=releases, notes=notes)
    dimensions = {column: dimension for column, (dimension, _) in sizes.items() if dimension}
    algorithm = fred(plan, units=units, dimension=dimensions)
    lead = () if plan.labels == 1 else (plan.labels,)
    shapes = [jax.ShapeDtypeStruct((*lead, d), np.float32) for d in dimensions.values()]
    centres = tuple(shapes) if len(shapes) > 1 else shapes[0]
    columns = {name: column((d,), np.float32) for name, d in dimensions.items()}
    columns |= {"label": column((), np.int32)} if lead else {}
    with tracing("the release of the moments"):
        queries = [ask(query, centres, columns)[0] for query in algorithm.queries]
    rehearsed = Rehearsed(sum(query.up for query in queries), tuple(queries))
    return Description(rounds={name: rehearsed}, releases=releases)


def published_shapes(
    settings: PublishedModelConfig, section: str, *, trained: bool
) -> tuple[PublishedModel | None, Any, Sized]:
    """The model of a section by its config.json, without its tokeniser; None if not available.

    With the shapes of its parameters in memory, float32 if they are `trained`, and their size.
    """
    folder = hub.at_hand(settings.path)
    if folder is None:
        return None, None, Sized(f"{settings.path}, NOT AVAILABLE: its shapes are not checked")
    model = architecture_of(settings, folder, section)
    if isinstance(model, Encoder):
        # Its weights alone say whether it has one.
        model = replace(model, head=True)
    narrow = settings.dtype == "bfloat16" and not trained
    dtype = model_files.DTYPES["bfloat16" if narrow else "float32"]

    def made(key: Any) -> Any:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(key))
        if settings.int8 and isinstance(model, Decoder):
            return quantise(model, params)[1]
        return params

    with tracing(f"{section}.path = {settings.path!r}"):
        params = jax.eval_shape(made, KEY)
        stored = "int8" if settings.int8 else dtype.name
        about = f"{settings.path}, {model.name}, {stored}"
        sized = Sized(about, count_parameters(shapes_of(model)), size_of(params))
    return PublishedModel(section, settings, folder, model, cast(Any, None)), params, sized


def embedding_size(name: str) -> tuple[int | None, tuple[str, ...]]:
    """The dimension of an embedder of texts; None, and a note, where its model is not available."""
    kind, _, rest = name.partition(":")
    if kind == "hashed":
        return embedder(name).dimension, ()
    folder = hub.at_hand(rest or name) if kind in ("minilm", "encoder") else None
    if folder is None:
        missing = f"the embedder {name!r} is not available"
        return None, (f"{missing}: the shapes of what clients embed are not checked",)
    model = pretrained.read_config(folder / "config.json")
    if not isinstance(model, Encoder):
        raise InputError(f"embedder {name!r} must name an encoder, found a {model.name}")
    return model.config.hidden_size, ()
