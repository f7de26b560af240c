"""Data sets on the Hugging Face hub, read with the optional library `datasets`.

The library only reads data files: it never runs code that comes with a data set.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpfl.errors import CorruptFile, InputError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def load(
    name: str,
    revision: str = "",
    part: str = "train",
    config: str | None = None,
    streaming: bool = False,
) -> Any:
    """A data set as a `datasets.Dataset`, or an `IterableDataset` if streaming.

    Args:
      name: OWNER/NAME.
      revision: the commit to read, 40 hexadecimal digits. A branch is refused, because its data,
        and with it the population's fingerprint and ledger, could change.
      part: such as "train", "validation" or "test".
      config: which configuration of the data set, where it has several.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"huggingface: a data set is OWNER/NAME on the hub, found {name!r}")
    if not _COMMIT.fullmatch(revision):
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


def saved(folder: Path) -> Any:
    """The `datasets.Dataset` that `save_to_disk` wrote to a folder: the rows that were selected."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _not_installed(str(folder)) from error
    try:
        return datasets.load_from_disk(str(folder))
    # As for `load`.
    except Exception as error:
        raise CorruptFile(
            f"{folder}: the library datasets cannot read what it saved there "
            f"({type(error).__name__})"
        ) from None


def rows_of_hub(name: str, which: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a data set on the hub, which are fetched while they are read.

    Args:
      which: its revision, part and config, each optional, as for `load`.
    """
    rows = iter(load(name, **which, streaming=True))
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
    # As for `load`.
    except Exception as error:
        raise _unread(name, "its newest commit", error) from None


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
