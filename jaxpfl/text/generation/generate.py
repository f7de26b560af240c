"""Texts that a decoder language model writes after prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.sampling import Sampling, sample
from jaxpfl.text.generation.stop import cut
from jaxpfl.text.tokenisers.base import PAD, Tokeniser, as_text, check_fits, pad


def generate(
    model: Decoder,
    params: Params,
    tokeniser: Tokeniser,
    prompts: Sequence[str],
    key: Array,
    *,
    responses: int = 1,
    sampling: Sampling,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> list[list[str]]:
    """`responses` texts for each prompt: what follows it, without stop string or end of text.

    As `generate_to_end`, without what ended them.
    """
    return generate_to_end(
        model,
        params,
        tokeniser,
        prompts,
        key,
        responses=responses,
        sampling=sampling,
        slots=slots,
        mesh=mesh,
        progress=progress,
    ).texts


class Generated(NamedTuple):
    """Texts that a model wrote.

    Attributes:
      texts: of each prompt its responses.
      ended_PxJ: which ended by themselves, with end of text or a stop string; the others had as
        many tokens as they may have. Tokenising a text again does not tell: it may give fewer.
    """

    texts: list[list[str]]
    ended_PxJ: np.ndarray


def generate_to_end(
    model: Decoder,
    params: Params,
    tokeniser: Tokeniser,
    prompts: Sequence[str],
    key: Array,
    *,
    responses: int = 1,
    sampling: Sampling,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> Generated:
    """`responses` texts for each prompt, and whether they ended by themselves.

    Text j of prompt p is a function of (params, prompt, key, p, j) and the settings only; see
    `jaxpfl.text.generation.sampling.sample`, also for the arguments. The empty prompt is the start
    token, or the end of the text before.

    Raises:
      InputError: the tokeniser has more ids than the model, or a prompt is too long.
    """
    check_fits(tokeniser, model.vocab_size)
    ids = prompt_ids(tokeniser, prompts)
    if not ids:
        return Generated([], np.zeros((0, responses), bool))
    token_bytes = tokeniser.token_bytes()
    drawn_PxJxT = sample(
        model,
        params,
        pad(ids, max(map(len, ids))),
        key,
        sampling=sampling,
        responses=responses,
        ends=tokeniser.ends,
        token_bytes=token_bytes,
        slots=slots,
        mesh=mesh,
        progress=progress,
    )
    left_out = {PAD, *tokeniser.ends}

    texts: list[list[str]] = []
    ended_PxJ = np.zeros(drawn_PxJxT.shape[:2], bool)
    for p, rows in enumerate(drawn_PxJxT.tolist()):
        texts.append([])
        for j, row in enumerate(rows):
            content = b"".join(token_bytes[i] for i in row if i not in left_out)
            kept = cut(content, sampling.stop)
            texts[p].append(as_text(kept))
            ended_PxJ[p, j] = row[-1] in left_out or len(kept) < len(content)
    return Generated(texts, ended_PxJ)


def prompt_ids(tokeniser: Tokeniser, prompts: Sequence[str]) -> list[np.ndarray]:
    """What a model reads for each prompt: the start token, if there is one, then its ids."""
    start = [] if tokeniser.start is None else [tokeniser.start]
    ids = [np.array([*start, *row], np.int32) for row in tokeniser.encode(prompts)]
    for i, row in enumerate(ids):
        if not len(row):
            if tokeniser.end_of_text is None:
                raise InputError(f"prompt {i} is empty, and {tokeniser.name} has no start token")
            ids[i] = np.array([tokeniser.end_of_text], np.int32)
    return ids
