"""The docstrings of well-known Python packages: real text that needs no download.

A client is a documented class or function at the top level of a module; an example is a sentence of
its docstring. The sentences are read from a snapshot that is shipped with this package, so that
they are the same everywhere. docstrings.NOTICE.txt names the releases that they are from;
tools/docstring_snapshot.py made the snapshot.
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

    Clients with identical sentences are reduced to the first one, which is harmless, because the
    docstrings are published. Ids are dotted paths, such as "scipy.stats._stats_py.zscore".
    """
    if len(set(packages)) != len(packages):
        raise InputError("docstrings: a package is named twice")
    table = parquet.read_table(_SNAPSHOT)
    releases = json.loads(table.schema.metadata[b"packages"])
    for package in [name for name in packages if name not in releases]:
        names = {release["distribution"].lower(): name for name, release in releases.items()}
        names |= {name.lower(): name for name in releases}
        near = difflib.get_close_matches(package.lower().replace("_", "-"), names, 1, 0.6)
        hint = f" (did you mean {names[near[0]]!r}?)" if near else ""
        raise InputError(
            f"docstrings: there is no package {package!r} in the snapshot{hint}; expected names of "
            f"packages joined by commas, out of {', '.join(releases)}"
        )
    rows = zip(table["client"].to_pylist(), table["text"].to_pylist(), strict=True)
    clients = [(path, texts) for path, texts in rows if path.partition(".")[0] in packages]
    # The first of identical clients, in the order of the packages named.
    clients.sort(key=lambda client: packages.index(client[0].partition(".")[0]))
    paths: dict[tuple[str, ...], str] = {}
    for path, texts in clients:
        paths.setdefault(tuple(texts), path)
    sizes = list(map(len, paths))
    texts = [sentence for sentences in paths for sentence in sentences]
    return from_rows(
        np.repeat(np.arange(len(sizes)), sizes),
        list(paths.values()),
        {"text": pa.array(texts, pa.large_string())},
        name=f"docstrings:{','.join(packages)}",
        unit="documented class or function",
    )
