"""Looks for what is private in files that are public, in every byte and in packed texts."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

# Clients' ids and texts, as `write_lines` makes them.
CLIENTS = {b"canaryid", b"canarytext"}


def public_files(out: Path) -> list[Path]:
    """The files of a run outside its private folders."""
    found = sorted(path for path in out.rglob("*") if path.is_file())
    return [path for path in found if "private" not in path.relative_to(out).parts]


def of_secrets(drawn: Iterable[bytes]) -> set[bytes]:
    """The secrets of runs among what they drew from the operating system, however written."""
    secrets = [each for each in drawn if len(each) == 16]
    words = {str(word).encode() for each in secrets for word in np.frombuffer(each, np.uint32)}
    return words | {each.hex().encode() for each in secrets}


def of_private_folders(out: Path) -> set[bytes]:
    """What stands in the private folders of a run, whole and by line."""
    contents = [path.read_bytes() for path in out.rglob("private/*") if path.is_file()]
    lines = {line for content in contents for line in content.splitlines() if len(line) > 8}
    return lines | set(contents) | {content.hex().encode() for content in contents}


def assert_in_none(canaries: Iterable[bytes], paths: Iterable[Path]) -> None:
    lower = {canary.lower() for canary in canaries}
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += "\n".join(parquet.read_table(path)["text"].to_pylist()).encode()
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                texts = [each for each in arrays.values() if each.dtype.kind == "U"]
            content += "\n".join(text for each in texts for text in each.reshape(-1)).encode()
        for canary in lower:
            assert canary not in content.lower(), path
