"""LargeFedBench: speeches of parliaments and abstracts of bioRxiv, each a client of its own.

Source: Hou et al. 2025, "Private federated learning using preference-optimized synthetic data"
(POPri), section 4. Both are data sets on the Hugging Face hub. The paper's samples are successive
spans of 64 tokens of a text, which `jaxpfl.text.tokenisers.spans` cuts. Its third data set, Xie et
al. 2024's abstracts of PubMed, is published outside the hub; others that are there,
`readers.hugging_face` reads.
"""

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.data.readers.hugging_face import hub_rows, texts_of
from jaxpfl.data.readers.prose import PIECES
from jaxpfl.errors import InputError

PARTS = {
    "congress": "hazylavender/CongressionalDataset",
    "biorxiv": "hazylavender/biorxiv-abstract",
}
_FIELDS = ("data", "abstract", "text")


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
    if split is not None:
        checks.one_of("split", split, PIECES)
    rows = hub_rows(name, revision=revision, part=part_split)
    field = text or next((field for field in _FIELDS if field in rows.column_names), None)
    if field is None:
        raise InputError(
            f"{name}: there is no field {' or '.join(map(repr, _FIELDS))}, found "
            f"{', '.join(map(repr, rows.column_names))}"
        )
    return texts_of(
        rows,
        name,
        text=field,
        client=None,
        split=split,
        title=f"largefedbench:{part} [{part_split}]",
        unit="one speech" if part == "congress" else "one abstract",
    )
