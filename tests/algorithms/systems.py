"""The smallest of each system: an algorithm, and clients for it."""

import dataclasses
import functools
from functools import partial

import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.algorithms import (
    Algorithm,
    EvolutionSettings,
    FredPlan,
    GeneratorTraining,
    MetricsPlan,
    Scorer,
)
from jaxpfl.algorithms.federated_metrics import with_correct
from jaxpfl.data import Population, from_clients
from jaxpfl.models import GAN
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.text.embed import embed
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.variation import Continue
from jaxpfl.text.preference.optimisation import PreferenceSettings
from tests.algorithms.popri_parts import HASHED, SETTINGS, WRITER
from tests.federated.test_local_training import DIM, LinearModel
from tests.plans import flat_plan
from tests.text.tokenisers.utf8_bytes import UTF8Bytes
from tests.trees import drawn

CLIENTS = 12
# Made once: what is compiled is found again by them.
CLIENT, GENERATOR, SERVER = optax.sgd(0.1), optax.sgd(0.02), optax.sgd(1.0)
COHORT = jp.CohortSpec(batch_size=4, max_examples=4, clients_per_bucket=8)
TEXTS = ["ab ba ab", "ba ab ba", "yz zy yz", "zy yz zy"]


plan = partial(
    flat_plan, population=CLIENTS, clients_per_round=6, rounds=2, clip_norm=0.5, delta=1e-3,
    accountant="rdp",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Linear(LinearModel):
    columns: tuple[str, ...] = ("x", "y")


def numbers(clients: int = CLIENTS) -> Population:
    """Clients of 0 to 4 examples of a linear model."""
    rng, shapes = np.random.default_rng(0), {"x": (DIM,), "y": ()}

    def drawn(i):
        return {
            name: np.float32(rng.normal(size=(i % 5, *shape))) for name, shape in shapes.items()
        }

    return from_clients({f"client {i}": drawn(i) for i in range(clients)})


def fed_avg() -> tuple[Algorithm, Population]:
    settings = dict(client=CLIENT, server=SERVER, plan=plan(), cohort=COHORT)
    return jp.algorithms.fed_avg(Linear(), **settings), numbers()


def fed_sgd() -> tuple[Algorithm, Population]:
    clients = numbers()
    of_examples = plan(population=clients.num_examples, clients_per_round=10, unit="example")
    return jp.algorithms.fed_sgd(Linear(), server=SERVER, plan=of_examples), clients


def fed_avg_gan() -> tuple[Algorithm, Population]:
    rng = np.random.default_rng(0)
    held = {
        f"client {i}": {"image": rng.integers(0, 256, (i % 5, 4, 4, 1)).astype(np.uint8)}
        for i in range(CLIENTS)
    }
    settings = dict(client=CLIENT, generator=GENERATOR, server=SERVER, plan=plan(), cohort=COHORT)
    training, gan = GeneratorTraining(steps=2, batch=4), GAN((4, 4, 1), width=0.02, noise=4)
    algorithm = jp.algorithms.fed_avg_gan(gan, **settings, generator_training=training)
    return algorithm, from_clients(held)


def vectors(dimension: int = 4) -> Population:
    """Clients of 0 to 4 embeddings."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(i % 5, dimension)).astype(np.float32) for i in range(CLIENTS)]
    return from_clients({f"client {i}": {"embedding": each} for i, each in enumerate(rows)})


def fred() -> tuple[Algorithm, Population]:
    plan = FredPlan.calibrated(epsilon=2.0, delta=1e-3)
    return jp.algorithms.fred(plan, units=CLIENTS, dimension=4), vectors()


def federated_metrics() -> tuple[Algorithm, Population]:
    clients = numbers()
    correct = np.random.default_rng(1).uniform(size=clients.num_examples) < 0.7
    metrics = MetricsPlan.calibrated(2.0, 1e-3, CLIENTS)
    return jp.algorithms.federated_metrics(metrics), with_correct(clients, correct)


def candidate_scores() -> tuple[Algorithm, Population]:
    candidates = np.random.default_rng(2).normal(size=(3, 2, 4)).astype(np.float32)
    return jp.algorithms.candidate_scores(candidates, Scorer(plan())), vectors()


@functools.cache
def untrained() -> LanguageModel:
    """Writes bytes as they come."""
    return LanguageModel(WRITER, drawn(WRITER, 0), UTF8Bytes())


def writers() -> Population:
    """Clients of two texts, embedded."""
    held = {f"client {k}": {"text": [TEXTS[k % 2], TEXTS[(k + 1) % 2]]} for k in range(CLIENTS)}
    return embed(from_clients(held), HASHED, progress=False)


def popri() -> tuple[Algorithm, Population]:
    changes = {"prompts": 12, "responses": 2, "rejected_rank": 2, "lora": LoRA(rank=2, alpha=4.0)}
    preference = PreferenceSettings(batch_size=4, multiple=32)
    settings = dataclasses.replace(SETTINGS, **changes, preference=preference)
    # Much noise: the state shows the order of the scores alone, and that has to differ.
    scorer = Scorer(plan(noise_multiplier=8.0))
    algorithm = jp.algorithms.popri(untrained(), TEXTS, scorer, HASHED, settings)
    return algorithm, writers()


def private_evolution() -> tuple[Algorithm, Population]:
    settings = EvolutionSettings(population=4, lookahead=1, max_bytes=64)
    writer = Continue(untrained(), kept=0.5, tokens=8, decoding=Decoding())
    scorer = Scorer(plan(clip_norm=2.0), kind="nn_histogram", max_texts=2)
    return jp.algorithms.private_evolution(TEXTS, writer, scorer, HASHED, settings), writers()


SYSTEMS = (
    fed_avg, fed_sgd, fed_avg_gan, fred, federated_metrics, candidate_scores, popri,
    private_evolution,
)  # fmt: skip


def every_system(*long: str) -> pytest.MarkDecorator:
    """A test of each system; of those named, one of the longer tests."""
    named = [(made, made.__name__) for made in SYSTEMS]
    marks = {name: pytest.mark.long for name in long}
    systems = [pytest.param(made, id=name, marks=marks.get(name, ())) for made, name in named]
    return pytest.mark.parametrize("system", systems)
