"""Builds what the shared sections of a config describe: clients, models, plans, algorithms."""

import dataclasses
import re
from typing import Any

import optax
from dp_accounting import DpEvent

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
from jaxpfl.models.recurrent import CIFGLanguageModel, LSTMLanguageModel
from jaxpfl.models.resnet import MultiLabelResNet
from jaxpfl.privacy import participation
from jaxpfl.privacy.clipping import AdaptiveClip, Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.simulated import LargerPopulation
from jaxpfl.privacy.strategies import BufferedToeplitz
from jaxpfl.text.columns import texts_of
from jaxpfl.text.tokenisers.public_words import is_list, public_words
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def read_clients(config: sections.DataConfig) -> Population:
    if not len(clients := open_population(config.source)):
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
    return {name: cleaned(part, config) for name, part in parts.items()}


def cleaned(clients: Population, config: sections.DataConfig) -> Population:
    """The clients without what `data.remove` matches."""
    if config.remove is None:
        return clients
    pattern = re.compile(config.remove)
    texts = [pattern.sub("", text) for text in texts_of(clients)]
    return clients.with_columns({**clients.columns, "text": text_array(texts)})


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


def public_vocabulary(
    source: str | Population, public: Population | None, private: PrivateContent, size: int
) -> Vocabulary:
    """The words of `data.vocabulary`, whose texts must not be the clients', or of a corpus."""
    if isinstance(source, str) and not is_list(source):
        source = open_public(source, public, private, "data.vocabulary")
    return public_words(source, size)


def build_model(section: sections.ModelConfig, vocabulary: Vocabulary | None) -> Model:
    """The model that a section is, without what the section says beyond it."""
    prior: dict[str, Any] = {}
    if isinstance(section, sections.LanguageModelConfig) and section.unigram_prior and vocabulary:
        prior["output_bias_prior"] = vocabulary.log_prior(section.vocab_size)
    for kind in (CIFGLanguageModel, LSTMLanguageModel, MultiLabelResNet):
        if isinstance(section, kind):
            names = [field.name for field in dataclasses.fields(kind)]
            return kind(**{name: getattr(section, name) for name in names} | prior)
    return section


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
    own = {"separation": privacy.separation, "at_most": privacy.at_most}
    cohorts = privacy.sampling, population, training.clients_per_round
    sampled, clip = participation.of(*cohorts, **own), Clip(privacy.clip_norm)
    if not privacy.private:
        if simulated is not None:
            raise InputError("simulated must be absent where privacy.private is false")
        return Plan.without_privacy(rounds=training.rounds, clip=clip, participation=sampled)
    assert privacy.delta is not None
    if simulated is not None:
        larger = dataclasses.replace(training, clients_per_round=simulated.clients_per_round)
        planned = dataclasses.replace(privacy, delta=simulated.delta)
        plan = build_plan(planned, larger, simulated.population, prior_releases)
        return plan.simulated_by(sampled, privacy.delta)
    if privacy.adaptive:
        clip = dataclasses.replace(clip, adaptive=AdaptiveClip(privacy.target_quantile))
    shared: dict[str, Any] = {"rounds": training.rounds, "clip": clip, "participation": sampled}
    shared |= {"delta": privacy.delta, "accountant": privacy.accountant}
    z = 1.0 if privacy.noise_multiplier is None else privacy.noise_multiplier
    shared["noise"] = Noise(z, privacy.noise, privacy.blt, privacy.trust)
    if (epsilon := privacy.epsilon) is None:
        return Plan(**shared)
    return Plan.calibrated(epsilon=epsilon, prior_releases=prior_releases, **shared)


def with_strategy(config: Any) -> Any:
    """The config of any system with the coefficients of its noise, if that is a BLT's.

    A run writes it, and is resumed with what it has written.
    """
    privacy = getattr(config, "privacy", None)
    if not isinstance(privacy, sections.PrivacyConfig) or privacy.noise != "blt" or privacy.blt:
        return config
    if privacy.separation is None or not hasattr(config, "training"):
        return config  # The plan refuses it.
    blt = BufferedToeplitz.best(config.training.rounds, privacy.separation)
    return dataclasses.replace(config, privacy=dataclasses.replace(privacy, blt=blt))


def build_algorithm(
    model: Model,
    training: sections.TrainingConfig,
    plan: Plan,
    start: Any = None,
    frozen: Any = None,
) -> Algorithm:
    """Builds what a section `training` names; `start`, `frozen` as in `algorithms.fed_avg`."""
    section, optimiser = training.algorithm, build_optimizer(training.client)
    if section.name in ("scaffold", "ada_fed_prox", "fed_buff") and frozen is not None:
        raise InputError(f"training.algorithm {section.name} trains whole models, no adapters")
    schedule = None
    if training.schedule == "linear":
        schedule = optax.linear_schedule(1.0, 0.0, training.rounds)
    elif training.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(1.0, training.rounds)
    local: Any = {"adapters": frozen is not None, "schedule": schedule}
    shared: Any = {"server": build_optimizer(training.server), "plan": plan, "start": start}
    shared |= {"cohort": build_cohort(training), "execution": build_execution(training)}
    match section:
        case sections.ScaffoldConfig(variate_clip=clip):
            rate = training.client.learning_rate
            return scaffold(model, learning_rate=rate, variate_clip=clip, **shared)
        case sections.AdaFedProxConfig(rise_clip=clip):
            return ada_fed_prox(model, client=optimiser, rise_clip=clip, **shared)
        case sections.FedBuffConfig(longest_delay=longest):
            return fed_buff(model, client=optimiser, longest=longest, **shared)
        case sections.FedDynConfig(alpha=alpha):
            return fed_dyn(model, client=optimiser, alpha=alpha, frozen=frozen, **shared)
        case sections.ProximalConfig("ditto", mu):
            client = Ditto(model, optimiser, pull=mu, **local)
        case sections.ProximalConfig("fed_prox", mu):
            client = LocalTraining(model, optimiser, penalty=Proximal(mu), **local)
        case sections.ApflConfig(mix=mix):
            client = APFL(model, optimiser, mix=mix, **local)
        case _:
            transform = per_step if section.name == "fed_nova" else None
            client = LocalTraining(model, optimiser, transform=transform, **local)
    return fed_avg(model, client=client, frozen=frozen, **shared)._replace(name=section.name)


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
