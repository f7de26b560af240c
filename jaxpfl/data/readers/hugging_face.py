"""Texts of any data set on the Hugging Face hub, through its library `datasets`, an optional one.

    huggingface:OWNER/NAME?revision=COMMIT&text=abstract

makes each row a client; with `client=COLUMN`, all rows of one value there. The library reads data
files alone: code of a data set's is never run.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import checks
from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.prose import PIECES, pieces
from jaxpfl.errors import InputError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def read_hugging_face(
    name: str,
    *,
    revision: str,
    part: str = "train",
    config: str | None = None,
    text: str = "text",
    client: str | None = None,
    split: str | None = None,
) -> Population:
    """Reads the texts of a data set on the hub.

    Args:
      name: OWNER/NAME.
      revision: the commit that is read, 40 hexadecimal digits: a branch would move, and the
        population, its fingerprint and its ledger with it.
      part: of the data set, such as "train", "validation" and "test".
      config: of the data set, where it has several.
      text: the column of texts.
      client: the column that holds the client's id, a string that is not empty or a whole number;
        None: every row is a client, by its number from 1.
      split: "sentences", "paragraphs" or "lines": examples of a row; None: its text is one.

    Returns:
      Clients in order of first appearance, with the column "text".

    Raises:
      InputError: the library is missing, the hub did not give the data set, it has no such column,
        or a row holds no text or no client there.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"huggingface: a data set is OWNER/NAME on the hub, found {name!r}")
    if split is not None:
        checks.one_of("split", split, PIECES)
    rows = hub_rows(name, revision=revision, part=part, config=config)
    unit = "one row" if client is None else f'all rows with one "{client}"'
    title = f"huggingface:{name} [{part}]"
    return texts_of(rows, name, text=text, client=client, split=split, title=title, unit=unit)


def hub_rows(name: str, *, revision: str, part: str, config: str | None = None) -> Any:
    """The rows of a data set on the hub, a `datasets.Dataset`; see `read_hugging_face`."""
    if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
        raise InputError(
            f"{name}: revision must be a commit of the data set, 40 hexadecimal digits, found "
            f"{revision!r}"
        )
    if Path(name).exists():
        raise InputError(
            f"{name}: a file or folder of that name is here, which the library datasets would read "
            "in place of the hub's data set: run elsewhere"
        )
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            f"{name} is read by the library datasets, which is not installed: "
            "pip install 'jaxpfl[datasets]'"
        ) from error
    which = {} if config is None else {"name": config}
    try:
        return datasets.load_dataset(name, split=part, revision=revision, **which)
    # Whatever a network, a proxy or a hub can raise means that it is not to be had there.
    except Exception as error:
        # Errors of network and disk say what helps; others may quote a row.
        lines = str(error).strip().splitlines() if isinstance(error, OSError) else []
        told = ": ".join([type(error).__name__, *lines[:1]])
        raise InputError(
            f"the Hugging Face hub did not give {name} at {revision[:12]}... ({told})"
        ) from (error if isinstance(error, OSError) else None)


def texts_of(
    rows: Any,
    name: str,
    *,
    text: str,
    client: str | None,
    split: str | None,
    title: str,
    unit: str,
) -> Population:
    """The population of a data set's rows; see `read_hugging_face`."""
    for column in (text, client):
        if column is not None and column not in rows.column_names:
            known = ", ".join(map(repr, rows.column_names))
            raise InputError(f"{name}: there is no field {column!r}, found {known}")
    if text == client:
        raise InputError(f"{name}: the fields client and text must be different, found {text!r}")
    index_of: dict[str, int] = {}
    clients_of_texts: list[int] = []
    texts: list[str] = []
    identities = range(1, 1 + len(rows)) if client is None else rows[client]
    for number, (identity, value) in enumerate(zip(identities, rows[text], strict=True), 1):
        if type(identity) is int:
            identity = str(identity)
        if type(identity) is not str or not identity:
            expected = "a string that is not empty or a whole number"
            raise _field_error(name, number, client, expected, identity)
        if type(value) is not str:
            raise _field_error(name, number, text, "a string", value)
        found = [value] if split is None else list(pieces(value.split("\n"), split))
        index = index_of.setdefault(identity, len(index_of))
        texts.extend(found)
        clients_of_texts.extend([index] * len(found))
    if not texts:
        raise InputError(f"{name} has no examples")
    columns = {"text": text_array(texts)}
    return from_rows(np.array(clients_of_texts), list(index_of), columns, name=title, unit=unit)


def _field_error(
    name: str, row: int, field: str | None, expected: str, found: object
) -> InputError:
    # A value is private: its type alone is told.
    kind = "an empty one" if found == "" else type(found).__name__
    return InputError(f"{name}, row {row}: field {field!r} must be {expected}, found {kind}")
