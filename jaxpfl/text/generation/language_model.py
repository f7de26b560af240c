"""The interface of text writers, and a decoder with its parameters and its tokeniser."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Params
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy.keys import SAMPLE_SENTENCES, training_root
from jaxpfl.text.cut import MESSAGES, Cut
from jaxpfl.text.generation.decoding import Decoding, cut
from jaxpfl.text.generation.sampling import sample
from jaxpfl.text.generation.sentences import generate_sentences
from jaxpfl.text.microbatches import read
from jaxpfl.text.tokenisers.base import Tokeniser, check_fits, pad
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


class Generated(NamedTuple):
    """Texts that a language model wrote, several for each prompt.

    `ended_PxJ` says whether a response ended by itself, with an end-of-text token or a stop string,
    and not at `Decoding.max_new_tokens`; the text alone does not tell. `refused` is how many
    prompts a server would not answer; their texts are empty.
    """

    texts: list[list[str]]
    ended_PxJ: np.ndarray
    refused: int = 0


class Writer:
    """Continues prompts, see `LanguageModel.write`; its tokeniser counts their tokens.

    `cut` is the rule by which clients' texts were cut, and so are the texts that it writes.
    """

    tokeniser: Tokeniser
    cut: Cut = MESSAGES
    write: Callable[..., Generated]

    def without_chat(self) -> Self:
        """The same, which reads prompts as they are, see `Tokeniser.without_chat`."""
        return self

    def shortened(self, texts: Sequence[str], tokens: int) -> list[str]:
        """The first `tokens` tokens of every text, without white space at the ends.

        A character that the cut divides is left out. A text of at most `tokens` tokens is returned
        unchanged, including its white space.
        """
        return [
            self.tokeniser.decode(row[:tokens]).rstrip("\ufffd").strip()
            if len(row) > tokens
            else text
            for text, row in zip(texts, self.tokeniser.encode(texts), strict=True)
        ]

    def pieces(self, texts: Sequence[str], tokens: int) -> list[str]:
        """The written texts as they are used: `shortened`, and of each the first piece by `cut`."""
        return self.cut.first(self.shortened(texts, tokens))


@dataclass(frozen=True)
class LanguageModel(Writer):
    """A decoder, its parameters and its tokeniser, which together generate texts.

    Attributes:
      tokeniser: refused if it has ids for which the network has no embedding.
      mesh: the devices that share the requests, along its axis "data"; None for one device.
    """

    model: Decoder
    params: Params = field(repr=False)
    tokeniser: Tokeniser = field(repr=False)
    mesh: Mesh | None = None
    cut: Cut = MESSAGES

    def __post_init__(self) -> None:
        check_fits(self.tokeniser, self.model.vocab_size)

    def write(
        self,
        prompts: Sequence[str],
        key: Array,
        *,
        decoding: Decoding,
        responses: int = 1,
        progress: bool = False,
    ) -> Generated:
        """Writes `responses` texts for each prompt, and says which of them ended by themselves.

        A text is what follows the prompt, without the end-of-text token or stop string that ended
        it. Text j of prompt p depends on the parameters, the prompt, the key, p, j and the settings
        alone, see `jaxpfl.text.generation.sampling.sample`. An empty prompt is read as the start
        token or, if the tokeniser has none, as the end of the text before.
        """
        ids = prompt_ids(self.tokeniser, prompts)
        if not ids:
            return Generated([], np.zeros((0, responses), bool))
        prompts_PxL = pad(ids, max(map(len, ids)))
        drawn_PxJxT = sample(
            self.model,
            self.params,
            prompts_PxL,
            key,
            decoding=decoding,
            responses=responses,
            tokeniser=self.tokeniser,
            mesh=self.mesh,
            progress=progress,
        )
        return self.read(drawn_PxJxT, decoding.stop)

    def read(self, drawn_PxJxT: np.ndarray, stop: Sequence[str]) -> Generated:
        """The texts of sampled token ids, each cut before the first stop string."""
        token_bytes = self.tokeniser.token_bytes()
        left_out = {PAD, *self.tokeniser.ends}
        texts: list[list[str]] = []
        ended_PxJ = np.zeros(drawn_PxJxT.shape[:2], bool)
        for p, rows in enumerate(drawn_PxJxT.tolist()):
            texts.append([])
            for j, row in enumerate(rows):
                content = b"".join(token_bytes[i] for i in row if i not in left_out)
                written = cut(content, stop)
                texts[p].append(written.decode("utf-8", "replace"))
                ended_PxJ[p, j] = row[-1] in left_out or len(written) < len(content)
        return Generated(texts, ended_PxJ)

    def digest(self) -> str:
        """SHA-256 (hex) of the parameters, in the order of their names."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            # As bytes, because bfloat16 has no buffer interface.
            digest.update(np.ascontiguousarray(read(leaf)).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def without_chat(self) -> Self:
        return dataclasses.replace(self, tokeniser=self.tokeniser.without_chat())

    def replaced(self, model: Decoder, params: Params) -> Self:
        """A copy with another network and its parameters, and the same tokeniser and devices."""
        return dataclasses.replace(self, model=model, params=params)


def prompt_ids(tokeniser: Tokeniser, prompts: Sequence[str]) -> list[np.ndarray]:
    """The ids that a model reads for each prompt, see `Tokeniser.prompts`."""
    ids = tokeniser.prompts(prompts)
    for i, row in enumerate(ids):
        if not len(row):
            if tokeniser.end_of_text is None:
                what = (
                    f"the tokeniser {tokeniser.name} has neither a start nor an end-of-text token"
                )
                raise InputError(f"prompt {i} is empty, and {what} to begin with")
            ids[i] = np.array([tokeniser.end_of_text], np.int32)
    return ids


def sentences_of(
    model: Any,
    words: Vocabulary | LanguageModel,
    *,
    seed: int,
    number: int = 5,
    max_tokens: int = 20,
) -> Callable[[Any, int], list[str]]:
    """Returns `(params, round) -> sentences`, which generates from the model and reads no data."""

    def sentences(params: Any, round: int) -> list[str]:
        key = jax.random.fold_in(jax.random.fold_in(training_root(seed), SAMPLE_SENTENCES), round)
        if isinstance(words, Vocabulary):
            return generate_sentences(model, params, words, key, number, max_tokens=max_tokens)
        decoding = Decoding(max_new_tokens=max_tokens)
        writer = words.replaced(model, params)
        return writer.write([""], key, decoding=decoding, responses=number).texts[0]

    return sentences
