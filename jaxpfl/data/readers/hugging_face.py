"""Data sets on the Hugging Face hub, read with the optional library `datasets`.

The library only reads data files: it never runs code that comes with a data set.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.lazy import require

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_data_set(
    name: str,
    revision: str = "",
    part: str = "train",
    config: str | None = None,
    streaming: bool = False,
) -> Any:
    """A data set OWNER/NAME as a `datasets.Dataset`, or an `IterableDataset` if streaming.

    Args:
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
    datasets = require("datasets", "datasets")
    which = {"name": config, "split": part, "revision": revision, "streaming": streaming}
    with _answered(f"{name} at {revision[:12]}..."):
        return datasets.load_dataset(name, **which)


def saved(folder: Path) -> Any:
    """The `datasets.Dataset` that `save_to_disk` wrote to a folder: the rows that were selected."""
    datasets = require("datasets", "datasets")
    with named(folder, CorruptFile), _answered(str(folder)):
        return datasets.load_from_disk(str(folder))


def newest_commit(name: str) -> str:
    """The commit that a data set on the hub has now."""
    hub = require("huggingface_hub", "datasets")
    with _answered(name):
        return str(hub.HfApi().dataset_info(name).sha)


@contextmanager
def _answered(what: str) -> Iterator[None]:
    try:
        yield
    # The libraries raise errors of many kinds; all mean that they did not give it.
    except Exception as error:
        raise unread(what, error) from None


def unread(what: str, error: Exception) -> InputError:
    """The error that says why the libraries of Hugging Face did not give a data set or its rows."""
    # Only errors of network and disk are quoted: the message of another may contain a row.
    lines = str(error).strip().splitlines() if isinstance(error, OSError) else []
    reason = ": ".join([type(error).__name__, *lines[:1]])
    return InputError(f"{what}: the libraries of Hugging Face did not give it ({reason})")
