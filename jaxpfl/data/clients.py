"""Populations from the columns or records of each client."""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from jaxpfl.data.columns import Column, as_column, concatenated, describe, text_array
from jaxpfl.data.ids import fault_of, hashes, warn_of_alike
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.errors import InputError

_EXPECTED = "its id must be a non-empty string or a whole number"


def from_clients(
    clients: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
    *,
    name: str = "in memory",
    unit: str = "client",
) -> Population:
    """A population from each client's data.

    All clients must have the same columns with the same type and example shape. For a client
    without examples, an empty list is a column of any type.

    Args:
      clients: the data by id, or pairs of an id and data. An id is a non-empty string or a whole
        number, which means its decimal digits. The data is {column: its examples} or a list of
        records.

    Raises:
      InputError: a client's columns differ from the first client's, or from each other in length,
        or an id occurs twice; the message names the client by its index.
    """
    ids: list[str] = []
    pieces: dict[str, list[Column]] = {}
    sizes = []
    pairs = clients.items() if isinstance(clients, Mapping) else clients
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"from_clients takes {{id: columns}}, found {type(pair).__name__}")
        client, given = pair
        if isinstance(client, Integral) and not isinstance(client, bool):
            client = str(int(client))
        if not isinstance(client, str):
            raise InputError(f"client {index}: {_EXPECTED}, found {type(client).__name__}")
        ids.append(client)
        columns = _columns_of(f"client {index}", given)
        if not index:
            pieces = {column_name: [] for column_name in columns}
        # A client without records has no fields, either.
        if set(columns) != set(pieces) and (columns or len(given)):
            expected = sorted(pieces)
            raise InputError(f"client {index} has columns {sorted(columns)}, expected {expected}")
        lengths = set()
        for column_name, before in pieces.items():
            values = columns.get(column_name, ())
            if isinstance(values, list | tuple) and not values:
                lengths.add(0)
                continue
            what = f"client {index}, column {column_name!r}"
            column = as_column(what, values)
            lengths.add(len(column))
            if before and describe(column) != describe(before[0]):
                raise InputError(f"{what} holds {describe(column)}, expected {describe(before[0])}")
            before.append(column)
        if len(lengths) > 1:
            raise InputError(f"client {index} has columns of different lengths: {sorted(lengths)}")
        sizes.append(lengths.pop() if lengths else 0)
    if not ids:
        raise InputError("from_clients needs at least one client, found none")
    if fault := fault_of(text_array(ids)):
        raise InputError(f"client {fault[0]}: {_EXPECTED}, found {fault[1]}")
    whole = {column_name: concatenated(parts) for column_name, parts in pieces.items()}
    population = Population(whole, offsets_of(sizes), ids, name, unit)
    warn_of_alike(name, hashes(ids))
    return population


def _columns_of(what: str, given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    if isinstance(given, list | tuple) and all(isinstance(record, Mapping) for record in given):
        names = sorted(given[0]) if given else []
        for number, record in enumerate(given):
            if sorted(record) != names:
                raise InputError(
                    f"{what}, record {number}: has the fields {sorted(record)}, expected {names}"
                )
        return {name: [record[name] for record in given] for name in (given[0] if given else ())}
    raise InputError(
        f"{what} must hold a mapping of columns or a list of records, found "
        f"{type(given).__name__}; `from_dataframe` takes a DataFrame with a column of clients"
    )
