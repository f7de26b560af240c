"""Bad input ends in one sentence, of which the words matter that name what is wrong."""

from collections.abc import Callable

import pytest

from jaxpfl.errors import InputError


def refusal(call: Callable[[], object], words: str, kind: type[Exception] = InputError) -> str:
    """What the error says that `call` ends with: one line that has each of these words."""
    with pytest.raises(kind) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    missing = [word for word in words.split() if word not in sentence]
    assert not missing, f"{missing} not in {sentence!r}"
    return sentence
