"""Plain text and archives of it: what is read, and what is refused with file and place."""

import contextlib
import gzip
import io
import lzma
import tarfile

import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.readers import compressed
from jaxpfl.data.readers.plain_text import read_plain_text
from jaxpfl.errors import CorruptFile, InputError
from tests.data.traces import no_trace
from tests.refusals import refusal

TEXT = b"\xef\xbb\xbfOne line\r\nof two. And more.\r\n\r\nThe \xc3\xa9nd\0."
SECRET = "canary-7f3"


def member(name: str, content: bytes = b"", **fields) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


GOOD = tar(
    member("books", type=tarfile.DIRTYPE),
    member("books/b.txt", b"One. Two.\n\nThree."),
    member("README.md", b"\xff is not read"),
    member("books/._b.txt", b"\xff is not read"),
    member("./a.txt", b"Four"),
    member("empty.txt"),
)


@pytest.fixture
def written(tmp_path):
    def write(name: str, content: bytes):
        path = tmp_path / name
        if name.endswith(".gz"):
            content = gzip.compress(content)
        if name.endswith(".xz"):
            content = lzma.compress(content)
        path.write_bytes(content)
        return path

    return write


def read(path, **options):
    population = read_plain_text(path, **options)
    return {
        client: population.examples(index)["text"].to_pylist()
        for index, client in enumerate(population.client_ids.to_pylist())
    }


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_file_is_a_client_and_a_paragraph_an_example(written, name):
    path = written(name, TEXT)
    assert read(path) == {"a.txt": ["One line of two. And more.", "The énd\0."]}
    assert read(path, split="lines") == {"a.txt": ["One line", "of two. And more.", "The énd\0."]}
    assert read_plain_text(path).unit == "text file"


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tar.xz"])
def test_an_archive_is_a_client_per_text_file(written, name):
    path = written(name, GOOD)
    expected = {"books/b.txt": ["One. Two.", "Three."], "a.txt": ["Four"], "empty.txt": []}
    assert read(path) == expected
    assert read(path, split="sentences")["books/b.txt"] == ["One.", "Two.", "Three."]
    other = written(name, tar(member("a.txt", "né".encode("latin-1")), member("b.txt", b"on")))
    assert read(other, encoding="latin-1") == {"a.txt": ["né"], "b.txt": ["on"]}


def test_sources(written):
    path = written("x.tar.xz", GOOD)
    assert open_population(path).num_examples == 3
    # Nothing is unpacked.
    assert list(path.parent.iterdir()) == [path]
    assert open_population(f"{written('a.txt', TEXT)}?split=lines").num_examples == 3


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([member("l.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd")], "found a link"),
        ([member("l", type=tarfile.LNKTYPE, linkname="a.txt")], "found a link"),
        ([member("d.txt", type=tarfile.CHRTYPE)], "found a link, device"),
        ([member("/canary-7f3.txt", b"x")], "must be relative"),
        ([member("a/../../canary-7f3.txt", b"x")], "must be relative"),
        ([member("..\\canary-7f3.txt", b"x")], "must be relative"),
        ([member("../canary-7f3", type=tarfile.DIRTYPE)], "must be relative"),
        ([member("canary-7f3.txt", b"x"), member("./canary-7f3.txt", b"y")], "occurs twice"),
        ([member("a.txt", b"canary-7f3 \xff")], "byte 12 is not valid UTF-8"),
        ([member("a\udcff.txt", b"x")], "its name is not valid UTF-8"),
    ],
)
def test_hostile_archives_are_refused(written, members, expected):
    """TRUST 8: by the member's number, and without what is in it."""
    content = tar(member("first.txt", b"fine"), *members, form=tarfile.GNU_FORMAT)
    path = written("x.tar.gz", content)
    with pytest.raises(InputError, match=expected) as error:
        read_plain_text(path)
    assert f"{path}, member {1 + len(members)}" in str(error.value)
    no_trace(error.value, SECRET)


def test_limits_are_kept(written, monkeypatch):
    """TRUST 8: memory and time are bounded by stated caps, whatever a header says."""
    two = written("x.tar.xz", tar(member("a.txt", b"x" * 600), member("b.txt", b"y" * 600)))
    for limit, value, expected in (
        ("MAX_FILE_BYTES", 599, "member 1: longer than the 599 bytes"),
        ("MAX_ARCHIVE_BYTES", 1199, "member 2: the archive is larger"),
        ("MAX_MEMBERS", 1, "member 2: the archive is larger"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(compressed, limit, value)
            with pytest.raises(InputError, match=expected):
                read_plain_text(two)
    monkeypatch.setattr(compressed, "MAX_AT_ONCE", 10)
    text = written("a.txt", b"0123456789\n0123456789\n")
    refusal(lambda: read_plain_text(text), "a.txt, line 1: longer than the 10 bytes")
    monkeypatch.setattr(compressed, "MAX_AT_ONCE", 11)
    assert read(text, split="lines") == {"a.txt": ["0123456789"] * 2}
    monkeypatch.setattr(compressed, "MAX_FILE_BYTES", 21)
    refusal(lambda: read_plain_text(text), "longer than the 21 bytes of a file")
    accents = written("b.txt", "éééé\néééé\néééé\n".encode())
    refusal(lambda: read_plain_text(accents), "longer than the 21 bytes of a file")


def _header(**fields: bytes) -> bytes:
    """A header of 512 bytes with other bytes in some of its fields, and the sum of them right."""
    header = bytearray(tarfile.TarInfo("a.txt").tobuf(tarfile.USTAR_FORMAT)[:512])
    for field, value in fields.items():
        start = {"size": 124, "type": 156}[field]
        header[start : start + len(value)] = value
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


HOSTILE = [
    *(
        (_header(size=b"%011o\0" % (2**33 - 1), type=kind), "not valid|truncated|longer than")
        for kind in (b"x", b"L", b"0")
    ),
    # tarfile would go back by it, and so for ever.
    (
        _header(size=b"\xff" * 10 + (-1_024).to_bytes(2, "big", signed=True)),
        "member 1: its size is negative",
    ),
    (_header(type=b"S"), "member 1: expected a plain file .* sparse file"),
]


@pytest.mark.parametrize(("header", "message"), HOSTILE)
def test_hostile_headers_are_refused(written, header, message):
    with pytest.raises(InputError, match=message):
        read_plain_text(written("x.tar.gz", header + bytes(10_240)))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_is_read_and_no_header_beyond_the_cap(written, monkeypatch, form):
    name = "é/" + "x" * 2_000 + ".txt"
    path = written("x.tar.gz", tar(member(name, b"text"), form=form))
    assert read(path) == {name: ["text"]}
    monkeypatch.setattr(compressed, "MAX_AT_ONCE", 1_024)
    refusal(lambda: read_plain_text(path), "not valid", CorruptFile)


def test_bytes_that_are_not_utf8_and_files_without_examples_are_refused(written):
    """TRUST 8."""
    with pytest.raises(InputError, match=r"a\.txt\.gz, line 2: byte 2 is not valid UTF-8") as error:
        read_plain_text(written("a.txt.gz", b"canary-7f3\nx\xffcanary-7f3"))
    no_trace(error.value, SECRET)
    archive = tar(member("empty.txt"), member("README", b"x"))
    for name, content in (("a.txt", b" \n\n"), ("a.tar.xz", archive)):
        with pytest.raises(InputError, match="has no examples"):
            read_plain_text(written(name, content))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.tar.gz", "a.tar.xz"])
def test_every_truncation_and_every_flipped_bit_is_refused(written, name):
    """TRUST 6: checksums are verified before anything is returned."""
    text = b"\n\n".join(b"Number %d" % (i * i) for i in range(200))
    content = tar(member("a.txt", text), member("b.txt", text)) if ".tar" in name else text
    path = written(name, content)
    whole = path.read_bytes()
    damaged = [whole[:n] for n in (*range(40), *range(40, len(whole), 37), len(whole) - 1)]
    # gzip's first ten bytes hold a time stamp and flags that change nothing in the data.
    for position in range(10, len(whole), 23):
        changed = bytearray(whole)
        changed[position] ^= 4
        damaged.append(bytes(changed))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(InputError, match="is truncated|not valid|no examples"):
            read_plain_text(path)


def test_a_tar_that_is_cut_or_altered_inside_is_refused(written):
    """TRUST 6: compressed again after the damage, so that no checksum tells."""
    whole = tar(member("a.txt", b"x" * 700), member("b.txt", b"y" * 100), form=tarfile.USTAR_FORMAT)
    end = 512 + 1024 + 512 + 512
    for length in [*range(0, end + 1, 128), end + 100]:
        with pytest.raises(CorruptFile, match="truncated|not valid"):
            read_plain_text(written("x.tar.gz", whole[:length]))
    # The second header; tarfile alone would take it for the end.
    altered = bytearray(whole)
    altered[1536 + 150] ^= 1
    with pytest.raises(CorruptFile, match="truncated or altered"):
        read_plain_text(written("x.tar.gz", bytes(altered)))
    with pytest.raises(CorruptFile, match="truncated or altered"):
        read_plain_text(written("x.tar.gz", whole + b"more"))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_no_altered_archive_raises_anything_else(written, form):
    """A hostile header ends in an InputError or in text, never in another error or for ever."""
    whole = tar(member("é" * 101 + ".txt", b"some text"), member("b.txt", b"more"), form=form)
    for position in range(0, 3_072, 13):
        for change in (0x80, 0x01):
            altered = bytearray(whole)
            altered[position] ^= change
            start = position - position % 512
            if altered[start + 257 : start + 262] == b"ustar":
                altered[start + 148 : start + 156] = b"        "
                total = sum(altered[start : start + 512])
                altered[start + 148 : start + 156] = b"%06o\0 " % total
            with contextlib.suppress(InputError):
                read_plain_text(written("x.tar.gz", bytes(altered)))


@pytest.mark.long
def test_novels_are_read_as_their_readme_says(data_folder):
    population = open_population(data_folder / "public_novels" / "novels.tar.xz")
    assert len(population) == 93
    words = sum(text.count(" ") + 1 for text in population.columns["text"].to_pylist())
    assert words == pytest.approx(13_359_175, rel=0.001)
