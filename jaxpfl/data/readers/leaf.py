"""LEAF's JSON: {"users": [ID], "num_samples": [N], "user_data": {ID: {"x": [...], "y": [...]}}}.

Source: Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings", whose scripts write a folder
of such files. A user in several of them is one client. Lists of numbers as x are the column
"features", float32, and texts the column "text"; whole numbers as y are "label", int32, and texts
the column "target". What is stated twice must agree. Errors number the users from 1.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.data.clients import fault_of, hashes, warn_of_alike
from jaxpfl.data.columns import changed_by_float32, not_finite, text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.errors import CorruptFile, InputError

_FIELDS = {"users": list, "num_samples": list, "user_data": dict}
_HEAD = re.compile(rb'\s*\{\s*"(users|num_samples|user_data|hierarchies)"\s*:')


def files_of(path: Path) -> list[Path]:
    """LEAF's files of a folder, or the file itself; () if the first file is none of its."""
    paths = sorted(path.glob("[!.]*.json")) if path.is_dir() else [path]
    if not paths or paths[0].suffix != ".json" or not paths[0].is_file():
        return []
    with paths[0].open("rb") as file:
        return paths if _HEAD.match(file.read(200)) else []


def read_leaf(path: Path, *, name: str) -> Population:
    """The population of a file or a folder, in the order of files and their users."""
    clients: dict[str, int] = {}
    client_of_example: list[int] = []
    values: dict[str, list[Any]] = {"x": [], "y": []}
    for file in files_of(path):
        record = files.read_record(file, _FIELDS)
        users, stated, data = (record[field] for field in _FIELDS)
        if not len(users) == len(stated) == len(data) == len({*map(str, users)}):
            expected = "expected one entry for each user in users, num_samples and user_data"
            actual = f"{len(users)}, {len(stated)} and {len(data)}, or a user twice"
            raise CorruptFile(f"{file}: {expected}, found {actual}")
        for number, (user, samples) in enumerate(zip(users, stated, strict=True), 1):
            own = data.get(user) if isinstance(user, str) and user.strip() else None
            lists: list[Any] = [own.get(x) if isinstance(own, dict) else None for x in values]
            sizes = [len(entry) if isinstance(entry, list) else None for entry in lists]
            if sizes != [samples, samples]:
                what = "lists x and y, as long as num_samples says, of a user who is in user_data"
                raise CorruptFile(f"{file}, user {number}: expected {what}, found others")
            client = clients.setdefault(user, len(clients))
            client_of_example += [client] * samples
            for field, entry in zip(values, lists, strict=True):
                values[field] += entry
    if not client_of_example:
        raise InputError(f"{name} has no examples")
    if fault := fault_of(text_array(list(clients))):
        raise InputError(f"{name}, user {fault[0] + 1}: expected an id, found {fault[1]}")
    warn_of_alike(name, hashes(list(clients)))
    columns = dict(_column(name, field, entries) for field, entries in values.items())
    return from_rows(np.array(client_of_example), list(clients), columns, name=name, unit="user")


def _column(name: str, field: str, entries: list[Any]) -> tuple[str, Any]:
    """The name and the values of x or y."""
    if all(isinstance(entry, str) for entry in entries):
        return "text" if field == "x" else "target", text_array(entries)
    expected = "lists of numbers of one length" if field == "x" else "whole numbers of 32 bits"
    try:
        array = np.asarray(entries)
    except ValueError:
        array = np.empty(0)
    kind, rank = array.dtype.kind, array.ndim
    if field == "x" and kind in "biuf" and rank > 1 and not not_finite(array.astype(np.float64)):
        if changed_by_float32(array):
            beyond = "whole numbers beyond 2^24 that float32 cannot hold"
            raise InputError(f"{name}: x of all examples must be {expected}, found {beyond}")
        return "features", array.astype(np.float32)
    if field == "y" and kind in "biu" and rank == 1 and (abs(array.astype(float)) < 2**31).all():
        return "label", array.astype(np.int32)
    raise InputError(f"{name}: {field} of all examples must be texts, or {expected}, found others")
