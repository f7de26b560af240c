"""What clients compute from their own data before the first round, client by client.

A client that moved the rows of others would move the sum by more than the clip norm. What `prepare`
makes of all clients is therefore compared with what it makes of a few at a time.
"""

from typing import Any

import numpy as np

from jaxpfl.data.content import content_hash
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.release.query import Query

# Odd, so that no regular groups of clients fall into whole blocks.
_BLOCK = 97


def prepared(query: Query, population: Population) -> Population:
    """The clients as the query reads them: what `prepare` makes of each, or as they are.

    Where the unit of privacy is the example, each is handed over as a client of its own.

    Raises:
      InputError: `prepare` makes another thing of clients with others than of the same clients
        alone, in any bit, or keeps another number of them.
    """
    if query.prepare is None:
        return population
    asked = population if query.plan.unit == "client" else _each_alone(population)
    found, count = query.prepare(asked), len(asked)
    size = 1 if count <= _BLOCK else _BLOCK
    same = len(found) == count
    for start in range(0, count, size):
        if not same:
            break
        clients = range(start, min(start + size, count))
        part = query.prepare(asked.select(clients))
        same = _content(part, range(len(part))) == _content(found, clients)
    if not same:
        unit = query.plan.unit
        raise InputError(
            f"query {query.label!r}: prepare must keep every {unit} and compute it from its own "
            f"data alone, found a result that depends on which others are asked with it"
        )
    return found


def _content(population: Population, clients: range) -> str:
    """A hash of all bits of neighbouring clients. PRIVATE."""
    edges = population.offsets[clients.start : clients.stop + 1]
    return content_hash(population.rows(slice(int(edges[0]), int(edges[-1]))), edges - edges[0])


def _each_alone(population: Population) -> Population:
    """Each example as a client of its own."""
    count = population.num_examples
    ids: Any = [str(example) for example in range(count)]
    return Population(population.rows(slice(0, count)), np.arange(count + 1), ids)
