"""What a finished run made: its model, and for a language model the words of its ids."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from jaxpfl import files
from jaxpfl.data.open import fields_of
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.config import sections
from jaxpfl.experiments.config.published import PublishedDecoderConfig, PublishedWeights
from jaxpfl.experiments.engine import build
from jaxpfl.experiments.engine.by_client import Personal
from jaxpfl.experiments.engine.evaluate import check_examples
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.experiments.systems.federated_training.study import VOCABULARY, Network, Study
from jaxpfl.experiments.systems.workspace import Workspace
from jaxpfl.text.tokenisers.vocabulary import Vocabulary
from jaxpfl.trained import CHARACTERS


def made(directory: Path, config: Config, record: Mapping[str, Any], **_: Any) -> base.Made:
    workspace, vocabulary = Workspace(config, directory), None
    workspace.planned("")  # refuses another run, or one that is not finished
    if isinstance(config.model, sections.LanguageModelConfig):
        path, digest = directory / VOCABULARY, record["vocabulary_sha256"]
        if not path.exists() or files.sha256_file(path) != digest:
            problem = f"is not the vocabulary of the run, whose SHA-256 is {digest}: restore it"
            raise CorruptFile(f"{path}: {problem}")
        vocabulary = Vocabulary.load(path)
    network = Network.of(config, vocabulary)
    published, adapted, bases = network.published, None, []
    words: Any = vocabulary if published is None else published.tokeniser
    if isinstance(config.model, sections.CharacterModelConfig):
        words = CHARACTERS
    if (named := network.published_as) is not None:
        expected = record["published_model"]["sha256"]
        base.require_same(named["path"], "published model", named["sha256"], expected)
    if isinstance(config.model, PublishedDecoderConfig) and config.model.lora is not None:
        adapted, bases = base.exported_base(config.model, "model", "base")
    algorithm = partial(network.algorithm, config.training)
    plan, params = workspace.finished("", algorithm, privacy=record["privacy"])
    source, tested_on = config.data.source, record["tested_on"]
    trained = base.TrainedModel("", network.model, params, words, adapted, fields_of(source))
    ours = next((row for row in record["table"] if row["model"] == OURS), {})
    measures = "loss", "perplexity", "accuracy", "average_precision"
    return base.Made(
        models=(trained, *bases),
        plan=plan,
        stamp=files.read_record(directory / "run.json", {"stamp": str})["stamp"],
        trained_on=_trained_on(config, record, vocabulary),
        scores={name: ours[name] for name in measures if ours.get(name) is not None},
        tested_on=tested_on and tested_on.replace(source, base.last_part(source)),
    )


def personal(config: Config, made: base.Made, own: Population) -> Personal:
    """The models of Ditto's or APFL's clients, which train them on examples of their `own`."""
    trained, training = made.models[0], config.training
    if training.algorithm.name not in ("ditto", "apfl") or trained.base is not None:
        given = f"{training.algorithm.name}{', adapters' if trained.base else ''}"
        expected = "training.algorithm ditto or apfl, which train all weights"
        raise InputError(f"clients have models of their own by {expected}, found {given}")
    vocabulary = trained.words if isinstance(trained.words, Vocabulary) else None
    own = build.cleaned(own, config.data)
    encoded = Study(config, own, vocabulary=vocabulary).encode(own)
    check_examples(trained.model, encoded, "--own")
    assert made.plan is not None
    constant = replace(training, schedule="constant")
    query = build.build_algorithm(trained.model, constant, made.plan).queries[0]
    return Personal(cast(Any, query.client_fn), trained.params, encoded, query.cohort)


def _trained_on(
    config: Config, record: Mapping[str, Any], vocabulary: Vocabulary | None
) -> dict[str, str]:
    data = base.trained_on(config.data.source)
    public = config.data.public
    if vocabulary is not None:
        own = public in (None, sections.PUBLIC_PART)
        named = vocabulary.source if own else base.last_part(str(public))
        data["vocabulary"] = f"public text: {named}"
    if isinstance(config.model, PublishedWeights) and config.model.path is not None:
        digest = record["published_model"]["sha256"]
        data["before the rounds"] = config.model.described(digest)
    before = [row["model"] for row in record["table"] if row["model"].startswith("prefinetuned")]
    if before:
        data["before the rounds"] = f"{before[0]}, which is public text"
    return data
