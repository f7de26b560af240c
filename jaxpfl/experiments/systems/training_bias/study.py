"""The study of training bias: what do clients write that public training data lacks?

Source: Augenstein et al. 2020, Table 1 (task T6) and section 2.1, which describe it and leave it to
future work. A language model is trained on public text. Every client keeps the sentences that are
improbable by this model, and a second model is trained on these alone, privately, from the first
one's parameters. What it generates with more probability than the public model by a threshold is
what the public data lacks. How many sentences clients keep is one more release, a count.

The bias is simulated: a share of the clients writes texts of another source. Each share is a world
of its own, see `systems.worlds`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.federated_metrics import COLUMN
from jaxpfl.data import open as open_population
from jaxpfl.data.corruptions import replace_texts
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.records.cautions import percent
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.systems import worlds
from jaxpfl.experiments.systems.training_bias.config import Config
from jaxpfl.experiments.systems.workspace import Workspace, stored_params
from jaxpfl.experiments.systems.worlds import RATE
from jaxpfl.privacy.keys import BIAS_SENTENCES, training_root
from jaxpfl.text.generation.sentences import sample_tokens
from jaxpfl.text.metrics.prediction import log_densities, unlikely
from jaxpfl.text.tokenisers.vocabulary import BOS, SPECIALS

MODEL = "model"


@dataclass(frozen=True)
class Study(worlds.Study):
    """The private model and the count of each world.

    Attributes:
      clients: the training clients without the bias, with their texts; PRIVATE.
      vocabulary: None for made-up clients, and so are the others.
      public: token ids of the PUBLIC corpus, int32 [sentences, length + 1].
      planted: the PUBLIC texts that some clients write, a population.
    """

    config: Config
    vocabulary: Any = field(default=None, repr=False)
    public: Any = field(default=None, repr=False)
    planted: Any = field(default=None, repr=False)

    rates = ("rare_share", "rare_noise")

    @property
    def most(self) -> int:
        return self.config.training.max_examples

    @cached_property
    def model(self) -> Any:
        return build.build_model(self.config.model, self.vocabulary)

    @property
    def kinds(self) -> dict[str, worlds.Kind]:
        columns = description.example_columns(self.config.model)
        return {MODEL: worlds.Kind(self.config, self.model, columns)}

    @property
    def worlds(self) -> dict[str, float]:
        """The share of clients who write something else, by world."""
        return {f"bias_{100 * share:g}_percent": share for share in self.config.bias.shares}

    @cached_property
    def held_out(self) -> np.ndarray:
        """Which public sentences do not train the public model, bool [sentences]."""
        generator = np.random.Generator(np.random.Philox(key=self.config.run.seed))
        return generator.random(len(self.public)) < self.config.public_model.valid


def prepare(config: Config) -> Study:
    train, public, vocabulary, private = worlds.opened(config.data, config.model.vocab_size)
    planted = open_population(config.bias.source, public=True)
    private.refuse(planted, f"bias.source = {config.bias.source!r}")
    encoded = vocabulary.encode(public, config.model.sequence_length).columns["tokens"]
    study = Study(config, train, vocabulary, np.asarray(encoded), planted)
    if not 0 < study.held_out.sum() < len(study.held_out):
        raise InputError(
            f"data.public has {len(study.held_out)} sentences, too few to train on and to hold out"
        )
    study.at_scale()
    return study


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    config, artifacts = study.config, workspace.artifacts()
    words = worlds.store_vocabulary(study, workspace)
    names = "epochs", "batch_size", "learning_rate"
    how: Any = {name: getattr(config.public_model, name) for name in names}
    how |= {"seed": config.run.seed}
    rest = {"tokens": study.public[~study.held_out]}
    train = partial(fit_adam, study.model, rest, **how)
    public = stored_params(artifacts, "public_model", study.model, train)
    start = f"{words} {artifacts.sha256('public_model')}"

    def threshold() -> Artifact:
        log_N = log_densities(study.model, public, study.public[study.held_out])
        return Artifact({"threshold": float(np.quantile(log_N, config.public_model.rare))})

    limit = artifacts.load_or_compute("threshold", threshold, start).record["threshold"]
    planted = study.planted.column("text").to_pylist()

    def changed(share: float) -> tuple[Population, Callable[[str], Population]]:
        texts = replace_texts(study.clients, planted, share, config.run.seed)
        clients = study.vocabulary.encode(texts, config.model.sequence_length)
        rare = unlikely(study.model, public, np.asarray(clients.columns["tokens"]), limit)
        counts = np.stack([rare, ~rare], axis=1).astype(np.float32)
        examples = {MODEL: clients.keeping(rare), RATE: clients.with_columns({COLUMN: counts})}
        return clients, examples.__getitem__

    starts = {MODEL: (public, start), RATE: (None, start)}
    drawn = partial(_generated, study, workspace.progress, public)
    return {
        **worlds.carried_out(study, workspace, starts, changed, drawn),
        "public": config.data.public,
        "bias": dataclasses.asdict(config.bias),
        "rare": config.public_model.rare,
        "threshold": limit,
    }


def _generated(
    study: Study, progress: bool, public: Any, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Sentences of the private model: how many the public one lacks, and which ones most."""
    config, vocabulary = study.config, study.vocabulary
    key = jax.random.fold_in(training_root(config.run.seed), BIAS_SENTENCES)
    numbers, longest = np.arange(config.drawn.sentences), config.model.sequence_length
    shown: Any = {"max_tokens": longest, "progress": progress}
    drawn_NxT = sample_tokens(study.model, params[MODEL], key, numbers, **shown)
    rows_NxL = np.pad(drawn_NxT, ((0, 0), (1, 0)), constant_values=BOS)
    private_N, public_N = (log_densities(study.model, p, rows_NxL) for p in (params[MODEL], public))
    excess_N = private_N - public_N
    planted = vocabulary.encode(study.planted, config.model.sequence_length).columns["tokens"]
    planted_N = nearer(rows_NxL, np.asarray(planted), study.public, len(vocabulary))
    most = np.argsort(-excess_N, kind="stable")[: config.drawn.top]
    return {
        "missing_share": float(np.mean(excess_N > config.drawn.excess)),
        "planted_share": float(np.mean(planted_N)),
        "top": [
            {"text": text, "excess": float(excess_N[row]), "planted": bool(planted_N[row])}
            for row, text in zip(most, map(vocabulary.decode, drawn_NxT[most]), strict=True)
        ],
    }


def nearer(
    rows_NxL: np.ndarray, one_MxL: np.ndarray, other_KxL: np.ndarray, size: int
) -> np.ndarray:
    """Which rows are more probable by the word frequencies of `one` than by `other`, bool [N].

    Frequencies are add-one smoothed; special tokens do not count.
    """
    log_frequencies = []
    for rows in (one_MxL, other_KxL):
        counts = np.bincount(rows[rows >= len(SPECIALS)], minlength=size) + 1.0
        log_frequencies.append(np.log(counts / counts.sum()))
    weight_V = log_frequencies[0] - log_frequencies[1]
    weight_V[: len(SPECIALS)] = 0.0
    return np.sum(np.where(rows_NxL >= 0, weight_V[rows_NxL], 0.0), axis=1) > 0


def page(directory: Path, record: dict[str, Any]) -> Page:
    records, drawn, bias = list(record["worlds"].values()), record["drawn"], record["bias"]
    plan = record["plans"][MODEL]
    titles = [f"bias of {100 * world['share']:g} %" for world in records]
    rows, shown = [], []
    for title, world in zip(titles, records, strict=True):
        clients = f"{percent(world['rare_share'])} ± {percent(world['rare_noise'])}"
        drawn_shares = percent(world["missing_share"]), percent(world["planted_share"])
        rows.append((title, clients, *drawn_shares))
        shown.append([(top["text"], f"{top['excess']:.2f}") for top in world["top"]])
    columns = ("", "rare sentences of the clients", "drawn: missing in public", "drawn: planted")
    return Page(
        title="What does the public training data lack? A private language model",
        lead=f"{record['population']} · a client: {record['unit']} · public: {record['public']}",
        **worlds.page_fields(record),
        facts=[
            (f"{plan['rounds']}", "rounds"),
            (f"{plan['clients_per_round']:g}", "clients in a round (expected)"),
            (f"{plan['noise_multiplier']:.3g}", "noise multiplier"),
            (f"{drawn['sentences']:,}", "drawn sentences"),
        ],
        sections=[
            Section(
                "How much the public data lacks",
                f"A sentence is rare if the public model gives it less than to all but "
                f"{percent(record['rare'])} of held-out public sentences; the share of the clients "
                "is a private count with the standard deviation of its noise. The private model is "
                f"trained on rare ones alone. Missing: its words are {drawn['excess']:g} nats more "
                "probable by the private model. Planted: nearer by the frequencies of words to "
                f"{bias['source']}, from which some simulated clients write, than to the public.",
                table=Table(columns, rows, (1, 2, 3)),
            ),
            Section(
                "What it lacks: drawn sentences of the greatest excess",
                f"By how much each word is more probable than by the model of {record['public']}, "
                "in the mean.",
                table=worlds.ranked(titles, "excess, nats", shown),
            ),
        ],
    )
