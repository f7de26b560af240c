"""Plain sentences of a docstring: what is left without code, tables, markup and headings."""

import inspect
import itertools
import re

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
# A full stop ends a sentence before a capital, a digit, a quote or an opening bracket ...
_END = re.compile(r"(?<=[.!?])[)\"'”]*\s+(?=[\"'“(\[]?[A-Z0-9_])")
# ... but not after these.
_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:e\.g|i\.e|etc|vs|cf|al|fig|eq|eqs|eqn|no|ref|refs|sec|resp|approx|dr|prof|p|pp"
    r"|vol|ed|mr|mrs|ms|messrs|mme|st|jr|sr|gen|col|capt|hon|rev|[A-Z])\.$",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_CODE = re.compile(r">>>|[{}=<>|\\]{2}|\w\(.*\(|[=<>]=?\s*\S+\s*[=<>]|\0|^\W*$|\.\.\.\s")


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


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph without line breaks, in order, without the space between them.

    A sentence ends at a full stop, question or exclamation mark before a capital, a digit, a quote
    or an opening bracket, but not after common abbreviations and single letters. The rules are
    those of English.
    """
    pieces, start = [], 0
    for match in _END.finditer(text):
        before = text[start : match.start()]
        if not _ABBREVIATION.search(before[-12:]):
            pieces.append(text[start : match.end()].strip())
            start = match.end()
    pieces.append(text[start:].strip())
    return pieces


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
