"""LargeFedBench: speeches of parliaments and abstracts of bioRxiv, each a client of its own.

Source: Hou et al. 2025, "Private federated learning using preference-optimized synthetic data"
(POPri), section 4. The data sets are on the Hugging Face hub and are read through its library
`datasets`, an optional one; code of theirs is never run. The paper's samples are successive spans
of 64 tokens of a text, which `jaxpfl.text.spans` cuts.
"""

import re
from typing import Any

import numpy as np

from jaxpfl import checks
from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.prose import pieces
from jaxpfl.errors import InputError

PARTS = {
    "congress": "hazylavender/CongressionalDataset",
    "biorxiv": "hazylavender/biorxiv-abstract",
}
_FIELDS = ("data", "abstract", "text")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def read_largefedbench(
    part: str,
    *,
    revision: str,
    part_split: str = "train",
    text: str | None = None,
    split: str | None = None,
) -> Population:
    """Reads one of the two data sets; every row is a client.

    Args:
      part: "congress" or "biorxiv".
      revision: the commit that is read, 40 hexadecimal digits: a branch would move, and the
        population, its fingerprint and its ledger with it.
      part_split: of the data set on the hub.
      text: the field that holds the text; None: the first of "data", "abstract" and "text" that
        the data set has.
      split: "sentences", "paragraphs" or "lines": examples of a client; None: its text is one.

    Returns:
      Clients by the row's number, from 1, with the column "text".

    Raises:
      InputError: the library is missing, the hub did not give the data set, or it has no such
        field.
    """
    checks.one_of("largefedbench", part, tuple(PARTS))
    name = PARTS[part]
    if not isinstance(revision, str) or not _COMMIT.fullmatch(revision):
        raise InputError(
            f"largefedbench:{part}: revision must be a commit of {name}, 40 hexadecimal digits, "
            f"found {revision!r}"
        )
    if split is not None:
        checks.one_of("split", split, ("sentences", "paragraphs", "lines"))
    rows = _rows(name, part_split, revision)
    known = list(rows.column_names)
    field = text or next((field for field in _FIELDS if field in known), None)
    if field not in known:
        raise InputError(
            f"{name}: there is no field {' or '.join(map(repr, [text] if text else _FIELDS))}, "
            f"found {', '.join(map(repr, known))}"
        )
    texts: list[str] = []
    sizes: list[int] = []
    for number, value in enumerate(rows[field], 1):
        if type(value) is not str:
            raise InputError(
                f"{name}, row {number}: field {field!r} must be a string, found "
                f"{type(value).__name__}"
            )
        found = [value] if split is None else list(pieces(value.split("\n"), split))
        texts.extend(found)
        sizes.append(len(found))
    if not texts:
        raise InputError(f"{name} has no examples")
    return from_rows(
        np.repeat(np.arange(len(sizes)), sizes),
        [str(number) for number in range(1, 1 + len(sizes))],
        {"text": text_array(texts)},
        name=f"largefedbench:{part} [{part_split}]",
        unit="one speech" if part == "congress" else "one abstract",
    )


def _rows(name: str, split: str, revision: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            f"{name} is read by the library datasets, which is not installed: "
            "pip install 'jaxpfl[datasets]'"
        ) from error
    try:
        return datasets.load_dataset(name, split=split, revision=revision)
    # Whatever a network, a proxy or a hub can raise means that it is not to be had there.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise InputError(
            f"the Hugging Face hub did not give {name} at {revision[:12]}... "
            f"({type(error).__name__}: {lines[0]})"
        ) from error
