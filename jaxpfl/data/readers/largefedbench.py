"""LargeFedBench: speeches of parliaments and abstracts of bioRxiv, each a client of its own.

Source: Hou et al. 2025, "Private federated learning using preference-optimized synthetic data"
(POPri), section 4. Both data sets are on the Hugging Face hub. The paper's samples are successive
spans of 64 tokens of a text; `jaxpfl.text.tokenisers.spans` makes them. The paper's third data set,
abstracts of PubMed (Xie et al. 2024), is not on the hub.
"""

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.data.readers.examples import EACH_ROW, Layout
from jaxpfl.data.readers.hugging_face import read_hub

CORPORA = {
    "congress": "hazylavender/CongressionalDataset",
    "biorxiv": "hazylavender/biorxiv-abstract",
}
_FIELDS = ("data", "abstract", "text")


def read_largefedbench(
    corpus: str,
    *,
    revision: str,
    part: str = "train",
    text: str | None = None,
    split: str | None = None,
) -> Population:
    """Reads one of the two data sets; every row is a client.

    Args:
      corpus: "congress" or "biorxiv".
      text: the column that holds the text; None takes the first of "data", "abstract" and "text"
        that there is.
      revision, part, split: as for `read_hugging_face`.

    Returns:
      Clients by the row's number, from 1, with the column "text".

    Raises:
      InputError: as for `read_hugging_face`.
    """
    checks.one_of("largefedbench", corpus, tuple(CORPORA))
    return read_hub(
        CORPORA[corpus],
        {"revision": revision, "part": part},
        _FIELDS if text is None else (text,),
        Layout(EACH_ROW, split=split),
        title=f"largefedbench:{corpus} [{part}]",
        unit="one speech" if corpus == "congress" else "one abstract",
    )
