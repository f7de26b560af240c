"""A pool of public texts, in named corpora, of which one look's release chooses some.

Nothing here reads a client's data or costs privacy.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl import checks, files
from jaxpfl.algorithms.chosen_texts import Choice, Evidence, choose
from jaxpfl.algorithms.fred import PrivateMoments
from jaxpfl.data.columns import take
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.text.columns import texts_of

Corpora = Mapping[str, Population]
# Columns of a corpus in which the terms of its texts may stand.
TERMS = ("license", "licence", "attribution")


def require_larger(pool: int, number: int, name: str) -> None:
    """Refuses a pool that has no more texts than are to be chosen; `name` says who asks."""
    if pool <= checks.positive_int(name, number):
        most = f"the number of texts to choose from, {pool:,} in all corpora"
        raise InputError(f"{name} must be below {most}, found {number:,}")


def choose_from(
    released: PrivateMoments,
    embeddings: Mapping[str, np.ndarray],
    number: int,
    *,
    written: str = "",
    progress: bool = False,
) -> Choice:
    """`choose` of the texts of all corpora, one after another; embeddings are float32 [n, d]."""
    names_N = np.repeat(list(embeddings), list(map(len, embeddings.values())))
    evidence = Evidence(released, np.concatenate(list(embeddings.values())))
    return choose([evidence], names_N, number, written=written, progress=progress)


def rows_by_corpus(rows_M: np.ndarray, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Chosen rows of the pool by corpus, counted from its first; `sizes` in the pool's order."""
    starts = np.cumsum([0, *sizes.values()])[:-1]
    parts = np.split(rows_M, np.searchsorted(rows_M, starts[1:]))
    return {name: part - start for name, part, start in zip(sizes, parts, starts, strict=True)}


def check_file(path: Path) -> None:
    """Refuses a file of another kind than `write` makes."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"{path}: chosen texts are written to a .jsonl or .parquet file")


def write(path: Path, choices: Mapping[str, Choice], corpora: Corpora, cut: Corpora) -> None:
    """Writes the chosen texts, with "source", "weight" and the terms that their corpora have.

    `choices` are by label, the texts' "label", or of one "". `corpora` are as they were read; `cut`
    has the pool's examples, of the same documents, each with all terms of its document.
    """
    sizes = {name: corpus.num_examples for name, corpus in cut.items()}
    terms = [term for term in TERMS if any(term in corpus.columns for corpus in corpora.values())]
    table: dict[str, list[Any]] = {name: [] for name in ("text", *terms, "source", "weight")}
    for choice in choices.values():
        for name, rows in rows_by_corpus(choice.rows_M, sizes).items():
            corpus, pieces = corpora[name], cut[name]
            table["text"] += take(pieces.column("text"), rows).tolist()
            table["source"] += [name] * len(rows)
            documents = np.searchsorted(pieces.offsets, rows, side="right") - 1
            for term in terms:
                if term not in corpus.columns:
                    table[term] += [None] * len(rows)
                elif term in pieces.columns:
                    table[term] += map(str, take(pieces.column(term), rows).tolist())
                else:
                    for document in documents.tolist():
                        terms_of = dict.fromkeys(corpus.examples(document)[term].tolist())
                        table[term].append("; ".join(map(str, terms_of)))
        table["weight"] += choice.weights_N[choice.rows_M].tolist()
    if "" not in choices:
        table["label"] = [label for label, choice in choices.items() for _ in choice.rows_M]
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(table), content := io.BytesIO())
        files.write_atomically(path, content.getvalue())
    else:
        lines = zip(*table.values(), strict=True)
        records = (dict(zip(table, line, strict=True)) for line in lines)
        written = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        files.write_atomically(path, "".join(written))


def without_repeats(corpora: Corpora) -> tuple[dict[str, Population], int]:
    """The corpora without texts that are empty, or were there before; and how many these are."""
    distinct, before, repeated = dict[str, Population](), set[str](), 0
    for name, corpus in corpora.items():
        first = np.zeros(corpus.num_examples, bool)
        for row, text in enumerate(texts_of(corpus)):
            first[row] = bool(text.strip()) and text not in before
            before.add(text)
        repeated += int(len(first) - first.sum())
        distinct[name] = corpus if first.all() else corpus.keeping(first)
    return distinct, repeated
