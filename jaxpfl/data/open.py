"""One way to open any population: a source is a string.

    docstrings:jax,scipy,pandas                 text of installed packages
    digits  or  digits?clients=100&alpha=0.5    scikit-learn's digits, dealt to clients
    clients.jsonl  or  clients.jsonl.gz         text by client, one example a line
    clients.jsonl?client=author&text=message    the same with other field names
    folder/                                     a population saved with Population.save
"""

import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import parse_qsl

from jaxpfl.data.population import Population
from jaxpfl.data.readers import digits, docstrings, jsonl
from jaxpfl.errors import InputError

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


def open(source: str | Path | Population) -> Population:
    """Opens a source (see the head of this file); a population is returned as it is.

    `$VARIABLE` in a path is replaced by the environment's value. `min_examples=5` among the
    options of any source keeps the clients with at least as many examples.

    Raises:
      InputError: the source is not of a known form, a file is missing, an option is unknown.
      CorruptFile: a file is damaged.
    """
    if isinstance(source, Population):
        return source
    text = str(source)
    place, _, query = text.partition("?")
    try:
        options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError as error:
        raise InputError(f"{text}: options must read name=value&name=value") from error
    least = _option(text, "min_examples", options.pop("min_examples", "0"), int)
    population = _opened(text, place, options)
    return population.with_min_examples(least) if least else population


def _opened(text: str, place: str, options: dict[str, str]) -> Population:
    if place.startswith("docstrings:"):
        _known(text, options, {})
        return docstrings.read(place.removeprefix("docstrings:"))
    if place == "digits":
        types = {"clients": int, "alpha": float, "seed": int}
        return digits.read(**_known(text, options, types))
    path = Path(_VARIABLE.sub(_environment, place)).expanduser()
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return jsonl.read(path, **_known(text, options, {"client": str, "text": str}))
    if path.is_dir():
        _known(text, options, {})
        return Population.load(path)
    if path.exists():
        raise InputError(f"{place}: expected .jsonl, .jsonl.gz or a saved population's folder")
    near = get_close_matches(place.split(":")[0], ["docstrings", "digits"], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(
        f"{place}: no such file or folder, nor a source such as docstrings:jax or digits{hint}"
    )


def _known(text: str, options: dict[str, str], types: dict[str, Callable]) -> dict:
    for name in options:
        if name not in types:
            near = get_close_matches(name, [*types, "min_examples"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{text}: unknown option {name!r}{hint}")
    return {name: _option(text, name, value, types[name]) for name, value in options.items()}


def _option(text: str, name: str, value: str, kind: Callable):
    try:
        return kind(value)
    except ValueError as error:
        raise InputError(f"{text}: option {name} must be {kind.__name__}, found {value!r}") from error


def _environment(match: re.Match) -> str:
    name = match[1] or match[2]
    if name not in os.environ:
        raise InputError(f"the environment variable {name} is not set; the source needs it")
    return os.environ[name]
