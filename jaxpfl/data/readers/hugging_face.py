"""Texts of any data set on the Hugging Face hub, read with the optional library `datasets`.

    huggingface:OWNER/NAME?revision=COMMIT&text=abstract

makes each row a client. With `client=COLUMN`, all rows with the same value in that column are one
client. The library only reads data files: it never runs code that comes with a data set.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.data.readers.examples import EACH_ROW, Layout, population_of
from jaxpfl.data.readers.frames import read_frame
from jaxpfl.errors import InputError

CORPORA = {
    "congress": "hazylavender/CongressionalDataset",
    "biorxiv": "hazylavender/biorxiv-abstract",
}
_TEXTS = ("data", "abstract", "text")
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
      revision: the commit to read, 40 hexadecimal digits. A branch is refused, because its data,
        and with it the population's fingerprint and ledger, could change.
      part: such as "train", "validation" or "test".
      config: which configuration of the data set, where it has several.
      text, split: as in `Layout`.
      client: the column of client ids; None makes each row a client, named by its number from 1.

    Returns:
      Clients in order of first appearance, with the column "text".
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"huggingface: a data set is OWNER/NAME on the hub, found {name!r}")
    which = {"revision": revision, "part": part, "config": config}
    layout = Layout(EACH_ROW if client is None else client, text, split=split)
    return _read(name, which, layout, f"huggingface:{name} [{part}]", layout.unit)


def read_largefedbench(
    corpus: str,
    *,
    revision: str,
    part: str = "train",
    text: str | None = None,
    split: str | None = None,
) -> Population:
    """Reads one of the two data sets of LargeFedBench; every row is a client.

    Args:
      corpus: "congress" or "biorxiv".
      text: the column that holds the text; None takes the first of "data", "abstract" and "text"
        that there is.
      revision, part, split: as for `read_hugging_face`, as are the errors.

    Returns:
      Clients by the row's number, from 1, with the column "text".
    """
    checks.one_of("largefedbench", corpus, tuple(CORPORA))
    which = {"revision": revision, "part": part}
    layout = Layout(EACH_ROW, text or _TEXTS[0], split=split)
    unit = "one speech" if corpus == "congress" else "one abstract"
    texts = _TEXTS if text is None else (text,)
    return _read(CORPORA[corpus], which, layout, f"largefedbench:{corpus} [{part}]", unit, texts)


def _read(
    name: str,
    which: dict[str, Any],
    layout: Layout,
    title: str,
    unit: str,
    texts: Sequence[str] = (),
) -> Population:
    """The population of a data set, whose texts are in the first of `texts` that it has."""
    table = _load(name, **which)
    known = table.column_names
    if texts:
        if not set(texts) & set(known):
            fields, found = " or ".join(map(repr, texts)), ", ".join(map(repr, known))
            raise InputError(f"{name}: there is no field {fields}, found {found}")
        layout = dataclasses.replace(layout, text=next(each for each in texts if each in known))
    rows = read_frame(name, table, layout.fields)
    return population_of(rows, layout, name=title, unit=unit)


def rows_of_hub(name: str, which: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a data set on the hub, which are fetched while they are read.

    Args:
      which: its revision and part, and perhaps its config.
    """
    rows = iter(_load(name, **which, streaming=True))
    while True:
        unread = None
        try:
            row = next(rows, None)
        except Exception as error:
            row, unread = None, _unread(name, which["revision"], error)
        if unread is not None:
            raise unread
        if row is None:
            return
        yield row


def newest_commit(name: str) -> str:
    """The commit that a data set on the hub has now."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise _not_installed(name) from error
    try:
        return str(huggingface_hub.HfApi().dataset_info(name).sha)
    # As for `_load`.
    except Exception as error:
        raise _unread(name, "its newest commit", error) from None


def _load(
    name: str, *, revision: str, part: str, config: str | None = None, streaming: bool = False
) -> Any:
    """A data set on the hub, as a `datasets.Dataset`, or an `IterableDataset` if streaming."""
    if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
        raise InputError(
            f"{name}: revision must be a commit of the data set, 40 hexadecimal digits, found "
            f"{revision!r}"
        )
    if Path(name).exists():
        raise InputError(
            f"{name}: a file or folder of that name is here, and the library datasets would read "
            "it instead of the hub's data set: run from another folder"
        )
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _not_installed(name) from error
    named: dict[str, Any] = {} if config is None else {"name": config}
    if streaming:
        named["streaming"] = True
    try:
        return datasets.load_dataset(name, split=part, revision=revision, **named)
    # The library raises errors of many kinds; all mean that the data set could not be loaded.
    except Exception as error:
        known = isinstance(error, OSError)
        raise _unread(name, revision, error) from (error if known else None)


def _not_installed(name: str) -> InputError:
    return InputError(
        f"{name} is read by the library datasets, which is not installed: "
        "pip install 'jaxpfl[datasets]'"
    )


def _unread(name: str, revision: str, error: Exception) -> InputError:
    # Only errors of network and disk are quoted: the message of another may contain a row.
    lines = str(error).strip().splitlines() if isinstance(error, OSError) else []
    reason = ": ".join([type(error).__name__, *lines[:1]])
    at = f"{revision[:12]}..." if _COMMIT.fullmatch(revision) else revision
    return InputError(f"the Hugging Face hub did not give {name} at {at} ({reason})")
