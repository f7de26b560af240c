"""The config of a chosen public corpus."""

from dataclasses import dataclass, field
from typing import Literal

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.central.adamw import DecoderModelConfig
from jaxpfl.experiments.config.published import PublishedGeneratorConfig, RemoteGeneratorConfig
from jaxpfl.experiments.config.sections import WRITTEN, DataConfig, PrivacyConfig, RunConfig
from jaxpfl.models.checkpoints.hub import SMOLLM2
from jaxpfl.text.cut import Cut

SHOTS = 3
"""The public texts in a prompt."""

JUDGE, JUDGE_SHARE = "judge", 0.1
"""The column of the judge's embeddings, and its share of the release."""


@dataclass(frozen=True)
class WriterConfig(Checked):
    """A language model that continues chosen public texts; all texts are then chosen from anew.

    Attributes:
      generator: a published model, which reads prompts as they are if `chat` is false; one behind
        an address; or one that is first pretrained on the corpora.
      texts: how many it is asked for in a round; empty ones and repeats are left out.
      rounds: how often it writes.
      vocab_size: of the tokeniser that is learned from the corpora, for a model that is pretrained
        on them; behind an address it only counts tokens.
      cache: the folder of what is learned from the corpora.
    """

    generator: PublishedGeneratorConfig | RemoteGeneratorConfig | DecoderModelConfig = field(
        default_factory=lambda: PublishedGeneratorConfig(SMOLLM2, chat=False)
    )
    texts: PositiveInt = 1_000
    rounds: PositiveInt = 1
    vocab_size: PositiveInt = 2_048
    cache: str = "runs/public_models"


@dataclass(frozen=True)
class LabelsConfig(Checked):
    """Labels, for each of which texts are chosen.

    Attributes:
      column: of the clients' table, which `data.source` must name (`?columns=`): each text's label.
      names: a PUBLIC list. Which labels the table has is private: texts with others are left out.
    """

    column: str
    names: tuple[str, ...]

    def check_fields(self) -> None:
        if len(self.names) < 2 or len(set(self.names)) < len(self.names) or "" in self.names:
            names = list(self.names)
            raise InputError(f"labels.names must be two labels or more, each once, found {names}")


@dataclass(frozen=True)
class Config(Checked):
    """Single public texts, chosen by one release of the clients' moments.

    The clients of `data.split.train` make the release. Their number is public.

    Attributes:
      corpora: public sources by name, from which texts are chosen.
      privacy: `epsilon` of the one release, in which all clients take part.
      texts: how many are chosen.
      embedder: see `jaxpfl.text.embed.embedder`; or a list of them, all of which choose, with equal
        shares of the one release.
      judge: a further embedder, whose moments have a tenth of the release: how near the texts are
        by it is reported, and decides nothing. None: no judge.
      cut: the rule by which the texts of clients and corpora are cut, see `text.cut`.
      max_examples: the most texts of a client that are used, drawn at random.
      labels: texts are chosen for each of these labels, by one release of the moments of all; None:
        for all that the clients hold.
      writer: the model whose texts join the public ones; None: none is written.
    """

    system: Literal["chosen_corpus"]
    data: DataConfig
    corpora: dict[str, str]
    privacy: PrivacyConfig
    texts: PositiveInt = 1_000
    embedder: str | tuple[str, ...] = "hashed"
    judge: str | None = None
    cut: str = "messages"
    max_examples: PositiveInt = 64
    labels: LabelsConfig | None = None
    writer: WriterConfig | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def check_fields(self) -> None:
        with named("cut"):
            Cut.without_model(self.cut)
        names = list(self.embedders.values())
        if len(set(names)) < len(names):
            raise InputError(f"embedder and judge must differ from each other, found {names}")
        if self.labels is not None and self.texts < len(self.labels.names):
            labels = len(self.labels.names)
            raise InputError(f"texts must be at least {labels}, one a label, found {self.texts}")
        if not self.corpora:
            raise InputError("corpora must name at least one public source, found none")
        if self.writer is not None and self.labels is not None:
            raise InputError("writer and labels: one of them must be absent, found both")
        if self.writer is not None and WRITTEN in self.corpora:
            raise InputError(f"corpora.{WRITTEN} must have another name: it is the writer's corpus")
        if self.writer is not None and self.texts < SHOTS:
            least = f"{SHOTS}, of which a writer's prompt is made"
            raise InputError(f"texts must be at least {least}, found {self.texts}")
        if self.data.public is not None or self.data.vocabulary is not None:
            because = "public texts are those of corpora"
            raise InputError(f"data.public and data.vocabulary must be absent: {because}")
        own = (self.privacy.noise_multiplier, self.privacy.sampling, self.privacy.trust)
        if own != (None, "poisson", "central"):
            refused = "privacy.noise_multiplier, privacy.sampling and privacy.trust"
            because = "all clients take part in one release, whose noise follows from the epsilon"
            raise InputError(f"{refused} must be absent: {because}")

    @property
    def embedders(self) -> dict[str, str]:
        """The names of all embedders by the column that the release reads; the judge's last."""
        names = (self.embedder,) if isinstance(self.embedder, str) else self.embedder
        columns = ("embedding", *(f"embedding_{n}" for n in range(2, len(names) + 1)))
        judge = {} if self.judge is None else {JUDGE: self.judge}
        return dict(zip(columns, names, strict=True)) | judge

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the release, each embedder's."""
        judges = () if self.judge is None else (JUDGE_SHARE,)
        number = len(self.embedders) - len(judges)
        return ((1 - sum(judges)) / number,) * number + judges

    @property
    def metrics(self) -> set[str]:
        return {"epsilon", "distance", "drawn_distance", "mixture_distance", "effective_size"}
