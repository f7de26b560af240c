"""Groups of responses to one prompt: which they are, and the rows in which a network reads them.

Sources: POPri (Hou et al. 2025), Algorithm 1 and section 5: a prompt has J responses; the one with
the highest score is chosen, and the one of rank l (5 of 10 in the paper) is rejected. In its
ablation rejecting the last rank gives worse results than rejecting a middle one. Such a pair is a
group of two. GRPO (Shao et al. 2024) takes all of a prompt's responses, each with its advantage.

A row is [prompt | response 1 | response 2 | ...]: the prompt is read once, and because of `branch`
no response sees another (`models.decoder.network.Decoder.hidden`). The last token of the prompt
predicts the first token of every response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.text.generation.few_shot import FewShot
from jaxpfl.text.generation.language_model import prompt_ids
from jaxpfl.text.tokenisers.base import Tokeniser, pad


@dataclass(frozen=True)
class Groups:
    """N prompts, each with G responses, as token ids padded on the right. See `groups_of`.

    The end-of-text of a response is one of its tokens. A response without tokens is none: it takes
    part in nothing.

    Attributes:
      prompt_NxP, responses_NxGxT: int32. In a pair (G = 2) the first response is the chosen one.
      advantage_NxG: float32, see `advantages`; None for pairs.
    """

    prompt_NxP: np.ndarray
    responses_NxGxT: np.ndarray
    advantage_NxG: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not len(self):
            raise InputError("there must be at least one group of responses, found none")
        if self.advantage_NxG is not None and not np.isfinite(self.advantage_NxG).all():
            raise InputError("advantages must be finite, found NaN or an infinite one")

    def __len__(self) -> int:
        return len(self.prompt_NxP)

    def __getitem__(self, rows: np.ndarray) -> "Groups":
        advantage = None if self.advantage_NxG is None else self.advantage_NxG[rows]
        return Groups(self.prompt_NxP[rows], self.responses_NxGxT[rows], advantage)


def groups_of(
    prompts: Sequence[np.ndarray],
    responses: Sequence[Sequence[np.ndarray]],
    advantage_NxG: np.ndarray | None = None,
    *,
    prompt_tokens: int = 256,
    total_tokens: int = 512,
) -> Groups:
    """Groups of sequences of token ids, cut to length; the default lengths are POPri's.

    A prompt keeps its last `prompt_tokens` tokens. A response keeps as many of its first tokens as
    are possible with at most `total_tokens` in prompt and response together. In a pair, the chosen
    response comes first.
    """
    positive_int("prompt_tokens", prompt_tokens)
    if total_tokens <= prompt_tokens:
        raise InputError(f"total_tokens must be above {prompt_tokens=}, found {total_tokens}")
    prompts = [np.asarray(prompt)[-prompt_tokens:] for prompt in prompts]
    cut = [
        [np.asarray(response)[: total_tokens - len(prompt)] for response in group]
        for prompt, group in zip(prompts, responses, strict=True)
    ]
    # A multiple of 8, so that few programs are compiled.
    longest = max([1, *(len(response) for group in cut for response in group)])
    padded = [pad(group, -(-longest // 8) * 8) for group in cut]
    return Groups(pad(prompts, max([1, *map(len, prompts)])), np.array(padded), advantage_NxG)


class Rows(NamedTuple):
    """B groups as a network reads them, in rows of R places, and the T targets of each response.

    Attributes:
      tokens_BxR, positions_BxR, branch_BxR: int32, see `Decoder.hidden`.
      place_BxGxT: int32, the place in the row that predicts the target.
      target_BxGxT: int32, the responses' tokens, padded with `PAD`.
    """

    tokens_BxR: Any
    positions_BxR: Any
    branch_BxR: Any
    place_BxGxT: Any
    target_BxGxT: Any


def lengths(groups: Groups) -> np.ndarray:
    """The numbers of tokens of the prompt and of each response: int [N, 1 + G]."""
    prompt_N = np.sum(groups.prompt_NxP != PAD, axis=1)
    return np.column_stack([prompt_N, np.sum(groups.responses_NxGxT != PAD, axis=2)])


def rows(groups: Groups, width: int) -> Rows:
    """The rows of some groups, each with `width` places."""
    shape = len(groups), width
    tokens, positions, branch = (np.full(shape, fill, np.int32) for fill in (PAD, 0, 0))
    place = np.zeros(groups.responses_NxGxT.shape, np.int32)
    for row, (prompt, *responses) in enumerate(lengths(groups)):
        tokens[row, :prompt] = groups.prompt_NxP[row, :prompt]
        positions[row, :prompt] = np.arange(prompt)
        start = prompt
        for number, length in enumerate(responses):
            here = slice(start, start + length)
            tokens[row, here] = groups.responses_NxGxT[row, number, :length]
            positions[row, here] = np.arange(prompt, prompt + length)
            branch[row, here] = number + 1
            place[row, number, 0] = prompt - 1
            place[row, number, 1:length] = np.arange(start, start + length - 1)
            start += length
    return Rows(tokens, positions, branch, place, groups.responses_NxGxT)


def widths(groups: Groups, multiple: int) -> np.ndarray:
    """The places of each group's row, [N]: a `multiple`, so that few programs are compiled."""
    return -(-np.sum(lengths(groups), axis=1) // multiple) * multiple


def preferences(
    scores_KxJ: np.ndarray, rejected_rank: int, candidates_KxJ: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The prompts with a pair, and the places, 0 .. J - 1, of their chosen and rejected response.

    They are three int64 [N], with N <= K. Responses are identified by their places, so that equal
    texts keep their own scores; equal scores are ranked by place.

    Args:
      rejected_rank: the rank of the rejected response, in 2 .. J; the best has 1.
      candidates_KxJ: bool; the responses that are ranked. A prompt with fewer than `rejected_rank`
        of them has no pair. `InputError` if a score of one of them is not finite.
    """
    _largest(scores_KxJ, candidates_KxJ)
    ranked_KxJ = np.where(candidates_KxJ, scores_KxJ, -np.inf)
    order_KxJ = np.argsort(-ranked_KxJ, axis=1, kind="stable")
    (prompts_N,) = np.nonzero(candidates_KxJ.sum(axis=1) >= rejected_rank)
    return prompts_N, order_KxJ[prompts_N, 0], order_KxJ[prompts_N, rejected_rank - 1]


def advantages(scores_KxJ: np.ndarray, candidates_KxJ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The prompts that teach something, and their responses' advantages (DeepSeekMath, 4.1.2).

    A candidate's advantage is (its score - the mean) / the standard deviation of its prompt's
    candidates, with divisor n - 1, as in TRL. Other responses have the advantage 0.
    Returned are int64 [N], the prompts two of whose candidates have scores that differ by more than
    float32 rounds the largest of all by, and float32 [N, J]. `InputError` if one is not finite.
    """
    scores_KxJ = scores_KxJ.astype(np.float64)
    rounding = 4 * np.finfo(np.float32).eps * _largest(scores_KxJ, candidates_KxJ)
    highest_K = np.max(np.where(candidates_KxJ, scores_KxJ, -np.inf), axis=1)
    lowest_K = np.min(np.where(candidates_KxJ, scores_KxJ, np.inf), axis=1)
    (prompts_N,) = np.nonzero(highest_K - lowest_K > rounding)
    scores_NxJ = np.where(candidates_KxJ, scores_KxJ, np.nan)[prompts_N]
    above_NxJ = scores_NxJ - np.nanmean(scores_NxJ, axis=1, keepdims=True)
    scaled_NxJ = above_NxJ / np.nanstd(scores_NxJ, axis=1, ddof=1, keepdims=True)
    return prompts_N, np.nan_to_num(scaled_NxJ).astype(np.float32)


def _largest(scores_KxJ: np.ndarray, candidates_KxJ: np.ndarray) -> float:
    """The largest size of a candidate's score; all must be finite."""
    scores = np.abs(scores_KxJ[candidates_KxJ])
    if not np.isfinite(scores).all():
        raise InputError("scores of candidates must be finite, found NaN or an infinite one")
    return float(scores.max(initial=0.0))


def prompt_room(tokeniser: Tokeniser, tokens: int) -> int:
    """How many of a prompt's tokens are its text's, the others being those put around it."""
    (around,) = map(len, tokeniser.prompts([""]))
    if around > tokens:
        least = f"the {around} tokens that the tokeniser {tokeniser.name} puts around its text"
        raise InputError(f"a prompt must have at least {least}, found room for {tokens}")
    return tokens - around


def last_tokens(tokeniser: Tokeniser, prompts: Sequence[str], tokens: int) -> list[str]:
    """The prompts cut to their last `tokens` tokens, what `Tokeniser.prompts` adds included."""
    room = prompt_room(tokeniser, tokens)
    texts, left = list(prompts), [room] * len(prompts)
    rows, wholes = tokeniser.encode(texts), tokeniser.prompts(texts)
    # The rest of a divided word or character may have more tokens than before.
    while long := [i for i, whole in enumerate(wholes) if len(whole) > tokens]:
        for i in long:
            texts[i] = tokeniser.decode(rows[i][-left[i] :] if left[i] else []).lstrip("\ufffd")
        cut = [texts[i] for i in long]
        again = zip(long, tokeniser.encode(cut), tokeniser.prompts(cut), strict=True)
        for i, row, whole in again:
            rows[i], wholes[i] = row, whole
            left[i] = min(left[i], len(row)) - 1
    return texts


def groups_of_texts(
    tokeniser: Tokeniser,
    prompts: Sequence[str],
    texts_NxG: np.ndarray,
    ended_NxG: np.ndarray,
    advantage_NxG: np.ndarray | None = None,
    *,
    format: FewShot,
    prompt_tokens: int,
    response_tokens: int,
) -> Groups:
    """Groups of token ids from N prompts and G responses to each.

    A response that ended by itself (`ended_NxG`, bool) is followed by its end: the format's stop
    string, including what precedes that in a prompt, or else end-of-text, if the tokeniser has one.
    The end is left out where it does not fit into the row.
    """
    prompt_rows, number = prompt_ids(tokeniser, prompts), texts_NxG.shape[1]
    longest = prompt_tokens + response_tokens
    room_N = [longest - min(len(row), prompt_tokens) for row in prompt_rows]
    texts = texts_NxG.ravel().tolist()
    rows = longer = tokeniser.encode(texts)
    if format.stop:
        # Tokenised as one text, because a token may belong to both the response and its end.
        # The text between a sample and the next in a prompt, up to the end of the stop string.
        after = format.after + format.heading.format(number=format.shots + 2)
        before, stop, _ = after.partition(format.stop)
        ending = before + stop if stop else format.stop
        longer = tokeniser.encode([text + ending for text in texts])
    elif tokeniser.end_of_text is not None:
        longer = [np.append(row, np.int32(tokeniser.end_of_text)) for row in rows]
    ends = zip(rows, longer, ended_NxG.ravel(), np.repeat(room_N, number), strict=True)
    flat = [end if by_itself and len(end) <= left else row for row, end, by_itself, left in ends]
    groups = [flat[start : start + number] for start in range(0, len(flat), number)]
    return groups_of(
        prompt_rows, groups, advantage_NxG, prompt_tokens=prompt_tokens, total_tokens=longest
    )
