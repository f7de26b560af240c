"""What a finished study made: its downstream model, its generator's adapters, its corpus.

.                    the downstream model
generator/           the public generator, of the methods that tune it
generator_adapter/   the adapters by which the method tuned it
corpus/              the synthetic texts, of the run or more
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.data.open import fields_of
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.engine.build import build_algorithm
from jaxpfl.experiments.engine.phases import Phases, missing
from jaxpfl.experiments.engine.rounds import check_statement
from jaxpfl.experiments.records.artifacts import Artifacts, verified
from jaxpfl.experiments.systems import ARTIFACTS, base
from jaxpfl.experiments.systems.synthetic_text.config import Config
from jaxpfl.experiments.systems.synthetic_text.methods import METHODS, Tuning, enough
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels
from jaxpfl.experiments.systems.synthetic_text.questions import question_of
from jaxpfl.experiments.systems.synthetic_text.run import FINE_TUNING
from jaxpfl.experiments.systems.workspace import Workspace, ledger_path
from jaxpfl.models.decoder import lora
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

_GENERATOR = "generator"


def made(
    directory: Path,
    config: Config,
    record: Mapping[str, Any],
    *,
    texts: int | None = None,
    progress: bool = True,
) -> base.Made:
    if config.method == "central":
        problem = "'central', whose model is trained on the clients' own texts"
        because = "it is a ceiling to compare with, and is not exported"
        raise InputError(f"{directory}: the method must not be {problem}: {because}")
    models = StudyModels(config, progress)
    start, folder = models.downstream, directory / FINE_TUNING
    _require_public(models, "downstream", record)
    params, corpus, others = start.params, None, []
    plan = Plan.from_dict(record["plan"]) if record["plan"] else None
    if config.writes:
        run, corpus, others = _written(directory, models, record, plan, texts)
        # The run's own corpus trained the model, however many texts are wanted.
        _require_checkpoints(folder)
        params = models.fitted(start, run, config.corpus.fine_tuning, folder)
    elif config.method == "fed_avg":
        algorithm = partial(build_algorithm, start.model, config.training, start=start.params)
        workspace = Workspace(config, directory)
        _, params = workspace.finished("fed_avg", algorithm, privacy=record["privacy"])
    source = config.data.source
    trained = base.TrainedModel("", start.model, params, start.tokeniser, fields=fields_of(source))
    return base.Made(
        models=(trained, *others),
        plan=plan,
        stamp=record["stamp"],
        trained_on=_trained_on(config, record, corpus),
        scores={name: record["metrics"][name] for name in ("loss", "perplexity", "accuracy")},
        tested_on=record["tested_on"].replace(source, base.last_part(source)),
        corpus=corpus,
    )


def _written(
    directory: Path,
    models: StudyModels,
    record: Mapping[str, Any],
    plan: Plan | None,
    number: int | None,
) -> tuple[list[str], list[str], list[base.TrainedModel]]:
    """The run's corpus, `number` texts for export, and the generator if the method has tuned it.

    Its writing more texts is post-processing of the releases: no client's data is read.
    """
    config, question, artifacts = models.config, None, models.stored(directory)
    if plan is not None:  # clients were asked
        Workspace(config, directory).planned(config.method)
        folder, ledger = directory / "runs" / config.method, ledger_path(config.privacy, directory)
        run = files.read_record(folder / "run.json", {"run": str})["run"]
        check_statement(record["privacy"], ledger, (run,), plan)
        question = question_of(models, plan)
        artifacts = Artifacts(directory / ARTIFACTS, run=run, ledger=Ledger.read(ledger))
    phases = Phases(artifacts)
    corpus = phases.load_or_compute("corpus", missing)["texts"].tolist()
    if config.corpus.chosen is not None and (number or 0) > len(corpus):
        most = f"the {len(corpus)} chosen texts of the corpus, which is not written on"
        raise InputError(f"{directory}: an export must have at most {most}, found {number}")
    wanted, tunes = corpus[:number], config.method in ("popri", "pe_sft")
    if not tunes and len(wanted) >= (number or 0):
        return corpus, wanted, []
    if config.remote is None:
        _require_public(models, _GENERATOR, record)
    _require_checkpoints(directory / "generator_tuning", needed=config.method == "pe_sft")
    author = METHODS[config.algorithm](Tuning(models, phases, directory), question and question.of)
    if number is not None:
        wanted = enough(lambda lacking, part: author.texts(lacking, part=part), number, corpus)
    if not tunes:
        return corpus, wanted, []
    tuned = author.generator
    if isinstance(config.generator, PublishedModelConfig):
        name, public = base.exported_base(config.generator, _GENERATOR, _GENERATOR)
    else:
        plain = lora.detach(tuned.model, tuned.params)
        name, public = _GENERATOR, [base.TrainedModel(_GENERATOR, *plain, tuned.tokeniser)]
    adapters = base.TrainedModel("generator_adapter", tuned.model, tuned.params, base=name)
    return corpus, wanted, [*public, adapters]


def _require_public(models: StudyModels, name: str, record: Mapping[str, Any]) -> None:
    """Refuses a public model, "generator" or "downstream", that the run did not start from."""
    about, expected = models.about[name], record["public_models"][name]["sha256"]
    where = about.get("path", models.config.cache)
    base.require_same(where, f"public {name}", about["sha256"], expected)


def _require_checkpoints(folder: Path, *, needed: bool = True) -> None:
    """Refuses altered checkpoints of a training, which would be trained again in silence."""
    checkpoints = sorted(folder.glob("round_*"))
    if needed and not checkpoints:
        raise CorruptFile(f"{folder}: the checkpoints of a finished training are missing")
    for checkpoint in checkpoints:
        verified(checkpoint)


def _trained_on(
    config: Config, record: Mapping[str, Any], corpus: list[str] | None
) -> dict[str, str]:
    def public(name: str) -> str:
        if name not in config.models:
            return f"the model {record['public_models'][name]['model']} behind an address"
        settings = config.models[name]
        if isinstance(settings, PublishedModelConfig):
            return settings.described(record["public_models"][name]["sha256"])
        corpora = config.corpora or {}
        names = corpora if settings.corpora is None else settings.corpora
        return "public text: " + ", ".join(base.last_part(corpora[name]) for name in names)

    data = {"method": config.method, "pretraining": public("downstream")}
    if corpus is not None:
        kind = "synthetic" if config.corpus.chosen is None else "synthetic and public"
        data["fine-tuning"] = f"{len(corpus)} {kind} texts, in corpus/"
        data["generator of the texts"] = public(_GENERATOR)
    sent = "scored synthetic texts"
    if config.one_look:
        sent = "released the moments of their embeddings, once"
    elif config.method == "steered":
        sent = "released mean differences of hidden states, once"
    elif config.method == "fed_avg":
        sent = "trained the model in rounds"
    elif not config.asks:
        return {**data, "private clients": "none: clients sent nothing"}
    (clients,) = base.trained_on(config.data.source).values()
    return {**data, "private clients": f"{clients} {sent}"}
