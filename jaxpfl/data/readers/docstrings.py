"""The docstrings of well-known Python packages: real text that needs no download.

A client is a documented class or function at the top level of a module; an example is a sentence of
its docstring. The sentences are read from a snapshot that is shipped with this package, so that
they are the same everywhere. docstrings.NOTICE.txt names the releases that they are from. The
snapshot is not made again: another one would change the clients of every experiment.
"""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl.data.population import Population, from_rows
from jaxpfl.errors import InputError

_SNAPSHOT = Path(__file__).with_suffix(".parquet")


def read_docstrings(packages: Sequence[str]) -> Population:
    """The public docstrings of packages, named as they are imported.

    Of clients with identical sentences only the first is kept, which is harmless, because the
    docstrings are published. Ids are dotted paths, such as "scipy.stats._stats_py.zscore".
    """
    if len(set(packages)) != len(packages):
        raise InputError("docstrings: a package is named twice")
    table = parquet.read_table(_SNAPSHOT)
    known = json.loads(table.schema.metadata[b"packages"])
    for package in packages:
        if package not in known:
            raise _unknown(package, known)
    held = zip(table["client"].to_pylist(), table["text"].to_pylist(), strict=True)
    asked = [(path, found) for path, found in held if path.partition(".")[0] in packages]
    # The first of identical clients, in the order of the packages asked for.
    asked.sort(key=lambda client: packages.index(client[0].partition(".")[0]))
    kept: dict[tuple[str, ...], str] = {}
    for path, found in asked:
        kept.setdefault(tuple(found), path)
    sizes = [len(found) for found in kept]
    texts = [sentence for found in kept for sentence in found]
    return from_rows(
        np.repeat(np.arange(len(sizes)), sizes),
        list(kept.values()),
        {"text": pa.array(texts, pa.large_string())},
        name=f"docstrings:{','.join(packages)}",
        unit="documented class or function",
    )


def _unknown(package: str, known: dict[str, dict[str, str]]) -> InputError:
    """The error for an unknown package; suggests the nearest name of a package or distribution."""
    names = {release["distribution"].lower(): name for name, release in known.items()}
    names |= {name.lower(): name for name in known}
    near = difflib.get_close_matches(package.lower().replace("_", "-"), names, 1, 0.6)
    hint = f" (did you mean {names[near[0]]!r}?)" if near else ""
    return InputError(
        f"docstrings: there is no package {package!r} in the snapshot{hint}; expected names of "
        f"packages joined by commas, out of {', '.join(known)}"
    )
