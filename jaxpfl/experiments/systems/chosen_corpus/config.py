"""The config of a chosen public corpus."""

from dataclasses import dataclass, field
from typing import Literal

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.config.sections import DataConfig, PrivacyConfig, RunConfig
from jaxpfl.text.cut import Cut


@dataclass(frozen=True)
class Config(Checked):
    """Public texts that are chosen one by one by one release of the clients' moments.

    The clients of `data.split.train` make the release. Their number is public.

    Attributes:
      corpora: public sources by name, from which texts are chosen.
      privacy: `epsilon` of the one release, in which all clients take part.
      texts: how many are chosen.
      embedder: see `jaxpfl.text.embed.embedder`.
      cut: the rule by which the texts of clients and corpora are cut, see `text.cut`.
      max_examples: the most texts of a client that are used, drawn at random.
    """

    system: Literal["chosen_corpus"]
    data: DataConfig
    corpora: dict[str, str]
    privacy: PrivacyConfig
    texts: PositiveInt = 1_000
    embedder: str = "hashed"
    cut: str = "messages"
    max_examples: PositiveInt = 64
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        with named("cut"):
            Cut.without_model(self.cut)
        if not self.corpora:
            raise InputError("corpora must name at least one public source, found none")
        if self.data.public is not None or self.data.vocabulary is not None:
            raise InputError(
                "data.public and data.vocabulary must be absent: public texts are those of corpora"
            )
        if self.privacy.noise_multiplier is not None or self.privacy.sampling != "poisson":
            raise InputError(
                "privacy.noise_multiplier and privacy.sampling must be absent: all clients take "
                "part in one release, whose noise follows from privacy.epsilon"
            )

    @property
    def metrics(self) -> set[str]:
        """The names of what the results have numbers of."""
        return {"epsilon", "distance", "drawn_distance", "mixture_distance", "effective_size"}
