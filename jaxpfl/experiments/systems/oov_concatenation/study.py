"""The study of joined words: federated language models reveal a bug of a tokeniser.

Source: Augenstein et al. 2020, section 5 and appendix B. In a share of the sentences the first two
words are joined into one, which is out of vocabulary. Two models are trained privately, and the
clients' own words are counted:

    words        on whole sentences: it shows WHERE in a sentence words are out of vocabulary
    characters   on the clients' out-of-vocabulary words only: it shows WHICH words these are
    rate         how many of the clients' words are out of vocabulary, by one release (Table 6)

Each share of the bug is a world of its own, see `systems.worlds`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.federated_metrics import COLUMN
from jaxpfl.data.corruptions import concatenate_first_words
from jaxpfl.data.open import fields_of
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import percent
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.systems import base, worlds
from jaxpfl.experiments.systems.oov_concatenation.config import Config
from jaxpfl.experiments.systems.workspace import Workspace, stored_params
from jaxpfl.experiments.systems.worlds import RATE
from jaxpfl.federated.audits.rehearsal import column
from jaxpfl.models.base import initialised, require_room
from jaxpfl.privacy.keys import OOV_SENTENCES, OOV_WORDS, training_root
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.character.top_words import top_words
from jaxpfl.text.character.words import char_lm, log_prior, oov_words
from jaxpfl.text.generation.sentences import sample_tokens
from jaxpfl.text.metrics.oov import oov_counts, oov_rates
from jaxpfl.text.tokenisers.vocabulary import Vocabulary, with_words


@dataclass(frozen=True)
class Study(worlds.Study):
    """The two models of each world, and the count of its words.

    Attributes:
      clients: the training clients without the bug, with their words; PRIVATE.
      vocabulary: a `Vocabulary`, the words of the public corpus; None for made-up clients.
      public_words: those of its words that are out of the vocabulary, as bytes; None likewise.
    """

    config: Config
    vocabulary: Any = field(default=None, repr=False)
    public_words: Any = field(default=None, repr=False)

    rates = ("oov_overall", "oov_noise")

    @property
    def most(self) -> int:
        return self.config.words.training.max_examples * self.config.words.model.sequence_length

    @cached_property
    def kinds(self) -> dict[str, worlds.Kind]:
        words, characters = self.config.words, self.config.characters
        sizes = dataclasses.asdict(characters.model)
        # Start and end of word.
        tokens = column((sizes.pop("max_bytes") + 2,), np.int32)
        if self.public_words is not None:
            # Their letter frequencies.
            sizes["output_bias_prior"] = log_prior(self.public_words)
        model, columns = words.model, description.example_columns(words.model)
        return {
            "words": worlds.Kind(words, build.build_model(model, self.vocabulary), columns),
            "characters": worlds.Kind(characters, char_lm(**sizes), {"tokens": tokens}),
        }

    @property
    def worlds(self) -> dict[str, float]:
        """The share of sentences with the bug by world, such as 0.01 of "bug_1_percent"."""
        return {f"bug_{100 * share:g}_percent": share for share in self.config.bug.probabilities}

    def examples(self, clients: Population, kind: str) -> Population:
        """The examples that a model is trained on, or that the count reads."""
        if kind == RATE:
            tokens_NxT = np.asarray(self.examples(clients, "words").columns["tokens"])
            return clients.with_columns({COLUMN: oov_counts(tokens_NxT)})
        if kind == "words":
            return self.vocabulary.encode(clients, self.config.words.model.sequence_length)
        return oov_words(clients, self.vocabulary, self.config.characters.model.max_bytes)

    def character_start(self) -> Any:
        """The initial parameters of the character model, which follow from public words."""
        settings, model = self.config.characters, self.kinds["characters"].model
        if not settings.prefinetune_epochs:
            return initialised(model, jax.random.key(self.config.run.seed))
        how: Any = {"batch_size": 128, "learning_rate": 0.003, "seed": self.config.run.seed}
        words, epochs = {"tokens": self.public_words}, settings.prefinetune_epochs
        return fit_adam(model, words, epochs=epochs, **how)


def prepare(config: Config) -> Study:
    size, longest = config.words.model.vocab_size, config.characters.model.max_bytes
    train, public, vocabulary, _ = worlds.opened(config.data, size)
    unknown = oov_words(public, vocabulary, longest).columns["tokens"]
    if not len(unknown):
        raise InputError(
            "data.public must contain words out of the vocabulary, found none: lower "
            f"words.model.vocab_size = {size}"
        )
    study = Study(config, with_words(train, vocabulary.split), vocabulary, np.asarray(unknown))
    for kind in study.kinds.values():
        require_room(kind.model)
    study.at_scale()
    return study


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    vocabulary, artifacts, begin = study.vocabulary, workspace.artifacts(), "character_start"
    words, model = worlds.store_vocabulary(study, workspace), study.kinds["characters"].model
    start = stored_params(artifacts, begin, model, study.character_start)
    letters = f"{words} {artifacts.sha256(begin)}"
    starts = {"words": (None, words), "characters": (start, letters), RATE: (None, words)}

    def changed(share: float) -> tuple[Population, Callable[[str], Population]]:
        clients = concatenate_first_words(study.clients, share, study.config.run.seed)
        return clients, partial(study.examples, clients)

    generated = partial(_generated, study, workspace.progress)
    return {
        **worlds.carried_out(study, workspace, starts, changed, generated),
        "vocabulary": {"size": len(vocabulary), "source": vocabulary.source},
    }


def _generated(study: Study, progress: bool, params: Mapping[str, Any]) -> dict[str, Any]:
    config, root = study.config, training_root(study.config.run.seed)
    words, key = study.kinds["words"].model, jax.random.fold_in(root, OOV_SENTENCES)
    numbers, longest = np.arange(config.drawn.sentences), config.words.model.sequence_length
    drawn: Any = {"max_tokens": longest, "progress": progress}
    rates = oov_rates(sample_tokens(words, params["words"], key, numbers, **drawn))
    model, key = study.kinds["characters"].model, jax.random.fold_in(root, OOV_WORDS)
    sizes: Any = {"number": config.drawn.top, "draws": config.drawn.words}
    sizes["max_bytes"] = config.characters.model.max_bytes
    # The model also generates words of the vocabulary, by mistake.
    shown = {"excluding": study.vocabulary, "progress": progress}
    top = top_words(model, params["characters"], key, **sizes, **shown)
    words = [{"word": one.word, "log_probability": one.log_probability} for one in top.words]
    return {"oov_by_position": rates.rate_T, "oov_generated": rates.overall, "top_words": words}


def page(directory: Path, record: dict[str, Any]) -> Page:
    records, drawn = list(record["worlds"].values()), record["drawn"]
    source, size = record["vocabulary"]["source"], record["vocabulary"]["size"]
    titles = [f"bug in {100 * world['share']:g} %" for world in records]
    axes = plots.axes("Out-of-vocabulary rate by position", stamp=mark_of(record["stamp"]))
    rows, tops = [], []
    for index, (title, world) in enumerate(zip(titles, records, strict=True)):
        # There is no rate where no sentence has a word.
        rates, generated = 100 * np.array(world["oov_by_position"], float), world["oov_generated"]
        label = f"{title} of sentences; {percent(generated)} overall"
        plots.curve(axes, list(enumerate(rates, 1)), index, label=label)
        first, top = percent(world["oov_by_position"][0]), world["top_words"]
        clients = f"{percent(world['oov_overall'])} ± {percent(world['oov_noise'])}"
        spaces = f"{sum(' ' in one['word'] for one in top)} of {len(top)}"
        rows.append((title, clients, first, percent(generated), spaces))
        shown = [one["word"].replace(" ", " ␣ ") for one in top]
        probabilities = [percent(math.exp(one["log_probability"])) for one in top]
        tops.append(list(zip(shown, probabilities, strict=True)))
    # Rates of 1 % and of 90 % must both be visible.
    plots.logarithmic(axes)
    picture = plots.labelled(axes, "position in the sentence", "% of words", legend=True)
    columns = ("", "OOV of the clients", "generated: OOV at position 1", "OOV overall")
    columns += ("top words with a space",)
    return Page(
        title="Which words does the vocabulary lack? Federated language models",
        lead=f"{record['population']} · a client: {record['unit']} · vocabulary of {size:,} words "
        f"from {source}",
        **worlds.page_fields(record),
        facts=[
            (f"{plan[name]:g}", f"{name.replace('_', ' ')}, {kind} model")
            for name in ("rounds", "clients_per_round", "noise_multiplier")
            for kind, plan in record["plans"].items()
            if kind != RATE
        ],
        sections=[
            Section(
                "Where: words out of vocabulary (OOV) by their position in generated sentences",
                f"{drawn['sentences']:,} sentences drawn from each word model, against the "
                f"vocabulary of {source}. The bug joins the first two words of a share of the "
                "sentences. The rate of the clients is of their own sentences, as a private count "
                "with the standard deviation of its noise.",
                [("oov_by_position", "OOV rate by position", picture)],
                Table(columns, rows, (1, 2, 3, 4)),
            ),
            Section(
                f"Which: the {drawn['top']} most probable words of the character models",
                f"The character models are trained only on words out of the vocabulary of {source}."
                " The probability is that of the whole word and its end. The bug makes words that "
                "contain a space (marked ␣).",
                table=worlds.ranked(titles, "probability by the model", tops),
            ),
        ],
    )


def made(directory: Path, config: Config, record: Mapping[str, Any], **_: Any) -> base.Made:
    """The two models of each world, each in a folder of its own; see `systems.base.System`."""
    models, plan, workspace = [], None, Workspace(config, directory)
    reads: Any = {"words": Vocabulary.load(directory / "vocabulary.json")}
    reads["fields"] = fields_of(config.data.source)
    # Which clients there are changes no model.
    kinds = Study(config, description.made_up(1)).kinds
    for world, about in record["worlds"].items():
        for kind, of_kind in kinds.items():

            def algorithm(plan: Plan, kind: str = kind) -> Algorithm:
                return Study(config, description.made_up(plan.population)).algorithm(kind)

            stated = {"ledger": worlds.ledger_of(directory, world)}
            stated |= {"privacy": about["privacy"][kind]}
            plan, params = workspace.finished(f"{kind}_{world}", algorithm, **stated)
            of_words = reads if kind == "words" else {}
            trained = f"{kind}_{world}", of_kind.model, params
            models.append(base.TrainedModel(*trained, **of_words))
    trained_on = base.trained_on(config.data.source)
    return base.Made(tuple(models), plan, record["stamp"], trained_on, scores={})
