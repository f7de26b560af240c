"""Builds what the shared sections of a config describe: clients, models, plans, algorithms."""

import dataclasses
import re
from functools import partial
from typing import Any

import optax
from dp_accounting import DpEvent

from jaxpfl import models
from jaxpfl.algorithms.ada_fed_prox import ada_fed_prox
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg import fed_avg
from jaxpfl.algorithms.fed_buff import fed_buff
from jaxpfl.algorithms.fed_dyn import fed_dyn
from jaxpfl.algorithms.scaffold import scaffold
from jaxpfl.data import open as open_population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.config import sections
from jaxpfl.federated.clients.local_training import LocalTraining, Proximal, per_step
from jaxpfl.federated.clients.optimizers import optimizer
from jaxpfl.federated.clients.personal import APFL, Ditto
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.release.query import Execution
from jaxpfl.models.base import Model
from jaxpfl.privacy import participation
from jaxpfl.privacy.clipping import AdaptiveClip, Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.simulated import LargerPopulation
from jaxpfl.text.columns import texts_of
from jaxpfl.text.tokenisers import characters
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def read_clients(config: sections.DataConfig) -> Population:
    clients = open_population(config.source)
    if not len(clients):
        raise InputError(f"data.source = {config.source!r} has no clients")
    return clients


def split_clients(clients: Population, config: sections.DataConfig) -> dict[str, Population]:
    """The parts of the clients by name, without what `data.remove` matches.

    Texts are changed after the split, so that the fingerprint, and with it the ledger, stays that
    of the data as it was read.
    """
    parts = clients.split(dataclasses.asdict(config.split), seed=config.split_seed)
    if not len(parts["train"]):
        raise InputError(f"data.split.train left no client to train on, of {len(clients)}")
    if config.remove is None:
        return parts
    pattern = re.compile(config.remove)
    for name, part in parts.items():
        texts = [pattern.sub("", text) for text in texts_of(part)]
        parts[name] = part.with_columns({**part.columns, "text": text_array(texts)})
    return parts


def open_public(
    source: str, public: Population | None, private: PrivateContent, what: str
) -> Population:
    """Opens a public source, called `what`; refuses it if it holds the private clients' data."""
    if source != sections.PUBLIC_PART:
        corpus = open_population(source)
        private.refuse(corpus, f"{what} = {source!r}")
        return corpus
    if public is None or not public.num_examples:
        raise InputError(f"{sections.PUBLIC_PART} has no clients: data.split.public is too small")
    return public


_MAKERS = {
    "cifg_lm": models.CIFGLanguageModel,
    "character_lstm": partial(models.LSTMLanguageModel, characters.VOCAB_SIZE),
    "classifier_mlp": models.MLP,
    "resnet18": models.ResNet,
    "classifier_cnn": models.classifier_cnn,
    "emnist_cnn": models.emnist_cnn,
    "multi_label_resnet18": models.MultiLabelResNet,
}


def build_model(settings: sections.ModelConfig, vocabulary: Vocabulary | None) -> Model:
    others = ("name", "path", "sequence_length", "unigram_prior")
    sizes = {name: value for name, value in vars(settings).items() if name not in others}
    if isinstance(settings, sections.LanguageModelConfig) and settings.unigram_prior and vocabulary:
        sizes["output_bias_prior"] = vocabulary.log_prior(settings.vocab_size)
    return _MAKERS[settings.name](**sizes)


def build_plan(
    privacy: sections.PrivacyConfig,
    training: sections.TrainingConfig,
    population: int,
    prior_releases: DpEvent | None = None,
    simulated: LargerPopulation | None = None,
) -> Plan:
    """Builds the plan of the rounds for `population` training clients.

    `privacy.epsilon` covers the run's `prior_releases` on them, too; the section is for the larger
    population that is `simulated`, if one is.
    """
    sampled = participation.of(privacy.sampling, population, training.clients_per_round)
    if simulated is not None:
        if not privacy.private:
            raise InputError("simulated must be absent where privacy.private is false")
        larger = dataclasses.replace(training, clients_per_round=simulated.clients_per_round)
        planned = dataclasses.replace(privacy, delta=simulated.delta)
        assert privacy.delta is not None
        plan = build_plan(planned, larger, simulated.population, prior_releases)
        return plan.simulated_by(sampled, privacy.delta)
    clip = Clip(privacy.clip_norm)
    if not privacy.private:
        return Plan.without_privacy(rounds=training.rounds, clip=clip, participation=sampled)
    assert privacy.delta is not None
    if privacy.adaptive:
        clip = dataclasses.replace(clip, adaptive=AdaptiveClip(privacy.target_quantile))
    shared: dict[str, Any] = {
        "rounds": training.rounds,
        "clip": clip,
        "participation": sampled,
        "delta": privacy.delta,
        "accountant": privacy.accountant,
    }
    if privacy.noise_multiplier is not None:
        return Plan(noise=Noise(privacy.noise_multiplier, privacy.noise), **shared)
    assert privacy.epsilon is not None
    return Plan.calibrated(
        epsilon=privacy.epsilon, noise=privacy.noise, prior_releases=prior_releases, **shared
    )


def build_fed_avg(
    model: Model,
    training: sections.TrainingConfig,
    plan: Plan,
    start: Any = None,
    frozen: Any = None,
) -> Algorithm:
    """Builds what a section `training` names; `start`, `frozen` as in `algorithms.fed_avg`."""
    named, client = training.algorithm, build_optimizer(training.client)
    shared: dict[str, Any] = {
        "server": build_optimizer(training.server),
        "plan": plan,
        "cohort": build_cohort(training),
        "execution": build_execution(training),
        "start": start,
    }
    if named.name in ("scaffold", "ada_fed_prox", "fed_buff") and frozen is not None:
        raise InputError(f"training.algorithm {named.name} trains whole models, no adapters")
    if named.variate_clip is not None:
        rate = training.client.learning_rate
        return scaffold(model, learning_rate=rate, variate_clip=named.variate_clip, **shared)
    if named.rise_clip is not None:
        return ada_fed_prox(model, client=client, rise_clip=named.rise_clip, **shared)
    if named.longest_delay is not None:
        return fed_buff(model, client=client, longest=named.longest_delay, **shared)
    if named.alpha is not None:
        return fed_dyn(model, client=client, alpha=named.alpha, frozen=frozen, **shared)
    client = _build_client(model, training, adapters=frozen is not None)
    algorithm = fed_avg(model, client=client, frozen=frozen, **shared)
    return algorithm._replace(name=named.name)


def _build_client(model: Model, training: sections.TrainingConfig, adapters: bool) -> LocalTraining:
    algorithm, rounds = training.algorithm, training.rounds
    schedule = None
    if training.schedule == "linear":
        schedule = optax.linear_schedule(1.0, 0.0, rounds)
    elif training.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(1.0, rounds)
    optimiser, mu = build_optimizer(training.client), algorithm.mu
    if mu is not None and algorithm.name == "ditto":
        return Ditto(model, optimiser, adapters, schedule=schedule, pull=mu)
    if algorithm.mix is not None:
        return APFL(model, optimiser, adapters, schedule=schedule, mix=algorithm.mix)
    return LocalTraining(
        model,
        optimiser,
        adapters,
        penalty=None if mu is None else Proximal(mu),
        transform=per_step if algorithm.name == "fed_nova" else None,
        schedule=schedule,
    )


def build_cohort(training: sections.TrainingConfig) -> CohortSpec:
    """How a client's examples are capped and batched, on this machine's devices."""
    slots, replicas = training.clients_per_bucket, build_execution(training).replicas
    return CohortSpec(
        batch_size=training.batch_size,
        max_examples=training.max_examples,
        epochs=training.epochs,
        # A multiple of the devices, so that all get the same number of clients.
        clients_per_bucket=None if slots is None else -(-slots // replicas) * replicas,
    )


def build_execution(training: sections.TrainingConfig) -> Execution:
    """This machine's devices, each with a copy of the model or several that share one."""
    shared = training.model_devices
    return Execution(None if shared == 1 else client_mesh(model=shared), training.chunk)


def build_optimizer(settings: sections.OptimizerConfig) -> optax.GradientTransformation:
    """The optax optimiser of a section `client`, `server` or `generator`."""
    return optimizer(settings.name, settings.learning_rate, settings.momentum)
