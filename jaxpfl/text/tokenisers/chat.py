"""Chat templates: how a model that was trained to answer is given a user's message.

A folder holds its template in chat_template.jinja, or as `chat_template` in tokenizer_config.json,
and transformers fills it in the same way. It is a program in the language of Jinja, and is run by
`bounded_jinja`, where it can neither change anything, nor read a file, nor compute without end. It
gets a fixed date (`bounded_jinja.NOW`), so that equal prompts stay equal on another day.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.models.checkpoints.model_files import read_object
from jaxpfl.models.checkpoints.tokenizer_files import SETTINGS, with_tokenizer
from jaxpfl.text.tokenisers import bounded_jinja

FILE = "chat_template.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the special tokens that it names, and the file it is from, for messages."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    place: str = FILE

    def __post_init__(self) -> None:
        self.render(["a"])

    def render(self, messages: Sequence[str]) -> list[str]:
        """For each message the text of a chat in which the user has sent it, up to the answer."""
        shared = {**self.tokens, "add_generation_prompt": True}
        users = ([{"role": "user", "content": message}] for message in messages)
        variables = [{**shared, "messages": message} for message in users]
        with named(f"{self.place}: the chat template cannot be filled in"):
            return bounded_jinja.fill_in(self.source, variables)


def read_template(folder: Path) -> ChatTemplate | None:
    """The template of a folder, or None if it has none."""
    settings = read_object(with_tokenizer(folder) / SETTINGS, optional=True)
    settings |= read_object(folder / SETTINGS, optional=True)
    source, place = settings.get("chat_template"), folder / SETTINGS
    if (folder / FILE).is_file():
        place = folder / FILE
        try:
            source = place.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{place} is not UTF-8 text: {error.reason}") from error
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        if "default" not in named:
            names = ", ".join(map(repr, named))
            what = "one of several chat templates must be called 'default'"
            raise InputError(f"{place}: {what}, found {names}")
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise InputError(f"{place}: chat_template must be text, found {type(source).__name__}")
    tokens = {}
    for role, token in settings.items():
        token = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(token, str):
            tokens[role] = token
    return ChatTemplate(source, tokens, str(place))
