"""From texts to pairs of token ids: prompts that are cut, and responses with their ends."""

from collections.abc import Sequence

import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.text.generation.few_shot import FewShot
from jaxpfl.text.generation.language_model import prompt_ids
from jaxpfl.text.preference.pairs import Pairs, pairs_of
from jaxpfl.text.tokenisers.base import Tokeniser

Responses = tuple[Sequence[str], Sequence[bool]]
"""A response to each prompt, and whether it ended by itself and was not cut."""


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
    """The prompts cut to their last `tokens` tokens, as counted by tokenising the result.

    What `Tokeniser.prompts` puts around a prompt counts.
    """
    room = prompt_room(tokeniser, tokens)
    found, kept = list(prompts), [room] * len(prompts)
    rows, wholes = tokeniser.encode(found), tokeniser.prompts(found)
    # The rest of a divided word or character may have more tokens than before.
    while long := [i for i, whole in enumerate(wholes) if len(whole) > tokens]:
        for i in long:
            found[i] = tokeniser.decode(rows[i][-kept[i] :] if kept[i] else []).lstrip("\ufffd")
        cut = [found[i] for i in long]
        again = zip(long, tokeniser.encode(cut), tokeniser.prompts(cut), strict=True)
        for i, row, whole in again:
            rows[i], wholes[i] = row, whole
            kept[i] = min(kept[i], len(row)) - 1
    return found


def pairs_of_texts(
    tokeniser: Tokeniser,
    prompts: Sequence[str],
    chosen: Responses,
    rejected: Responses,
    *,
    format: FewShot,
    prompt_tokens: int,
    response_tokens: int,
) -> Pairs:
    """Pairs of token ids from N prompts and two responses to each.

    A response that ended by itself is followed by its end: the format's stop string, including what
    precedes that in a prompt, or else end-of-text, if the tokeniser has one. The end is left out
    where it does not fit into the row.
    """
    prompt_rows = prompt_ids(tokeniser, prompts)
    longest = prompt_tokens + response_tokens
    room = [longest - min(len(row), prompt_tokens) for row in prompt_rows]
    return pairs_of(
        prompt_rows,
        _with_ends(tokeniser, chosen, room, format),
        _with_ends(tokeniser, rejected, room, format),
        prompt_tokens=prompt_tokens,
        total_tokens=longest,
    )


def _with_ends(
    tokeniser: Tokeniser, responses: Responses, room: Sequence[int], format: FewShot
) -> list[np.ndarray]:
    """Token ids of responses, each with its end, unless it was cut or there is no room."""
    texts, ended = responses
    rows = tokeniser.encode(texts)
    if format.stop:
        # Tokenised as one text, because a token may belong to both the response and its end.
        ending = _ending(format)
        longer = tokeniser.encode([text + ending for text in texts])
    elif tokeniser.end_of_text is not None:
        longer = [np.append(row, np.int32(tokeniser.end_of_text)) for row in rows]
    else:
        return rows
    return [
        with_end if by_itself and len(with_end) <= left else row
        for row, with_end, by_itself, left in zip(rows, longer, ended, room, strict=True)
    ]


def _ending(format: FewShot) -> str:
    """What follows a text in a prompt, up to the end of the stop string."""
    after = format.after + format.heading.format(number=format.shots + 2)
    before, found, _ = after.partition(format.stop)
    return before + found if found else format.stop
