"""JSON lines: what is read, and what is refused with file and row."""

import gzip
import json

import numpy as np
import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.readers import json_files
from jaxpfl.errors import CorruptFile, InputError

SECRET = "canary-7f3"


def row(client, text, **more) -> bytes:
    return json.dumps({"client": client, "text": text, **more}).encode() + b"\n"


def read(path, **options):
    """The population of a file."""
    values = {k: ",".join(v) if isinstance(v, tuple) else v for k, v in options.items()}
    query = "&".join(f"{name}={value}" for name, value in values.items())
    return open_population(f"{path}?{query}" if query else str(path))


@pytest.fixture
def written(tmp_path):
    def write(*lines: bytes):
        path = tmp_path / "messages.jsonl"
        path.write_bytes(b"".join(lines))
        return path

    return write


def test_lines_become_clients_in_order_of_first_appearance(written):
    path = written(row("b", "one"), row("a", "two"), row("b", "three"))
    population = read(path)
    assert population.client_ids.to_pylist() == ["b", "a"]
    assert population.columns["text"].to_pylist() == ["one", "three", "two"]
    assert population.unit == 'all rows with one value of "client"'


def test_scattered_lines_of_one_id_are_one_client(written):
    """TRUST 5: the same population as if they stood together, and no id twice."""
    lines = [row(f"client {i % 7}", f"text {i}") for i in range(100)]
    together = sorted(range(100), key=lambda i: i % 7)
    scattered = read(written(*lines))
    assert len(scattered) == 7
    assert read(written(*[lines[i] for i in together])).fingerprint == scattered.fingerprint


def test_compressed_file_reads_the_same(written, tmp_path):
    path = written(*[row(f"c{i % 5}", f"text {i}") for i in range(50)])
    packed = tmp_path / "messages.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed).fingerprint == read(path).fingerprint


def test_more_rows_than_a_block(written, monkeypatch):
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", 100)
    population = read(written(*[row(i % 3, f"text {i}") for i in range(40)]))
    assert population.examples(1)["text"].to_pylist() == [f"text {i}" for i in range(1, 40, 3)]


def test_other_fields_are_read_when_asked_for(written):
    path = written(
        row("a", "x", year=2010, score=1, spam=True, lang="en"),
        row("a", "y", year=2011, score=0.5, spam=False, lang="de"),
    )
    population = read(path, columns=("year", "score", "spam", "lang"))
    columns = population.columns
    assert list(columns) == ["text", "year", "score", "spam", "lang"]
    assert columns["year"].dtype == np.int64
    np.testing.assert_array_equal(columns["score"], [1.0, 0.5])
    np.testing.assert_array_equal(columns["spam"], [True, False])
    assert columns["lang"].to_pylist() == ["en", "de"]


def test_split_makes_an_example_of_every_sentence(written, monkeypatch):
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", 20)
    path = written(
        row("a", "One. Two e.g. this.\n\nThree\nlines.", year=1),
        row("b", " ...", year=2),
        row("a", "Four! Five?", year=3),
    )
    population = read(path, columns=("year",), split="sentences")
    assert population.client_ids.to_pylist() == ["a", "b"]
    assert population.examples(0)["text"].to_pylist() == [
        "One.",
        "Two e.g. this.",
        "Three lines.",
        "Four!",
        "Five?",
    ]
    assert population.columns["year"].tolist() == [1, 1, 1, 3, 3]
    assert population.sizes().tolist() == [5, 0]
    lines = read(path, split="lines").examples(0)["text"].to_pylist()
    assert lines == ["One. Two e.g. this.", "Three", "lines.", "Four! Five?"]
    assert open_population(f"{path}?split=sentences&min_examples=5").sizes().tolist() == [5, 0]
    with pytest.raises(InputError, match="split must be one of"):
        read(path, split="words")


def test_split_checks_the_rows_without_sentences_too(written):
    """TRUST 7."""
    path = written(row("a", "One.", year=1), row("a", "", year="canary-7f3"))
    with pytest.raises(InputError, match="row 2: field 'year' must be a number"):
        read(path, columns=("year",), split="sentences")
    with pytest.raises(InputError, match="has no examples"):
        read(written(row("a", "...")), split="sentences")


def test_whole_numbers_are_client_ids(written):
    path = written(b'{"id": 12, "body": "x"}\n', b'{"id": "12", "body": "y"}\n')
    population = read(path, client="id", text="body")
    assert population.client_ids.to_pylist() == ["12"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"client": "a", "text": "canary-7f3"\n', "not valid JSON"),
        (b'{"client": "a", "text": "canary-7f3', "the file may be truncated"),
        (b'["a", "canary-7f3"]\n', "expected a JSON object, found list"),
        (b'{"text": "canary-7f3"}\n', "'client' must be .*, found no such field"),
        (b'{"client": "canary-7f3"}\n', "'text' must be a string, found no such field"),
        (b'{"client": "canary-7f3", "text": 7}\n', "'text' must be a string, found int"),
        (b'{"client": "canary-7f3", "text": null}\n', "found no value"),
        (b'{"client": "", "text": "canary-7f3"}\n', "'client' must be a non-empty string"),
        (b'{"client": 1.5, "text": "canary-7f3"}\n', "'client' .* found float"),
        (b'{"client": true, "text": "canary-7f3"}\n', "'client' .* found bool"),
        (b'{"client": "a", "text": "canary-7f3", "z": NaN}\n', "without NaN"),
        (b'{"client": "a", "text": "canary-7f3", "z": ' + b"[" * 100_000, "nesting"),
        (b'{"client": "a", "text": "canary-7f3 \xff"}\n', "byte .* is not valid UTF-8"),
        ('{"client": "a", "text": "canary-7f3"}\n'.encode("utf-16"), "not valid UTF-8"),
        (b'{"client": "a", "text": "canary-7f3 \xed\xa0\x80"}\n', "not valid UTF-8"),
    ],
)
def test_bad_row_is_refused_by_file_and_row(written, line, expected):
    """TRUST 6, 7, 8: and no value of a client is in the message."""
    path = written(row("a", "fine"), b"\n", line)
    with pytest.raises(InputError, match=expected) as error:
        read(path)
    assert f"{path}, row 3" in str(error.value)
    assert SECRET not in str(error.value)
    assert error.value.__context__ is None or error.value.__suppress_context__


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, "canary-7f3", "a number, found str"),
        ("canary-7f3", 1, "a string, found int"),
        (True, 1, "a boolean, found int"),
        ([1], 1, "a list of numbers as long as the first row's, found int"),
        ([1], [1, 2], "a list of numbers as long as the first row's, found list"),
        ({"k": 1}, 1, "a string, boolean or number, or a list of numbers, found dict"),
        (2**63, 1, "at most 64 bits"),
    ],
)
def test_a_column_of_two_kinds_is_refused(written, first, second, expected):
    """TRUST 7."""
    path = written(row("a", "x", z=first), row("a", "y", z=second))
    with pytest.raises(InputError, match=expected) as error:
        read(path, columns=("z",))
    assert SECRET not in str(error.value)


def test_a_number_of_thousands_of_digits_is_refused(written):
    line = b'{"client": "a", "text": "x", "z": ' + b"9" * 5_000 + b"}\n"
    with pytest.raises(InputError, match="row 2: expected JSON without .* digits"):
        read(written(row("a", "x", z=1), line), columns=("z",))


def test_every_truncation_of_gzip_is_refused(tmp_path):
    """TRUST 6."""
    content = gzip.compress(b"".join(row(f"c{i}", f"text {i * i}") for i in range(200)))
    path = tmp_path / "cut.jsonl.gz"
    for length in [*range(1, 40), *range(40, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CorruptFile, match=r"cut\.jsonl\.gz is .* after row"):
            read(path)


def test_every_flipped_bit_of_gzip_is_refused(tmp_path):
    """TRUST 6: gzip's checksum is verified before anything is returned."""
    content = gzip.compress(b"".join(row(f"c{i}", f"text {i * i}") for i in range(200)))
    path = tmp_path / "altered.jsonl.gz"
    # The first ten bytes hold a time stamp and flags that change nothing in the data.
    for position in range(10, len(content), 23):
        changed = bytearray(content)
        changed[position] ^= 4
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"altered\.jsonl\.gz"):
            read(path)


def test_policy_for_unusual_text(written):
    """TRUST 8: NUL, emoji, joiners, empty text and 1 MB stay; lone surrogates are replaced."""
    texts = ["a\0b", "👩‍🚀 e\u0301", "", "x" * 2**20, "  "]
    lines = [row("a", text) for text in texts] + [b'{"client": "a", "text": "l\\ud83d r"}\n']
    population = read(written(*lines))
    assert population.columns["text"].to_pylist() == [*texts, "l\ufffd r"]


def test_blank_lines_crlf_and_byte_order_mark_are_skipped(written):
    """TRUST 8."""
    lines = b"".join([row("a", "x"), b" \t\n", row("b", "y")]).replace(b"\n", b"\r\n")
    population = read(written(b"\xef\xbb\xbf", lines, b"\r\n"))
    assert population.columns["text"].to_pylist() == ["x", "y"]


def test_last_line_needs_no_line_end(written):
    assert read(written(row("a", "x"), row("b", "y").rstrip())).num_examples == 2


def test_overlong_line_is_refused(written, monkeypatch):
    """TRUST 8: memory is bounded by a stated cap."""
    monkeypatch.setattr(json_files, "MAX_LINE_BYTES", 100)
    assert len(read(written(row("a", "x" * 60)))) == 1
    with pytest.raises(InputError, match="row 2: longer than the 100 bytes"):
        read(written(row("a", "x"), row("a", "x" * 100)))


def test_file_without_examples_is_refused(written):
    with pytest.raises(InputError, match="has no examples"):
        read(written(b"\n\n"))


def test_one_field_cannot_have_two_roles(written):
    with pytest.raises(InputError, match="must be different"):
        read(written(row("a", "x")), columns=("text",))


def test_irc_is_read_as_its_readme_says(data_folder, monkeypatch):
    monkeypatch.setenv("JAXPFL_DATA", str(data_folder))
    source = "$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz"
    population = open_population(source)
    assert (len(population), population.num_examples) == (17_513, 216_239)
    assert population.sizes().max() == 2_377
    assert np.sum(population.with_min_examples(5).sizes() > 0) == 8_356
    assert population.name == source
