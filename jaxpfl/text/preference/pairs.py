"""Pairs of responses to one prompt: which they are, and the rows in which a network reads them.

Source: POPri (Hou et al. 2025), Algorithm 1 and section 5: of a prompt's J responses the one with
the highest score is chosen, and the one of rank l (5 of 10 in the paper) is rejected. In its
ablation rejecting the last rank gives worse results than rejecting a middle one.

A row is [prompt | chosen | rejected]: the prompt is read once, and because of `branch` neither
response sees the other (`models.decoder.network.Decoder.hidden`). The last token of the prompt
predicts the first token of both responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.text.tokenisers.base import pad

_COLUMNS = ("prompt_NxP", "chosen_NxT", "rejected_NxT")


@dataclass(frozen=True)
class Pairs:
    """N prompts, each with a chosen and a rejected response, as token ids padded on the right.

    All are int32. The end-of-text of a response is one of its tokens. See `pairs_of`.

    Raises:
      InputError: there are no pairs, or an array is not int32 or has another number of rows.
    """

    prompt_NxP: np.ndarray
    chosen_NxT: np.ndarray
    rejected_NxT: np.ndarray

    def __post_init__(self) -> None:
        if not len(self):
            raise InputError("there must be at least one preference pair, found none")
        for name in _COLUMNS:
            array = getattr(self, name)
            if array.ndim != 2 or array.dtype != np.int32 or len(array) != len(self):
                raise InputError(
                    f"{name} must be int32 [{len(self)} pairs, tokens], found {array.dtype} "
                    f"{list(array.shape)}"
                )

    def __len__(self) -> int:
        return len(self.prompt_NxP)

    def __getitem__(self, rows: np.ndarray) -> "Pairs":
        return Pairs(*(getattr(self, name)[rows] for name in _COLUMNS))


def pairs_of(
    prompts: Sequence[np.ndarray],
    chosen: Sequence[np.ndarray],
    rejected: Sequence[np.ndarray],
    *,
    prompt_tokens: int = 256,
    total_tokens: int = 512,
) -> Pairs:
    """Pairs of sequences of token ids, cut to length; the default lengths are POPri's.

    A prompt keeps its last `prompt_tokens` tokens. A response keeps as many of its first tokens as
    are possible with at most `total_tokens` in prompt and response together.
    """
    positive_int("prompt_tokens", prompt_tokens)
    positive_int("total_tokens", total_tokens)
    if total_tokens <= prompt_tokens:
        raise InputError(
            f"total_tokens must be above prompt_tokens = {prompt_tokens}, found {total_tokens}"
        )
    prompts = [np.asarray(prompt)[-prompt_tokens:] for prompt in prompts]
    room = [total_tokens - len(prompt) for prompt in prompts]
    cut = [
        [np.asarray(response)[:left] for response, left in zip(responses, room, strict=True)]
        for responses in (chosen, rejected)
    ]
    columns = [pad(rows, max([1, *map(len, rows)])) for rows in (prompts, *cut)]
    return Pairs(*columns)


class Rows(NamedTuple):
    """B pairs as a network reads them, in rows of R places, and the T targets of each response.

    Attributes:
      tokens_BxR, positions_BxR, branch_BxR: int32, see `Decoder.hidden`.
      place_Bx2xT: int32, the place in the row that predicts the target.
      target_Bx2xT: int32 tokens of chosen (0) and rejected (1), padded with `PAD`.
    """

    tokens_BxR: Any
    positions_BxR: Any
    branch_BxR: Any
    place_Bx2xT: Any
    target_Bx2xT: Any


def lengths(pairs: Pairs) -> np.ndarray:
    """The numbers of tokens of prompt, chosen and rejected: int [N, 3]."""
    return np.stack([np.sum(getattr(pairs, name) != PAD, axis=1) for name in _COLUMNS], axis=1)


def rows(pairs: Pairs, width: int, response: int) -> Rows:
    """The rows of some pairs, each with `width` places and `response` targets."""
    count = len(pairs)
    tokens, positions, branch = (np.full((count, width), fill, np.int32) for fill in (PAD, 0, 0))
    place = np.zeros((count, 2, response), np.int32)
    target = np.full((count, 2, response), PAD, np.int32)
    for row, (prompt, *responses) in enumerate(lengths(pairs)):
        tokens[row, :prompt] = pairs.prompt_NxP[row, :prompt]
        positions[row, :prompt] = np.arange(prompt)
        start = prompt
        for side, length in enumerate(responses):
            ids = (pairs.chosen_NxT, pairs.rejected_NxT)[side][row, :length]
            here = slice(start, start + length)
            tokens[row, here] = ids
            positions[row, here] = np.arange(prompt, prompt + length)
            branch[row, here] = side + 1
            place[row, side, 0] = prompt - 1
            place[row, side, 1:length] = np.arange(start, start + length - 1)
            target[row, side, :length] = ids
            start += length
    return Rows(tokens, positions, branch, place, target)


def padded_lengths(pairs: Pairs, multiple: int) -> tuple[np.ndarray, int]:
    """The padded length of each pair's row, [N], and that of all responses.

    Lengths are rounded up to a `multiple`, so that few programs are compiled.
    """
    tokens_Nx3 = lengths(pairs)
    width_N = -(-np.sum(tokens_Nx3, axis=1) // multiple) * multiple
    response = -(-int(np.max(tokens_Nx3[:, 1:])) // 8) * 8
    return width_N, response


def preferences(
    scores_KxJ: np.ndarray, rejected_rank: int, candidates_KxJ: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The prompts with a pair, and the places, 0 .. J - 1, of their chosen and rejected response.

    Responses are identified by their places, so that equal texts keep their own scores; equal
    scores are ranked by place.

    Args:
      rejected_rank: the rank of the rejected response; the best has 1.
      candidates_KxJ: bool; the responses that are ranked, None for all. A prompt with fewer than
        `rejected_rank` of them has no pair.

    Returns:
      Three int64 [N], with N <= K.

    Raises:
      InputError: a rank that is not in 2 .. J, scores that are not [K, J] or not finite.
    """
    scores_KxJ = np.asarray(scores_KxJ)
    if scores_KxJ.ndim != 2:
        raise InputError(f"scores must be [prompts, responses], found shape {scores_KxJ.shape}")
    if not np.isfinite(scores_KxJ).all():
        raise InputError("scores must be finite numbers")
    responses = scores_KxJ.shape[1]
    if not 2 <= positive_int("rejected_rank", rejected_rank) <= responses:
        raise InputError(
            f"rejected_rank must lie in 2 .. {responses}, the number of responses to a prompt, "
            f"found {rejected_rank}"
        )
    if candidates_KxJ is None:
        candidates_KxJ = np.ones(scores_KxJ.shape, bool)
    ranked_KxJ = np.where(candidates_KxJ, scores_KxJ, -np.inf)
    order_KxJ = np.argsort(-ranked_KxJ, axis=1, kind="stable")
    (prompts_N,) = np.nonzero(candidates_KxJ.sum(axis=1) >= rejected_rank)
    return prompts_N, order_KxJ[prompts_N, 0], order_KxJ[prompts_N, rejected_rank - 1]
