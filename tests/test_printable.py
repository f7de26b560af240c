"""What commands print of others' text can neither act upon a terminal nor mislead a reader."""

import re
import unicodedata

import pytest
import yaml

from jaxpfl.cli import main
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Table, text_lines
from jaxpfl.printable import printable, template


def test_every_control_character_is_escaped_and_writing_is_not():
    """Of all characters of Unicode: those that control, separate lines or are surrogates."""
    hidden = {"Cc", "Cs", "Zl", "Zp"}
    for code in range(0x110000):
        character = chr(code)
        if unicodedata.category(character) in hidden:
            assert printable(character).isascii() and printable(character).isprintable(), hex(code)
    # Marks of direction and invisible ones.
    for character in "\u200e\u200f\u202a\u202e\u2066\u2069\u200b\ufeff\u061c\U000e0041":
        assert printable(f"a{character}b") == f"a{ascii(character)[1:-1]}b"
    for written in (
        "naïve 日本語",
        "\u05e9\u05dc\u05d5\u05dd",
        "\u0646\u200c\u0645",
        "👨‍👩‍👧",
        "x\u0301",
    ):
        assert printable(written) == written
    assert printable("a\nb\tc", allowed="\n") == "a\nb\\tc"


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "x\x1b[2K\r.json"],
        ["budget", "x\x1b[2K\r.jsonl", "--delta", "1e-5"],
        ["report", "x\x1b[2K\r"],
        ["resume", "x\x1b[2K\r"],
        ["run", "x\x1b[2K\r.yaml"],
        ["compare", "x\x1b[2K\r", "y"],
        ["convert", "x\x1b[2K\r.csv", "out"],
        ["x\x1b[2K\r"],
    ],
    ids=lambda arguments: arguments[0][:7],
)
def test_a_name_with_an_escape_is_printed_as_its_escape(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert re.search(r"x\\(x|u00)1b\[2K\\r", said) and not {*"\x1b\r"} & {*said}


def test_a_table_has_as_many_lines_as_rows():
    table = Table(("name\n", "x"), [("a\nb\x1b[8m", "1"), ("c" * 10_000, "2")], (1,))
    lines = text_lines(table)
    assert len(lines) == 3 and max(map(len, lines)) < 1000
    assert all(line.isprintable() for line in lines)


def test_yaml_reads_every_character_of_what_is_put_in():
    page = template("jaxpfl.experiments", "deployment.yaml.jinja")
    text = page.environment.from_string("text: {{ text | tojson }}").render(text="é <b> 😀: 'x'")
    assert yaml.safe_load(text) == {"text": "é <b> 😀: 'x'"}


def test_a_page_holds_no_control_characters(tmp_path):
    """Whatever is put into a template passes through `printable`, and HTML is escaped."""
    found = template("jaxpfl.experiments.report", "page.html.jinja")
    made = found.environment.from_string("{{ a }} {{ b }} {{ c }}")
    assert made.render(a="\x1b[8m<b>\n", b=7, c="\u202e") == "\\x1b[8m&lt;b&gt;\n 7 \\u202e"


def test_a_name_in_a_picture_is_no_formula():
    """Of which matplotlib would make a picture, or an error that ends the command."""
    words = "$\\frac{$ \x1b[2K"
    panel = plots.axes(words, words)
    plots.labelled(panel, words, words)
    panel.plot([1, 2], label=words)
    panel.legend()
    with pytest.raises(ValueError, match="frac"):
        panel.figure.draw_without_rendering()
    plots.plain(panel.figure).draw_without_rendering()
    bars = [{"candidate": words, "distance": 1.0, "corrected": 0.5, "low": 0.1, "high": 2.0}]
    plots.plain(plots.bars(bars, "")).draw_without_rendering()
