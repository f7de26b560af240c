"""The interface of an embedder, and the embedding of a population."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.progress import Progress
from jaxpfl.text.columns import text_column

# Examples in a call of an embedder: enough to sort by length, few enough to show progress.
_CALL = 4_096


class Embedder(Protocol):
    """A public function from an example to a vector, which no example changes.

    The vector of an example does not depend on the other examples of a call.

    Attributes:
      name: identifies weights and settings, so that equal names mean equal vectors. Public.
      column: the column of a population that it reads: "text" or "image".
    """

    name: str
    dimension: int
    column: str

    def __call__(self, examples: Any) -> np.ndarray:
        """Vectors float32 [n, d] of n examples.

        For "text" these are a sequence or an Arrow array of strings [n], for "image" a numpy array
        [n, height, width, channels].
        """
        ...


def embed(population: Population, embedder: Embedder, *, progress: bool = False) -> Population:
    """The same clients with the column "embedding", float32 [examples, d], and no other.

    The fingerprint does not change, because an embedding is as private as the text. Progress is
    shown in per cent, because the number of examples is private. Refused are a population without
    the column that the embedder reads, and vectors of another shape than it declares.
    """
    vectors_NxD = np.empty((population.num_examples, embedder.dimension), np.float32)
    for rows, vectors in embedded(population, embedder, progress=progress):
        vectors_NxD[rows] = vectors
    return population.with_columns({"embedding": vectors_NxD})


def embedded(
    population: Population, embedder: Embedder, *, progress: bool = False, public: bool = False
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields the rows of `embed` in pieces, for corpora whose embeddings do not fit in memory.

    A piece is some rows, in their order, and their vectors, float32 [n, d]. Progress is shown in
    examples where their number is public. Errors as `embed`.
    """
    is_text = embedder.column == "text"
    column = text_column(population) if is_text else population.column(embedder.column)
    label, count = f"embedding {population.name} with {embedder.name}", len(column)
    total, step = (count, embedder.column) if public else (100, "percent")
    with Progress(label, total=total, progress=progress, step=step) as bar:
        for start in range(0, count, _CALL):
            given = column[start : start + _CALL]
            given = given if isinstance(given, np.ndarray) else given.to_pylist()
            vectors = np.asarray(embedder(given))
            if vectors.shape != (len(given), embedder.dimension):
                shapes = f"shape {vectors.shape}, expected {(len(given), embedder.dimension)}"
                raise InputError(f"embedder {embedder.name!r} returned {shapes}")
            yield slice(start, start + len(given)), vectors
            bar.update(total * (start + len(given)) // count)


def embeddings_of(population: Population) -> np.ndarray:
    """The column "embedding" that `embed` made: floats [examples, d]."""
    rows_NxD = population.columns.get("embedding")
    if not isinstance(rows_NxD, np.ndarray) or rows_NxD.ndim != 2 or rows_NxD.dtype.kind != "f":
        expected = "a column 'embedding' of floats [examples, d], see text.embed.embed"
        raise InputError(f"the population must have {expected}, found {[*population.columns]}")
    return rows_NxD


def as_texts(examples: Any) -> list[str]:
    """The strings in `examples`, a sequence, an Arrow array or a numpy array, as a list."""
    if isinstance(examples, str):
        raise InputError("expected a sequence of strings, found one string")
    is_arrow = isinstance(examples, pa.Array | pa.ChunkedArray)
    texts = examples.to_pylist() if is_arrow else list(examples)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {row} must be a string, found {type(text).__name__}")
    return texts
