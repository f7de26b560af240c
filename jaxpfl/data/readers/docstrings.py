"""The embedded default: real text that every installation already has.

A client is a documented top-level class or function of an installed Python package, its examples
are the sentences of its docstring. Packages are chosen by name, so that some are private clients
and others public corpora. Sources are parsed, never imported: nothing of the package runs.

What is kept of a docstring is prose. Doctests, code blocks, tables, directives, section titles
with their underlines and the type lines of parameter lists are dropped, mark-up characters are
taken off, and a docstring that another object had word for word counts once (aliases).
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pyarrow as pa

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError

UNIT = "documented class or function"

_SKIPPED_FOLDERS = {"tests", "test", "_vendor", "vendored", "__pycache__"}
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]?\s+(?=[\"'(\[]?[A-Z0-9])")
_UNDERLINE = re.compile(r"^([-=~^*#+.\"])\1{2,}$")
_PARAMETER = re.compile(r"^\*{0,2}[\w.]+(, \*{0,2}[\w.]+)* ?:( |$)")
_GOOGLE_ENTRY = re.compile(r"^\*{0,2}\w+(?: ?\([^)]*\))?: +(?=\S)")
_MARKUP = re.compile(r":[\w:]+:`~?([^`<]*)(?:<[^>]*>)?`|`{1,2}([^`]*)`{1,2}_?|\*\*([^*]*)\*\*")
_TITLES = re.compile(
    r"^(args|arguments|parameters|params|returns?|yields?|raises?|examples?|notes?|see also|"
    r"references|attributes|methods|warns|warnings|usage|other parameters|receives|"
    r"keyword arguments|example usage)\s*:*$",
    re.IGNORECASE,
)


def read(packages: str) -> Population:
    """Reads the docstrings of packages named in a comma-separated list.

    Raises:
      InputError: a package is not installed, or has no Python source.
    """
    ids: list[str] = []
    sentences: list[str] = []
    offsets = [0]
    names = [name.strip() for name in packages.split(",") if name.strip()]
    if not names:
        raise InputError("docstrings: needs package names, e.g. docstrings:jax,scipy,pandas")
    seen: set[str] = set()
    taken: set[str] = set()
    for name in dict.fromkeys(names):
        for identifier, docstring in _documented(name):
            text = inspect.cleandoc(docstring)
            if text in seen or identifier in taken:
                continue
            seen.add(text)
            found = list(split_sentences(text))
            if found:
                taken.add(identifier)
                ids.append(identifier)
                sentences.extend(found)
                offsets.append(len(sentences))
    return Population(
        {"text": pa.array(sentences, pa.large_string())},
        np.asarray(offsets, np.int64),
        pa.array(ids, pa.large_string()),
        f"docstrings:{','.join(names)}",
        UNIT,
    )


def split_sentences(docstring: str) -> Iterator[str]:
    """The prose sentences of a cleaned docstring: 3 to 200 words each, most of them letters."""
    for paragraph in _paragraphs(docstring.splitlines()):
        plain = _MARKUP.sub(lambda m: next((g for g in m.groups() if g), ""), paragraph)
        for sentence in _SENTENCE_END.split(" ".join(plain.split())):
            sentence = sentence.strip()
            words = sentence.split()
            letters = sum(character.isalpha() or character == " " for character in sentence)
            if 3 <= len(words) <= 200 and letters >= 0.7 * len(sentence):
                yield sentence


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Runs of prose lines of equal standing, without code, tables, titles and type lines."""
    current: list[str] = []
    code_indent: int | None = None
    for number, line in enumerate([*lines, ""]):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if code_indent is not None:
            if not text or indent > code_indent:
                continue
            code_indent = None
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        if text.startswith((">>>", "...", "$ ", "```", "|", "+-")):
            ends, keep = True, False
        elif text.startswith(".. ") or text.startswith("@"):
            ends, keep, code_indent = True, False, indent
        elif _UNDERLINE.match(text) or _TITLES.match(text) or _UNDERLINE.match(following):
            ends, keep = True, False
        elif _PARAMETER.match(text) and not _GOOGLE_ENTRY.match(text):
            ends, keep = True, False
        elif _GOOGLE_ENTRY.match(text) and len(_GOOGLE_ENTRY.match(text)[0]) < 40:
            text = _GOOGLE_ENTRY.sub("", text)
            ends, keep = True, True
        else:
            bullet = text.startswith(("- ", "* ", "+ ", "• "))
            text = text[2:] if bullet else text
            ends, keep = bullet or not text, bool(text)
        if ends and current:
            yield " ".join(current)
            current = []
        if keep:
            if text.endswith("::"):
                text, code_indent = text[:-1], indent
            current.append(text)


def _documented(package: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of the top-level classes and functions of a package's modules."""
    for module, path in _sources(package):
        try:
            with warnings.catch_warnings():
                # Others' invalid escapes are not our user's business.
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, UnicodeDecodeError):
            continue  # a template or a file for another Python
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node, clean=False)
                if docstring:
                    # A lone surrogate cannot be stored as UTF-8.
                    clean = docstring.encode("utf-8", "replace").decode("utf-8")
                    yield f"{module}.{node.name}", clean


def _sources(package: str) -> Iterator[tuple[str, Path]]:
    if not package.replace("_", "a").isidentifier():
        raise InputError(f"docstrings: {package!r} is not a package name")
    spec = importlib.util.find_spec(package)
    if spec is None or (not spec.submodule_search_locations and not spec.origin):
        known = sorted(importlib.metadata.packages_distributions())
        near = get_close_matches(package, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"docstrings: no package {package!r} is installed{hint}")
    if not spec.submodule_search_locations:
        if not str(spec.origin).endswith(".py"):
            raise InputError(f"docstrings: package {package!r} has no Python source")
        yield package, Path(str(spec.origin))
        return
    for location in spec.submodule_search_locations:
        root = Path(location)
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if _SKIPPED_FOLDERS & set(relative.parts) or path.name.startswith("test_"):
                continue
            parts = [package, *relative.with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path
