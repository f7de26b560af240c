"""Tokenisers of published models, by the `tokenizers` library.

They are read from tokenizer.json and JSON settings alone, so no file can run code. A folder without
tokenizer.json is read through transformers, see `tokenizer_files.with_tokenizer`.

A model that was trained to answer is given a user's message by a chat template. A folder holds it
in chat_template.jinja, or as `chat_template` in tokenizer_config.json, and transformers fills it in
the same way. It is a program in the language of Jinja, and is run by `bounded_jinja`, where it can
neither change anything, nor read a file, nor compute without end. It gets a fixed date
(`bounded_jinja.NOW`), so that equal prompts stay equal on another day.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.models.base import PAD
from jaxpfl.models.checkpoints import tokenizer_files
from jaxpfl.models.checkpoints.hub import resolve
from jaxpfl.models.checkpoints.model_files import read_object, require
from jaxpfl.models.checkpoints.tokenizer_files import SETTINGS, TOKENIZER, faults, with_tokenizer
from jaxpfl.text.tokenisers import bounded_jinja
from jaxpfl.text.tokenisers.base import Tokeniser, clean

CHAT_FILE = "chat_template.jinja"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the special tokens that it names, and the file it is from, for messages."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    place: str = CHAT_FILE

    def __post_init__(self) -> None:
        self.render(["a"])

    def render(self, messages: Sequence[str]) -> list[str]:
        """For each message the text of a chat in which the user has sent it, up to the answer."""
        shared = {**self.tokens, "add_generation_prompt": True}
        users = ([{"role": "user", "content": message}] for message in messages)
        variables = [{**shared, "messages": message} for message in users]
        with named(f"{self.place}: the chat template cannot be filled in"):
            return bounded_jinja.fill_in(self.source, variables)


class FastTokeniser(Tokeniser):
    """A `tokenizers.Tokenizer`, see `hugging_face`; `chat` makes messages of prompts, or None."""

    chat: ChatTemplate | None = None

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str,
        end_of_text: int | None,
        ends: Iterable[int] = (),
        start: int | None = None,
    ):
        """`tokenizer` is changed: it then neither pads nor cuts, nor finds special tokens."""
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.end_of_text = end_of_text
        own = () if end_of_text is None else (end_of_text,)
        self.ends = tuple(dict.fromkeys((*own, *ends)))
        self.start = start
        tokens = set(ids.values())
        for what, token in (("start", start), *(("end-of-text", end) for end in self.ends)):
            if token is not None and token not in tokens:
                raise InputError(f"the tokeniser {name} has no id {token}, its {what} token")
        self._ids = ids
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._encoded(self._tokenizer, clean(texts))

    def prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text as a prompt, int32; with `chat`, as the message of a user.

        A special token that a text spells is then left out of it.
        """
        if self.chat is None:
            return super().prompts(texts)
        messages = clean(texts)
        for i, message in enumerate(messages):
            # Repeated, because the rest may join to another one.
            while any(token in message for token in self._special):
                for token in self._special:
                    message = message.replace(token, "")
            messages[i] = message
        return self._encoded(self._parsing, self.chat.render(messages))

    def _encoded(self, tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
        with faults(f"the tokeniser {self.name} cannot encode a text", private=True):
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def without_chat(self) -> "FastTokeniser":
        """See `Tokeniser.without_chat`."""
        plain = copy.copy(self)
        plain.chat = None
        return plain

    @cached_property
    def _special(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special and token.content]

    @cached_property
    def _parsing(self) -> Any:
        tokenizers = require("tokenizers", "text")
        parsing = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        parsing.encode_special_tokens = False
        return parsing

    def save(self, folder: str | Path) -> None:
        """Writes the files of a Hugging Face folder from which `hugging_face` reads it again.

        These are tokenizer.json, tokenizer_config.json, generation_config.json with the ids of the
        end-of-text and the start token, and chat_template.jinja, if there is one.
        """
        pieces = {token: piece for piece, token in self._ids.items()}
        roles = {"eos_token": self.end_of_text, "bos_token": self.start}
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings["add_bos_token"] = self.start is not None
        settings |= {role: pieces[token] for role, token in roles.items() if token is not None}
        ids: dict[str, Any] = {} if self.start is None else {"bos_token_id": self.start}
        if self.ends:
            ids["eos_token_id"] = self.ends[0] if len(self.ends) == 1 else list(self.ends)
        folder = files.user_path(folder)
        files.write_atomically(folder / TOKENIZER, self._tokenizer.to_str())
        files.write_json(folder / SETTINGS, settings)
        files.write_json(folder / "generation_config.json", ids)
        if self.chat is not None:
            files.write_atomically(folder / CHAT_FILE, self.chat.source)

    def decode(self, ids: Iterable[int]) -> str:
        if self._style == "word":
            real = [int(token) for token in ids if token != PAD]
            with faults(f"the tokeniser {self.name} cannot decode ids", private=True):
                return self._tokenizer.decode(real, skip_special_tokens=True)
        text = super().decode(ids)
        return text.removeprefix(" ") if self._style == "piece" else text

    @cached_property
    def _style(self) -> str:
        """How the pieces spell bytes: "byte" (GPT-2, Llama 3), "piece" (▁) or "word" (##)."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        if "ByteLevel" in kinds:
            return "byte"
        if "WordPiece" in kinds:
            return "word"
        if kinds & {"ByteFallback", "Metaspace"}:
            return "piece"
        expected = "must decode by ByteLevel, ByteFallback, Metaspace or WordPiece"
        raise InputError(f"the tokeniser {self.name} {expected}, found {decoder.get('type')}")

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        of_character = {character: value for value, character in enumerate(byte_characters())}
        added = self._tokenizer.get_added_tokens_decoder()
        token_bytes = [b""] * self.vocab_size
        for piece, i in self._ids.items():
            byte = _BYTE_PIECE.fullmatch(piece)
            if i in added:
                token_bytes[i] = b"" if added[i].special else added[i].content.encode()
            elif self._style == "byte" and of_character.keys() >= set(piece):
                token_bytes[i] = bytes(of_character[character] for character in piece)
            elif self._style == "piece" and byte:
                token_bytes[i] = bytes([int(byte[1], 16)])
            elif self._style == "piece":
                token_bytes[i] = piece.replace("\u2581", " ").encode()
            elif self._style == "word":
                token_bytes[i] = f" {piece}".removeprefix(" ##").encode()
            else:
                token_bytes[i] = piece.encode()
        return tuple(token_bytes)


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (Radford et al. 2019).

    Printable characters of Latin-1 stand for themselves; the other bytes are U+0100 and following.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(value if value in shown else next(hidden)) for value in range(256)]


def hugging_face(name: str | Path) -> FastTokeniser:
    """The tokeniser of a folder, or of a Hugging Face hub NAME[@REVISION].

    tokenizer_config.json names the end-of-text and start tokens; generation_config.json and
    config.json may add further ends. `start` is set if the tokenizer puts that token before every
    text.

    Raises:
      InputError: a file is missing, or names a token that the vocabulary does not have.
      CorruptFile: a file is broken.
    """
    folder = resolve(name)
    own = with_tokenizer(folder)
    path = own / TOKENIZER
    tokenizer = tokenizer_files.read_tokenizer(path)
    settings = read_object(own / SETTINGS, optional=True)

    def id_of(role: str) -> int | None:
        token = settings.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            return None
        id_ = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if id_ is None:
            raise InputError(f"{own / SETTINGS}: {role} must be in tokenizer.json, found {token!r}")
        return id_

    end, ends = id_of("eos_token"), []
    for file in ("generation_config.json", "config.json"):
        ids = read_object(folder / file, optional=True).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        for token in ids:
            if token is None:
                continue
            is_id = type(token) is int and 0 <= token < 2**32
            if not is_id or tokenizer.id_to_token(token) is None:
                what = "eos_token_id must be an id of tokenizer.json"
                raise InputError(f"{folder / file}: {what}, found {token!r}")
            ends.append(token)
    start = id_of("bos_token")
    if not settings.get("add_bos_token"):
        plain, whole = tokenizer_files.framed(tokenizer, path)
        start = whole[0] if whole and whole[1:] == plain else None
    label, first = Path(str(name)).name or folder.name, ends[0] if end is None and ends else end
    return FastTokeniser(tokenizer, name=label, end_of_text=first, ends=ends, start=start)


def read_template(folder: Path) -> ChatTemplate | None:
    """The template of a folder, or None if it has none."""
    settings = read_object(with_tokenizer(folder) / SETTINGS, optional=True)
    settings |= read_object(folder / SETTINGS, optional=True)
    source, place = settings.get("chat_template"), folder / SETTINGS
    if (folder / CHAT_FILE).is_file():
        place = folder / CHAT_FILE
        try:
            source = place.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{place} is not UTF-8 text: {error.reason}") from error
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        templates = {str(entry.get("name")): entry.get("template") for entry in entries}
        if "default" not in templates:
            what = "one of several chat templates must be called 'default'"
            raise InputError(f"{place}: {what}, found {[*templates]}")
        source = templates["default"]
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
