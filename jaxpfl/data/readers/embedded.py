"""The data sets that need no download: docstrings of Python packages, and scikit-learn's digits.

The docstrings are real text. A client is a documented class or function at the top level of a
module; an example is a sentence of its docstring. The sentences are read from a snapshot that is
shipped with this package, so that they are the same everywhere. docstrings.NOTICE.txt names the
releases that they are from. The snapshot is not made again: another one would change the clients of
every experiment.
"""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl import checks
from jaxpfl.data.population import Population, from_rows
from jaxpfl.errors import InputError

_SNAPSHOT = Path(__file__).with_name("docstrings.parquet")


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
        what = f"there is no package {package!r} in the snapshot{hint}; expected names of packages"
        raise InputError(f"docstrings: {what} joined by commas, out of {', '.join(releases)}")
    rows = zip(table["client"].to_pylist(), table["text"].to_pylist(), strict=True)
    clients = [(path, texts) for path, texts in rows if path.partition(".")[0] in packages]
    # The first of identical clients stays, in the order of the packages named.
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


def read_digits(clients: int = 100, alpha: float = 0.5, seed: int = 0) -> Population:
    """The 1,797 digits dealt to clients with uneven classes (Hsu, Qi and Brown 2019, section 3).

    Each client draws its class proportions from a symmetric Dirichlet(alpha) and then its examples,
    one by one without replacement. When a class is used up, the others keep their proportions.
    Numbers of examples differ by at most one between clients.

    Columns: "image" float32 [8, 8, 1] in 0 .. 1 (0 = paper), "label" int32 in 0 .. 9.
    """
    clients = checks.positive_int("digits: clients", clients)
    alpha = checks.positive("digits: alpha", alpha)
    seed = checks.non_negative_int("digits: seed", seed)
    # Imported late: scikit-learn takes a second.
    from sklearn.datasets import load_digits

    pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    total = len(labels)
    if clients > total:
        raise InputError(f"digits: clients must be at most {total}, found {clients}")
    generator = np.random.Generator(np.random.Philox(key=seed))
    classes = int(labels.max()) + 1
    of_class = (np.flatnonzero(labels == label) for label in range(classes))
    left = [generator.permutation(rows).tolist() for rows in of_class]
    proportions = generator.dirichlet(np.full(classes, alpha), clients)
    client_of_row = np.zeros(total, np.int64)
    # Clients take turns, one example each, so that the last one does not only get leftovers.
    for turn in range(total):
        client = turn % clients
        available = np.array([bool(rows) for rows in left])
        # With a small alpha, proportions may underflow to 0: then all classes left are as likely.
        weights = np.where(available, proportions[client], 0.0)
        weights = weights if weights.sum() > 0 else available.astype(float)
        label = generator.choice(classes, p=weights / weights.sum())
        client_of_row[left[label].pop()] = client
    return from_rows(
        client_of_row,
        [f"client {index}" for index in range(clients)],
        {
            "image": (pixels / 16.0).astype(np.float32).reshape(-1, 8, 8, 1),
            "label": labels.astype(np.int32),
        },
        name=f"digits?clients={clients}&alpha={alpha:g}&seed={seed}",
        unit="dealt share of the digits",
    )
