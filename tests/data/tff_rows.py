"""Small files of TFF's kind that the tests of their reader share."""

from jaxpfl.data.population import Population
from jaxpfl.data.readers.tff_examples import Feature
from jaxpfl.data.readers.tff_sqlite import read_tff
from tests.data.tff_files import example

SCHEMA = {"x": Feature("int64"), "t": Feature("text")}
SECRET = "rosebud"


def row(x, text=SECRET):
    return example({"x": x, "t": text.encode()})


def clients(sizes: dict[str, int]) -> dict[str, list[bytes]]:
    return {name: [row(100 * i + k) for k in range(n)] for i, (name, n) in enumerate(sizes.items())}


FOUR = {"d": 3, "b": 0, f"{SECRET} c": 2, "a": 4}


def read(path, **more) -> Population:
    return read_tff(path, features=SCHEMA, **more)
