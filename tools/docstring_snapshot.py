"""Makes the docstring corpora that are shipped with the package.

    python tools/docstring_snapshot.py

Reads the docstrings of the packages in PACKAGES from the files of their installed releases, and
writes jaxpfl/data/readers/docstrings.parquet, their sentences, and beside it
docstrings.NOTICE.txt, which names the releases and holds their licences. All of the packages must
be installed; jaxpfl itself does not need all of them. They are parsed, never imported: nothing of
them runs, and what is read depends on their files alone.

A new snapshot changes the clients of every experiment on docstrings, and so its results.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl.data.readers.prose import split_sentences

FOLDER = Path(__file__).parents[1] / "jaxpfl" / "data" / "readers"

# What they are imported as, and the licence of each.
PACKAGES = {
    "absl": "Apache-2.0",
    "dp_accounting": "Apache-2.0",
    "flax": "Apache-2.0",
    "fontTools": "MIT",
    "jax": "Apache-2.0",
    "jaxlib": "Apache-2.0",
    "jinja2": "BSD-3-Clause",
    "markdown": "BSD-3-Clause",
    "matplotlib": "PSF-2.0, as matplotlib's own",
    "numpy": "BSD-3-Clause",
    "optax": "Apache-2.0",
    "orbax": "Apache-2.0",
    "pandas": "BSD-3-Clause",
    "pyarrow": "Apache-2.0",
    "pygments": "BSD-2-Clause",
    "rich": "MIT",
    "scipy": "BSD-3-Clause",
    "sklearn": "BSD-3-Clause",
    "tensorboard": "Apache-2.0",
    "tyro": "MIT",
    "werkzeug": "BSD-3-Clause",
}

# Tests, and copies of other projects: their documentation is not the package's.
_SKIPPED = re.compile(r"tests?|.*_tests?|test_.*|testing|conftest|_?vendor(ed)?|extern(als?)?")
# The first line of a public class or function at the top level.
_DEFINITION = re.compile(r"^(?:async def|def|class)[ \t]+([A-Za-z]\w*)", re.MULTILINE)
_QUOTES = re.compile(r'"""|\'\'\'')
# What stands before a docstring: the colon that ends the definition, comments, a prefix.
_BEFORE_DOCSTRING = re.compile(r":[ \t]*(?:#[^\n]*)?\s*(?:#[^\n]*\s*)*[rRuU]?\Z")

# Sections of which no line is prose.
_SKIPPED_SECTIONS = {"see also", "references", "methods", "examples", "example", "usage"}
_PARAMETER_SECTIONS = {
    "parameters", "other parameters", "returns", "yields", "receives", "raises", "warns",
    "attributes", "args", "arguments", "keyword args", "keyword arguments",
}  # fmt: skip
_SECTIONS = _SKIPPED_SECTIONS | _PARAMETER_SECTIONS | {"note", "notes", "warning", "warnings"}
_UNDERLINE = re.compile(r"([-=~^*#\"'`+.])\1{2,}\s*$")
_DIRECTIVE = re.compile(r"\.\.\s")
_PROSE_DIRECTIVE = re.compile(r"\.\.\s+(?:note|warning|tip|important|caution)::\s*")
_FIELD = re.compile(r":[\w ,*`.\[\]|]+:\s*")
_BULLET = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)]|\[\d+\])\s+")
_TABLE = re.compile(r"={4}|-{4}|[+]-|^[|]")
# "x: what it is" and "x (int): what it is", under "Args:".
_GOOGLE_PARAMETER = re.compile(r"\**`*[\w.*]+`*(?:,\s*`*[\w.*]+`*)*\s*(?:\([^)]*\))?:\s+")

_MARKUP = (
    # `text <target>`_ and :role:`~a.b.c`: the text, or the last name of the target
    (re.compile(r":math:`[^`]*`"), " \0 "),
    (re.compile(r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":[\w:+-]+:`~(?:[\w.]*\.)?([^`]*)`"), r"\1"),
    (re.compile(r":[\w:+-]+:`([^`]*)`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\((?:https?:)?[^)\s]+\)"), r"\1"),
    (re.compile(r"\s*\[(?:\d+|[A-Z]\w*\d+)\]_"), ""),
    (re.compile(r"(?:https?|ftp)://\S+"), " \0 "),
    (re.compile(r"\*\*([^*\n]+)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^*\s][^*\n]*?)\*(?![\w*])"), r"\1"),
    (re.compile(r"`+~?"), ""),
    (re.compile(r"\\(.)"), r"\1"),
)
_MARKED = re.compile(r"[`*\\\[]|://")
_SPACES = re.compile(r"\s+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_CODE = re.compile(r">>>|[{}=<>|\\]{2}|\w\(.*\(|[=<>]=?\s*\S+\s*[=<>]|\0|^\W*$|\.\.\.\s")


def snapshot(packages: Iterable[str]) -> pa.Table:
    """Client ids and sentences of packages, one client a row, in the order they are found."""
    ids, texts = [], []
    for package in packages:
        before = len(ids)
        for path, docstring in documented(package):
            if found := sentences(docstring):
                ids.append(path)
                texts.append(found)
        if len(ids) == before:
            raise SystemExit(f"package {package!r} has no docstrings in Python files")
    return pa.table({"client": ids, "text": pa.array(texts, pa.list_(pa.string()))})


def documented(package: str) -> Iterator[tuple[str, str]]:
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
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise SystemExit(f"package {package!r} is not installed")
    if spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(str(spec.origin))]


def sentences(docstring: str) -> list[str]:
    """The prose of a docstring, sentence by sentence, in order.

    Left out: doctests, code blocks, mathematics, directives, section titles and their underlines,
    tables, the type lines of parameters, "See Also", "References" and "Examples". Kept: the
    descriptions of parameters. Markup is taken off. A sentence has at least three words.
    """
    found = []
    for paragraph in _paragraphs(inspect.cleandoc(docstring).splitlines()):
        text = paragraph
        if _MARKED.search(text):
            for pattern, replacement in _MARKUP:
                text = pattern.sub(replacement, text)
        for sentence in split_sentences(_SPACES.sub(" ", text).strip()):
            if len(_WORD.findall(sentence)) >= 3 and not _CODE.search(sentence):
                found.append(sentence)
    return found


def _paragraphs(lines: list[str]) -> list[str]:
    """Runs of prose lines, joined; a blank line, a bullet or a parameter begins a new run."""
    found: list[str] = []
    current: list[str] = []

    def flush() -> None:
        if current:
            found.append(" ".join(current))
            current.clear()

    section, section_indent = "", 0
    skipped_section = doctest = fenced = False
    block: int | None = None  # left out: lines indented deeper than this
    for line, following in itertools.pairwise([*lines, ""]):
        text, indent = line.strip(), _indent(line)
        if text.startswith("```"):
            fenced = not fenced
            flush()
            continue
        if not text:
            doctest = False
            flush()
            continue
        doctest = doctest or text.startswith((">>>", "$ ", "In ["))
        block = block if block is not None and indent > block else None
        if fenced or doctest or block is not None:
            flush()
            continue
        title = text.rstrip(":").lower()
        underlined = len(text) < 80 and _UNDERLINE.fullmatch(following.strip()) is not None
        if underlined or (text.endswith(":") and title in _SECTIONS):
            flush()
            section, section_indent = title, indent
            skipped_section = underlined and title in _SKIPPED_SECTIONS
            if not underlined and title in _SKIPPED_SECTIONS:
                block = indent
            continue
        if skipped_section or _UNDERLINE.fullmatch(text) or _TABLE.search(text):
            flush()
            continue
        if prose := _PROSE_DIRECTIVE.match(text):
            flush()
            text = text[prose.end() :]
        elif text == ".." or _DIRECTIVE.match(text):
            flush()
            block = indent
            continue
        if start := _FIELD.match(text) or _BULLET.match(text):
            flush()
            text = text[start.end() :]
        elif section in _PARAMETER_SECTIONS:
            if indent > section_indent and (start := _GOOGLE_PARAMETER.match(text)):
                flush()
                text = text[start.end() :]
            elif indent == section_indent and (" : " in text or _indent(following) > indent):
                flush()
                continue
        if text.endswith("::"):
            text, block = text[:-1], indent
        if text:
            current.append(text)
        if block is not None:
            flush()
    flush()
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def notice(distributions: dict[str, importlib.metadata.Distribution]) -> str:
    """Names the releases that were read, with the licences they were published under."""
    parts = [
        "docstrings.parquet holds sentences from the docstrings of these releases; markup, code\n"
        "and tables were taken out (tools/docstring_snapshot.py). The sentences stay under the\n"
        "licences of their packages:\n"
    ]
    width = max(map(len, distributions))
    for package, found in distributions.items():
        parts.append(f"{package:{width}}  {found.name} {found.version}, {PACKAGES[package]}")
    parts.append("\nThe Apache License 2.0 is the one in the file LICENSE of jaxpfl.\n")
    for package, found in distributions.items():
        for text in _licence_texts(found, PACKAGES[package]):
            parts += [f"\n{'=' * 78}\n{found.name} {found.version}\n{'=' * 78}\n", text]
    return "\n".join(parts) + "\n"


def _licence_texts(found: importlib.metadata.Distribution, licence: str) -> Iterator[str]:
    """The package's own notice and, unless it is Apache's, licence; not those of bundled code."""
    wanted = r"NOTICE(\.\w+)?" if licence == "Apache-2.0" else r"(LICENSE|COPYING|NOTICE)(\.\w+)?"
    for file in sorted(found.files or ()):
        inside = str(file).partition(".dist-info/")[2].removeprefix("licenses/")
        if re.fullmatch(wanted, inside):
            text = Path(str(file.locate())).read_text(encoding="utf-8")
            # numpy's and scipy's wheels go on with those of the libraries in them.
            yield text.split("\n----\n")[0].strip()


def main() -> None:
    by_package = importlib.metadata.packages_distributions()
    missing = [package for package in PACKAGES if package not in by_package]
    if missing:
        sys.exit(f"install these packages first: {', '.join(missing)}")
    distributions = {
        package: importlib.metadata.distribution(by_package[package][0]) for package in PACKAGES
    }
    table = snapshot(PACKAGES)
    releases = {
        package: {"distribution": found.name, "version": found.version}
        for package, found in distributions.items()
    }
    table = table.replace_schema_metadata({"packages": json.dumps(releases)})
    parquet.write_table(
        table,
        FOLDER / "docstrings.parquet",
        compression="zstd",
        compression_level=22,
        use_dictionary=False,
        row_group_size=len(table),
        data_page_size=1 << 26,
    )
    (FOLDER / "docstrings.NOTICE.txt").write_text(notice(distributions), encoding="utf-8")
    size = (FOLDER / "docstrings.parquet").stat().st_size
    print(f"{len(table):,} clients of {len(PACKAGES)} packages, {size:,} bytes")


if __name__ == "__main__":
    main()
