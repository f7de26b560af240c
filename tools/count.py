"""Counts lines, names and definitions of the repository's Python, and lines of its other files.

    python tools/count.py           a table of each folder: physical lines, code, docstrings, blanks
    python tools/count.py names     how often a name that says nothing is assigned, by folder
    python tools/count.py names -v  the same by file
    python tools/count.py calls     the modules that define a function of a common name

Code is what is neither blank, nor a comment of its own line, nor the docstring of a module, a class
or a function; that of an attribute counts as code. `tools/architecture.py` holds the limits.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TREES = ("jaxpfl", "tests", "benchmarks", "tools")
"""The trees of Python that have limits."""

OTHERS = ("*.pyi", "*.yaml", "*.html", "*.css", "*.js", "*.jinja", "*.json")
SAY_NOTHING = ("found", "each", "known", "held", "asked", "kept", "told")
COMMON = ("run", "check", "load", "described")


class Lines(NamedTuple):
    """Of one file or of many."""

    files: int = 0
    physical: int = 0
    code: int = 0
    docstring: int = 0
    comment: int = 0
    blank: int = 0


def count(source: str) -> Lines:
    """Counts the lines of one Python file."""
    lines = source.splitlines()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Module(body=body) | ast.ClassDef(body=body) | ast.FunctionDef(body=body):
                match body[:1]:
                    case [ast.Expr(ast.Constant(str())) as first]:
                        documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    blanks = {at for at, line in enumerate(lines, 1) if not line.strip()}
    comments = {at for at, line in enumerate(lines, 1) if line.strip().startswith("#")} - documented
    documented -= blanks
    code = len(lines) - len(documented) - len(comments) - len(blanks)
    return Lines(1, len(lines), code, len(documented), len(comments), len(blanks))


def python_files(tree: str, root: Path = ROOT) -> list[Path]:
    return sorted((root / tree).rglob("*.py"))


def by_folder(tree: str, root: Path = ROOT) -> dict[str, Lines]:
    """The lines of each folder directly below a tree, and of the whole tree under its own name."""
    counts: defaultdict[str, Lines] = defaultdict(Lines)
    for path in python_files(tree, root):
        lines = count(path.read_text(encoding="utf-8"))
        folder = path.parent.relative_to(root).parts[:2]
        for key in {"/".join(folder) if len(folder) > 1 else f"{tree}/*", tree}:
            counts[key] = Lines(*map(sum, zip(counts[key], lines, strict=True)))
    return dict(counts)


def sizes(tree: str, root: Path) -> tuple[int, int]:
    """Physical lines and lines of code of a tree."""
    lines = by_folder(tree, root).get(tree, Lines())
    return lines.physical, lines.code


def assigned(source: str) -> Counter[str]:
    """How often each name is a target: of assignments, tuples, loops, comprehensions, `with`."""
    tree = ast.parse(source)
    return Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def defining(names: Sequence[str]) -> dict[str, list[str]]:
    """The modules of the package with a function or method of each name."""
    modules: dict[str, list[str]] = {name: [] for name in names}
    for path in python_files("jaxpfl"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = (n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
        for name in set(functions) & set(names):
            modules[name].append(str(path.relative_to(ROOT)))
    return modules


def _rows(title: str, rows: Iterator[tuple[str, Sequence[int]]], columns: Sequence[str]) -> None:
    print(f"{title:36}" + "".join(f"{column:>11}" for column in columns))
    for name, numbers in rows:
        print(f"{name:36}" + "".join(f"{number:>11,}" for number in numbers))
    print()


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["calls"]:
        for name, modules in defining(COMMON).items():
            print(f"{name}: {len(modules)}: " + ", ".join(modules))
        return 0
    if arguments[:1] == ["names"]:
        totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for path in python_files("jaxpfl"):
            parts = path.relative_to(ROOT).parts
            targets = assigned(path.read_text(encoding="utf-8"))
            for key in ("/".join(parts if "-v" in arguments else parts[:2]), "jaxpfl"):
                totals[key].update({name: targets[name] for name in SAY_NOTHING})
        rows = ((key, [*(c[n] for n in SAY_NOTHING), c.total()]) for key, c in totals.items())
        _rows("names", iter(sorted(row for row in rows if row[1][-1])), (*SAY_NOTHING, "all"))
        return 0
    for tree in TREES:
        _rows(tree, iter(sorted(by_folder(tree).items())), Lines._fields)
    for kind in OTHERS:
        paths = [path for tree in (*TREES, "configs") for path in (ROOT / tree).rglob(kind)]
        print(f"{kind}: {sum(len(path.read_text().splitlines()) for path in paths)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
