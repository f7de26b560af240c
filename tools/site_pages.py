"""Writes the source of the documentation site, from which `make docs` builds it.

    python tools/site_pages.py build/site_pages

Its pages are those of `docs/` and some that are made here: the keys of configs, from their
dataclasses; the reference of the public Python names; the changes and how to contribute, which are
files beside `docs/`. Links of pages to files outside `docs/`, which a repository shows and the site
has not, become plain text.
"""

import ast
import dataclasses
import inspect
import re
import shutil
import sys
import types
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("data", "privacy", "federated", "models", "text", "algorithms")
# Files beside docs/ that the site shows, and the addresses that they have there.
BESIDE = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
_ROWS = re.compile(r"^<!-- rows\n.*?-->\n", re.M | re.S)
# Entries of "Attributes:" in a docstring: `name: text` or `one, other: text`, indented by two.
_ENTRY = re.compile(r"^  (\w+(?:, \w+)*): ", re.M)


def write(folder: Path) -> None:
    """Writes the source of the site: the pages of docs/ and those that are made here."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for path, text in pages().items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    for path in folder.rglob("*.md"):
        text = readable(path.read_text("utf-8"))
        path.write_text(_LINK.sub(partial(_on_the_site, path.relative_to(folder)), text), "utf-8")


def readable(text: str) -> str:
    """A page without the comments that name the rows of its figures (tools/figures.py)."""
    return _ROWS.sub("", text)


def _on_the_site(page: Path, link: re.Match[str]) -> str:
    """A link to a file that the site has not becomes plain text."""
    target = (ROOT / "docs" / page.parent / link[2]).resolve()
    if target.is_relative_to(ROOT / "docs") or not target.exists():
        return link[0]
    beside = BESIDE.get(target.relative_to(ROOT).as_posix())
    return f"[{link[1]}]({beside}{link[3] or ''})" if beside else link[1]


def pages() -> dict[str, str]:
    """The made pages: path on the site -> Markdown."""
    made = {"config_keys.md": config_keys(), "api/jaxpfl.md": reference("")}
    made |= {f"api/{module}.md": reference(module) for module in MODULES}
    for beside, path in BESIDE.items():
        text = (ROOT / beside).read_text("utf-8").replace("](docs/", "](")
        made[path] = re.sub(r"\[([^\]]+)\]\(README\.md[^)]*\)", r"\1", text)
    return made


def reference(module: str) -> str:
    """The page of the public names of `jaxpfl`, or of one of its modules. Each has one home."""
    dotted = f"jaxpfl.{module}" if module else "jaxpfl"
    summary, names = _public(module)
    lines = [f"# {dotted}", "", summary, ""]
    if not module:
        elsewhere = {home: each for each in MODULES for home in _public(each)[1].values()}
        lines += ["`import jaxpfl as jp` gives the modules and these names:", ""]
        lines += [f"- [jp.{each}]({each}.md)" for each in MODULES]
        for name, home in names.items():
            page = f"{elsewhere[home]}.md" if home in elsewhere else ""
            lines.append(f"- [jp.{name}]({page}#{home})")
        lines.append("")
        names = {name: home for name, home in names.items() if home not in elsewhere}
    for name, home in names.items():
        lines += [f"::: {home}", "    options:", f"      heading: {dotted}.{name}", ""]
    return "\n".join(lines)


def _public(module: str) -> tuple[str, dict[str, str]]:
    """What a module is, and its public names with the dotted names of their homes.

    As the syntax tree says, so that lazily loaded names are found, too.
    """
    tree = ast.parse((ROOT / "jaxpfl" / module / "__init__.py").read_text("utf-8"))
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxpfl.")
        for alias in node.names
    }
    ordered = dict(sorted(names.items(), key=lambda item: item[0].lower()))
    return (ast.get_docstring(tree) or "").splitlines()[0], ordered


def config_keys() -> str:
    """The page of all keys of all systems, with type, default and what the docstring says."""
    from jaxpfl.experiments import registry
    from jaxpfl.experiments.sweep.config import Sweep

    shared: dict[type, list[str]] = {}
    lines = [
        "# All keys of configs",
        "",
        "A config is a YAML file. Any key can be given on the command line, too: "
        "`--section.key VALUE`. A key without a default is required. Unknown keys and values of "
        "the wrong type are refused before anything is read.",
        "",
    ]
    for name in registry.SYSTEMS:
        kind = registry.system_of(name).part("config").Config
        lines += [f"## system: {name}", "", _prose(kind), ""]
        lines += _fields(kind, "", shared)
    lines += ["## Sections", ""]
    done: set[type] = set()
    while todo := [kind for kind in shared if kind not in done]:
        kind = todo[0]
        done.add(kind)
        body = _fields(kind, "", shared)
        keys = " or ".join(dict.fromkeys(shared[kind]))
        title = f"### {keys}: {kind.__name__} {{#{_anchor(kind)}}}"
        lines += [title, "", _prose(kind), "", *body]
    lines += ["## Sweeps", "", "A sweep is a file of its own, for `jaxpfl sweep`.", ""]
    lines += [inspect.getdoc(Sweep).partition("\nAttributes:")[0].strip(), ""]  # type: ignore[union-attr]
    return "\n".join(lines)


def _fields(kind: type, prefix: str, shared: dict[type, list[str]]) -> list[str]:
    """A definition list of a dataclass's fields; sections among them are added to `shared`."""
    hints = typing.get_type_hints(kind)
    documented = {name: text for base in reversed(kind.__mro__) for name, text in _entries(base)}
    lines: list[str] = []
    for each in dataclasses.fields(kind):
        if not each.init:
            continue
        hint = hints[each.name]
        sections = [member for member in _members(hint) if dataclasses.is_dataclass(member)]
        for section in sections:
            shared.setdefault(section, []).append(f"{prefix}{each.name}")
        lines += [
            f"`{prefix}{each.name}`",
            f":   {_type(hint)}{_default(each)}{_text(documented, each.name)}",
            "",
        ]
    return lines


def _entries(kind: type) -> Iterator[tuple[str, str]]:
    """What the docstring of a dataclass says of its fields."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    section = re.split(r"^\S", section, maxsplit=1, flags=re.M)[0]
    pieces = _ENTRY.split(section)
    for names, text in zip(pieces[1::2], pieces[2::2], strict=True):
        for name in names.split(", "):
            yield name, " ".join(text.split())


def _text(documented: dict[str, str], name: str) -> str:
    text = documented.get(name, "")
    return f"\n\n    {text[:1].upper()}{text[1:]}" if text else ""


def _prose(kind: type) -> str:
    """A docstring without its list of attributes."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return re.sub(r"\n(Attributes|Raises):\n(?:  .*\n?|\n)*", "\n", text).strip()


def _anchor(kind: type) -> str:
    """Two systems may have sections of one name."""
    return f"{kind.__module__}.{kind.__name__}".removeprefix("jaxpfl.")


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _type(hint: Any) -> str:
    """A type in the words of YAML."""
    members = _members(hint)
    if len(members) > 1:
        return " or ".join(_type(member) for member in members)
    if dataclasses.is_dataclass(hint):
        return f"[{hint.__name__}](#{_anchor(hint)})"
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        length = "" if inner[1:] == (...,) else f" of {len(inner)}"
        return f"list{length}, each: {_type(inner[0])}"
    if typing.get_origin(hint) is dict:
        return f"mapping of names to {_type(typing.get_args(hint)[1])}"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(hint, "null" if hint is type(None) else str(hint))


def _default(each: Any) -> str:
    from jaxpfl.errors import InputError

    value = each.default
    if each.default_factory is not dataclasses.MISSING:
        try:
            value = each.default_factory()
        except InputError:
            # A section whose own defaults do not fit together.
            return "; required"
    if value is dataclasses.MISSING:
        return "; required"
    if not dataclasses.is_dataclass(value):
        return f"; default `{_yaml(value)}`"
    # Of a section only what differs from its own defaults.
    own = {inner.name: getattr(value, inner.name) for inner in dataclasses.fields(value)}
    changed = [
        f"{inner.name}: {_yaml(own[inner.name])}"
        for inner in dataclasses.fields(value)
        if inner.default_factory is dataclasses.MISSING and own[inner.name] != inner.default
    ]
    return f"; default `{{{', '.join(changed)}}}`" if changed else "; optional"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if value != "" else '""'


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write(Path(sys.argv[1]))
