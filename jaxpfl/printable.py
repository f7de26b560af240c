"""Text that others wrote, such as names in a file, before it is shown.

A terminal acts upon control characters, and a reader is misled by those that hide, reorder or add
lines. All text that a command prints or a page shows passes through `printable`.
"""

import functools
import re
from collections.abc import Mapping
from html import escape
from typing import Any

# Control characters, marks of direction, invisible characters, line separators and surrogates; not
# the joiners that scripts and emoji need.
_HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)

_LONGEST = 400


def printable(text: str, allowed: str = "") -> str:
    r"""Returns `text` with the escape, such as \x1b, of each character that is not seen as itself.

    Characters that are `allowed` stay, such as line ends in a text of several lines.
    """

    def shown(match: re.Match[str]) -> str:
        escaped = match[0].encode("unicode_escape", "surrogatepass").decode("ascii")
        return match[0] if match[0] in allowed else escaped

    return _HIDDEN.sub(shown, text)


def in_one_line(text: str) -> str:
    """Returns a text as one line, cut after 400 characters, for a terminal."""
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


@functools.cache
def template(package: str, name: str) -> Any:
    """A template of Jinja among the files of a package; HTML is escaped in one of .html.

    Texts that are put in are printable; `Markup`, which is ours, stays.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        finalize=lambda value: printable(value, "\n\t") if type(value) is str else value,
        loader=PackageLoader(package, ""),
        autoescape=".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # YAML reads JSON's escapes of two halves as two characters, which are none.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.get_template(name)


def facts(title: str, values: Mapping[str, object]) -> str:
    """HTML of the facts that are known. None may be private, because notebooks are passed on."""
    cell = "<td style='text-align: left; vertical-align: top; white-space: pre-wrap'>"
    texts = {name: str(value) for name, value in values.items() if value not in (None, "")}
    rows = (f"<tr>{cell}{escape(n)}</td>{cell}{escape(x)}</td></tr>" for n, x in texts.items())
    return f"<b>{escape(title)}</b><table>{''.join(rows)}</table>"
