"""A language model with its parameters and its tokeniser: what writes texts."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpfl.models.base import Params
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.generate import Generated, generate_to_end
from jaxpfl.text.generation.sampling import Sampling
from jaxpfl.text.tokenisers.base import Tokeniser, check_fits


@dataclass(frozen=True)
class LanguageModel:
    """A decoder that can be asked for texts.

    Attributes:
      model: the network.
      params: as it reads them, adapters included where it has them.
      tokeniser: of the same vocabulary.
      mesh: devices that requests are dealt to, along its axis "data"; None for one.

    Raises:
      InputError: the tokeniser has ids that the network has no row for.
    """

    model: Decoder
    params: Params = field(repr=False)
    tokeniser: Tokeniser = field(repr=False)
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        check_fits(self.tokeniser, self.model.vocab_size)

    def write(
        self,
        prompts: Sequence[str],
        key: Array,
        *,
        sampling: Sampling,
        responses: int = 1,
        progress: bool = False,
    ) -> list[list[str]]:
        """`responses` texts for each prompt, see `jaxpfl.text.generation.generate.generate`."""
        return self.write_to_end(
            prompts, key, sampling=sampling, responses=responses, progress=progress
        ).texts

    def write_to_end(
        self,
        prompts: Sequence[str],
        key: Array,
        *,
        sampling: Sampling,
        responses: int = 1,
        progress: bool = False,
    ) -> Generated:
        """The same, and which texts ended by themselves."""
        return generate_to_end(
            self.model,
            self.params,
            self.tokeniser,
            prompts,
            key,
            responses=responses,
            sampling=sampling,
            mesh=self.mesh,
            progress=progress,
        )

    def shortened(self, texts: Sequence[str], tokens: int) -> list[str]:
        """The first `tokens` tokens of every text, as texts again, without space at the ends.

        A character that is cut in two is left out. A text that is short enough stays as it is.
        """
        return [
            self.tokeniser.decode(row[:tokens]).rstrip("\ufffd").strip()
            if len(row) > tokens
            else text
            for text, row in zip(texts, self.tokeniser.encode(texts), strict=True)
        ]

    def digest(self) -> str:
        """SHA-256 (hex) of the parameters, in the order of their names."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            digest.update(np.ascontiguousarray(leaf).data)
        return digest.hexdigest()

    def replaced(self, model: Decoder, params: Params) -> Self:
        """The same with another network and parameters."""
        return dataclasses.replace(self, model=model, params=params)
