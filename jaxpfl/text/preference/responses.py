"""From texts to groups of token ids: prompts that are cut, and responses with their ends."""

from collections.abc import Sequence

import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.text.generation.few_shot import FewShot
from jaxpfl.text.generation.language_model import prompt_ids
from jaxpfl.text.preference.groups import Groups, groups_of
from jaxpfl.text.tokenisers.base import Tokeniser


def prompt_room(tokeniser: Tokeniser, tokens: int) -> int:
    """How many of a prompt's tokens are its text's, the others being those put around it."""
    (around,) = map(len, tokeniser.prompts([""]))
    if around > tokens:
        raise InputError(
            f"a prompt must have at least the {around} tokens that the tokeniser {tokeniser.name} "
            f"puts around its text, found room for {tokens}"
        )
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
    prompt_rows = prompt_ids(tokeniser, prompts)
    longest = prompt_tokens + response_tokens
    room_N = [longest - min(len(row), prompt_tokens) for row in prompt_rows]
    number = texts_NxG.shape[1]
    room = np.repeat(room_N, number).tolist()
    flat = _with_ends(tokeniser, texts_NxG.ravel().tolist(), ended_NxG.ravel(), room, format)
    return groups_of(
        prompt_rows,
        [flat[start : start + number] for start in range(0, len(flat), number)],
        advantage_NxG,
        prompt_tokens=prompt_tokens,
        total_tokens=longest,
    )


def _with_ends(
    tokeniser: Tokeniser, texts: list[str], ended: np.ndarray, room: list[int], format: FewShot
) -> list[np.ndarray]:
    """Token ids of responses, each with its end, unless it was cut or there is no room."""
    rows = tokeniser.encode(texts)
    if format.stop:
        # Tokenised as one text, because a token may belong to both the response and its end.
        # The text between a sample and the next in a prompt, up to the end of the stop string.
        after = format.after + format.heading.format(number=format.shots + 2)
        before, stop, _ = after.partition(format.stop)
        ending = before + stop if stop else format.stop
        longer = tokeniser.encode([text + ending for text in texts])
    elif tokeniser.end_of_text is not None:
        longer = [np.append(row, np.int32(tokeniser.end_of_text)) for row in rows]
    else:
        return rows
    return [
        with_end if by_itself and len(with_end) <= left else row
        for row, with_end, by_itself, left in zip(rows, longer, ended, room, strict=True)
    ]
