"""The config section of a public decoder and its pretraining."""

from dataclasses import dataclass, field
from typing import Literal

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.models.decoder.config import DecoderConfig


@dataclass(frozen=True)
class DecoderModelConfig(Checked):
    """A decoder and its pretraining on public corpora.

    Attributes:
      architecture, hidden_size, layers, heads, inner_size: see `models.decoder.config`; its other
        sizes follow from the tokeniser and the longest sequence.
      sequence_length: tokens of a pretraining row.
      corpora: names of the corpora that it is pretrained on; None for all.
    """

    architecture: Literal["gpt2", "llama"] = "llama"
    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    inner_size: int = 512
    sequence_length: PositiveInt = 128
    corpora: tuple[str, ...] | None = None
    pretraining: Training = field(
        default_factory=lambda: Training(batch_size=32, learning_rate=0.003, weight_decay=0.1)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.network(vocab_size=1, positions=self.sequence_length)

    def network(self, vocab_size: int, positions: int) -> DecoderConfig:
        """Returns the network's config for a vocabulary and sequences of up to `positions`."""
        return DecoderConfig(
            self.architecture,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            inner_size=self.inner_size,
            positions=positions,
            tied=True,
        )
