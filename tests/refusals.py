"""Bad input ends in one sentence, of which the words matter that name what is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import registry


def refusal(call: Callable[[], object], words: str, kind: type[Exception] = InputError) -> str:
    """What the error says that `call` ends with: one line that has each of these words."""
    with pytest.raises(kind) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    missing = [word for word in words.split() if word not in sentence]
    assert not missing, f"{missing} not in {sentence!r}"
    return sentence


def refused_change(config: Path, tmp_path: Path, change: str, words: str) -> None:
    """A config in which "BEFORE -> AFTER" is changed is refused, by its path and these words."""
    before, after = change.replace("{folder}", str(config.parent)).split(" -> ")
    text, path = config.read_text(), tmp_path / "bad.yaml"
    assert before in text
    path.write_text(text.replace(before, after, 1))
    refusal(lambda: registry.load(path), f"{path} {words}")
