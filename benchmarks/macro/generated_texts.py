"""What a small generator writes by the methods of synthetic text, for `chosen_texts` to compare.

Each method is the library's own, with the settings of configs/popri_small.yaml, and has a ledger of
its own: they are alternatives. Prompts are random texts of the same public pool that texts are
chosen from. Reduced, for all alike: the generator is a Llama of 1.1 M parameters, there are three
rounds of 100 prompts with 10 responses, and no setting was tried on these clients. The generator
has read four corpora of the pool, docstrings, and the sentences that the judging model has read.

  untuned   the generator as it is: clients send nothing, epsilon 0
  pe        private evolution in Aug-PE's form, whose variations continue half of a text
  pe_sft    the generator, fine-tuned on the texts that were voted for
  popri     POPri by DPO, scores of a cohort in each round
  one_look  the same by one release of moments
  steered   EPSVec's form
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm, releaser_of
from jaxpfl.algorithms.popri import prompts_of, respond
from jaxpfl.data import Population
from jaxpfl.experiments.engine.phases import Phases, missing
from jaxpfl.experiments.records.artifacts import Artifacts
from jaxpfl.experiments.registry import load
from jaxpfl.experiments.systems.chosen_corpus.author import settings_of
from jaxpfl.experiments.systems.synthetic_text.config import Config
from jaxpfl.experiments.systems.synthetic_text.methods import METHODS, Author, Tuning, enough
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels
from jaxpfl.experiments.systems.synthetic_text.questions import question_of
from jaxpfl.experiments.systems.synthetic_text.study import Study
from jaxpfl.privacy import Ledger
from jaxpfl.text.cut import Cut
from jaxpfl.text.preference.groups import groups_of_texts
from jaxpfl.text.preference.losses import log_probabilities

CONFIG = Path(__file__).parents[2] / "configs/popri_small.yaml"
GENERATORS = {
    "untuned": ("generator", "scores"),
    "pe": ("private_evolution", "scores"),
    "pe_sft": ("pe_sft", "scores"),
    "popri": ("popri", "scores"),
    "one_look": ("popri", "moments"),
    "steered": ("steered", "scores"),
}
"""By arm, the study's method and what clients send in POPri."""
# Of all clients, but at most, in a cohort. The prompts that a divergence is measured on.
_SHARE, _COHORT, _PROMPTS = 0.25, 1_000, 50


@dataclasses.dataclass(frozen=True)
class PoolModels(StudyModels):
    """The models of a study whose prompts are made of the texts of a pool, as they are."""

    pool: Sequence[str] = ()

    def samples(self, names: Sequence[str] | None = None) -> list[str]:
        return list(self.pool)


def small(models: Path) -> StudyModels:
    """The public models of popri_small, which are pretrained into this folder once."""
    return StudyModels(load(CONFIG, ["--cache", str(models)]))


def config_of(
    arm: str, clients: int, pool: Sequence[str], public: StudyModels, options: dict[str, Any]
) -> Config:
    """The config of popri_small for an arm; `options` has epsilon, delta, texts, spans, cut, seed.

    A text has as many tokens as a public one, and a prompt what is left of the generator's places.
    """
    config, replace = public.config, dataclasses.replace
    method, send = GENERATORS[arm]
    cut = Cut.parse(options["cut"])
    sizes = settings_of(public.tokeniser, cut, pool[:: len(pool) // 2_000])
    new, places = sizes.new_tokens, public.config.positions["generator"]
    prompted = {name: getattr(sizes, name) for name in ("format", "temperature", "top_p")}
    return replace(
        config,
        method=method,
        corpus=replace(config.corpus, texts=options["texts"], tokens=new, cut=options["cut"]),
        popri=replace(
            config.popri,
            clients_send=send,
            samples=None,
            prompt_tokens=places - new - 1,
            new_tokens=new,
            response_tokens=new,
            **prompted,
        ),
        evolution=replace(config.evolution, max_texts=options["spans"]),
        privacy=replace(config.privacy, epsilon=options["epsilon"], delta=options["delta"]),
        training=replace(
            config.training,
            clients_per_round=min(_COHORT, round(_SHARE * clients)),
            max_examples=options["spans"],
        ),
        run=replace(config.run, seed=options["seed"]),
    )


def generated(
    arm: str, train: Population, pool: Sequence[str], public: StudyModels, **options: Any
) -> tuple[list[str], dict[str, Any]]:
    """So many texts of an arm by clients with the column "embedding", and what is to be said."""
    config = config_of(arm, len(train), pool, public, options)
    models, study = PoolModels(config, pool=pool), Study(config, train)
    question, releaser, spent = None, None, 0.0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ledger = stack.enter_context(Ledger(folder / "ledger.jsonl", train))
        if study.sends:
            question = question_of(models, study.plan)
            algorithm = Algorithm(config.algorithm, missing, missing, question.queries)
            prepared = question.prepare(train) if question.prepare else train
            releaser = releaser_of(algorithm, prepared, ledger)
        phases = Phases(Artifacts(folder / "artifacts", run=arm), releaser)
        author = METHODS[config.algorithm](Tuning(models, phases, folder), question and question.of)
        texts = enough(author.texts, options["texts"])
        if study.sends:
            spent = ledger.spent(options["delta"])
    said: dict[str, Any] = {"epsilon": spent}
    if study.sends:
        said |= {"asked": study.plan.rounds, "cohort": study.plan.participation.clients_per_round}
    if author.generator.params is not models.generator.params:
        said |= divergence(author, models)
    return texts, said


def divergence(author: Author, models: StudyModels) -> dict[str, float]:
    """KL of what is written from the untuned generator, in nats a text and a token.

    An estimate from what the changed generator writes, at its temperature and top-p, by the
    log-probabilities that both give at temperature 1.
    """
    settings, writer, base = author.settings, author.generator, models.generator
    seed = models.config.run.seed
    prompts = prompts_of(writer, author.samples, _PROMPTS, settings, seed, -1_000)
    texts, ended_KxJ = respond(writer, prompts, settings, jax.random.key(seed))
    groups = groups_of_texts(
        writer.tokeniser,
        prompts,
        np.array(texts),
        ended_KxJ,
        format=settings.format,
        prompt_tokens=settings.prompt_tokens,
        response_tokens=settings.response_tokens,
    )
    written, reference = (
        log_probabilities(m.model, m.params, groups, mesh=m.mesh) for m in (writer, base)
    )
    tokens, nats = np.sum(reference != 0), float(np.sum(written - reference, dtype=np.float64))
    return {"kl_text": nats / ended_KxJ.size, "kl_token": nats / float(tokens)}
