"""The table of facts that a notebook shows for an object, in the notebook's own colours."""

from collections.abc import Mapping
from html import escape


def facts(title: str, values: Mapping[str, object]) -> str:
    """HTML of the facts that are known. None may be private, because notebooks are passed on."""
    cell = "<td style='text-align: left; vertical-align: top; white-space: pre-wrap'>"
    rows = "".join(
        f"<tr>{cell}{escape(name)}</td>{cell}{escape(str(value))}</td></tr>"
        for name, value in values.items()
        if value not in (None, "")
    )
    return f"<b>{escape(title)}</b><table>{rows}</table>"
