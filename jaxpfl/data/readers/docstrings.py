"""The docstrings of installed Python packages: real text that needs no download.

A client is a documented class or function at the top level of a module, an example one sentence of
its docstring. Packages are parsed, never imported: nothing of them runs, and what is read depends
on their files alone.
"""

import ast
import difflib
import importlib.metadata
import importlib.util
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.sentences import sentences
from jaxpfl.errors import InputError

# Tests, and copies of other projects: their documentation is not the package's.
_SKIPPED = re.compile(r"tests?|.*_tests?|test_.*|testing|conftest|_?vendor(ed)?|extern(als?)?")
# The first line of a public class or function at the top level.
_DEFINITION = re.compile(r"^(?:async def|def|class)[ \t]+([A-Za-z]\w*)", re.MULTILINE)
_QUOTES = re.compile(r'"""|\'\'\'')
# What stands before a docstring: the colon that ends the definition, comments, a prefix.
_BEFORE_DOCSTRING = re.compile(r":[ \t]*(?:#[^\n]*)?\s*(?:#[^\n]*\s*)*[rRuU]?\Z")


def read_docstrings(packages: Sequence[str]) -> Population:
    """The public docstrings of packages, and of all their modules but tests and vendored code.

    A name with a leading underscore is not public; a module with one may hold public names. Of
    clients with identical sentences the first is kept; clients without a sentence are left out. So
    their number follows from what they hold, which is no leak of texts that are published.

    Returns:
      Clients by dotted path, such as "scipy.stats._stats_py.zscore", with the column "text".

    Raises:
      InputError: a package is not installed, named twice, or has no docstrings.
    """
    if len(set(packages)) != len(packages):
        raise InputError("docstrings: a package is named twice")
    client_ids: list[str] = []
    sizes: list[int] = []
    texts: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for package in packages:
        before = len(client_ids)
        for path, docstring in _documented(package):
            found = tuple(sentences(docstring))
            if found and found not in seen:
                seen.add(found)
                client_ids.append(path)
                sizes.append(len(found))
                texts.extend(found)
        if len(client_ids) == before:
            raise InputError(f"docstrings: package {package!r} has no docstrings in Python files")
    return from_rows(
        np.repeat(np.arange(len(sizes)), sizes),
        client_ids,
        {"text": pa.array(texts, pa.large_string())},
        name=f"docstrings:{','.join(packages)}",
        unit="documented class or function",
    )


def _documented(package: str) -> Iterator[tuple[str, str]]:
    """Dotted paths and docstrings of a package, by file name, then in the order of the file."""
    known: set[str] = set()
    for root in _roots(package):
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for file in files:
            inside = file.relative_to(root).with_suffix("").parts if root.is_dir() else ()
            if any(_SKIPPED.fullmatch(part) for part in inside):
                continue
            module = ".".join((package, *(part for part in inside if part != "__init__")))
            try:
                source = file.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            for name, docstring in definitions(source):
                path = f"{module}.{name}"
                # A second definition of a name replaces or overloads the first one.
                if path not in known:
                    known.add(path)
                    yield path, docstring


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Names and docstrings of the public classes and functions at the top level of `source`.

    Docstrings are those in triple quotes, as PEP 257 asks for. Only each definition up to its
    docstring is parsed, which is several times faster than all of the source.
    """
    starts = [(match.start(), match[1]) for match in _DEFINITION.finditer(source)]
    for (start, name), (end, _) in itertools.pairwise([*starts, (len(source), "")]):
        opening = _QUOTES.search(source, start, end)
        if opening is None or not _BEFORE_DOCSTRING.search(source[start : opening.start()]):
            continue
        closing = source.find(opening[0], opening.end())
        if closing < 0:
            continue
        try:
            with warnings.catch_warnings():
                # Invalid escapes are the package's business.
                warnings.simplefilter("ignore")
                body = ast.parse(source[start : closing + 3]).body
        except (SyntaxError, ValueError):
            continue
        # Two nodes: the quotes are those of a private definition behind this one.
        node = body[0] if len(body) == 1 else None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                yield name, docstring


def _roots(package: str) -> list[Path]:
    """The folders of a package, or the file of a module."""
    if not package.isidentifier():
        raise InputError(
            f"docstrings: expected names of packages joined by commas, found {package!r}"
        )
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise InputError(f"docstrings: package {package!r} is not installed{_hint(package)}")
    if spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    if spec.origin and spec.origin.endswith(".py"):
        return [Path(spec.origin)]
    raise InputError(f"docstrings: package {package!r} has no Python files")


def _hint(package: str) -> str:
    installed = importlib.metadata.packages_distributions()
    by_distribution = {
        distribution.lower().replace("-", "_"): name
        for name, distributions in installed.items()
        for distribution in distributions
    }
    near = by_distribution.get(package.lower())
    if near is None:
        close = difflib.get_close_matches(package, installed, 1, 0.6)
        near = close[0] if close else None
    return f" (did you mean {near!r}?)" if near else ""
