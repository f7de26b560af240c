"""Files of public counts, in every form that they are published in."""

import io
import tarfile

import pytest

from jaxpfl import checks
from jaxpfl.data.readers.plain_text import read_counts
from jaxpfl.errors import CorruptFile, InputError
from tests.refusals import refusal

WORDS = {"the": 90, "jquery-1.9": 70, "{": 70, ",": 5, "ünï": 1}


def archived(path, *contents: str) -> None:
    with tarfile.open(path, "w:bz2") as archive:
        for number, content in enumerate(contents):
            entry = tarfile.TarInfo(f"x{number}")
            entry.size = len(content.encode())
            archive.addfile(entry, io.BytesIO(content.encode()))


def test_all_forms_give_the_same_counts_most_frequent_first(tmp_path):
    shuffled = dict(sorted(WORDS.items()))
    lines = "".join(f"{word}\t{count}\n" for word, count in shuffled.items())
    (tmp_path / "words.txt").write_text(lines)
    (tmp_path / "a.word_count").write_text(lines.replace("\t", " "), newline="\r\n")
    archived(tmp_path / "stackoverflow.word_count.tar.bz2", lines)
    for path in tmp_path.iterdir():
        found = read_counts(path)
        assert found == WORDS, path.name
        # "jquery-1.9" comes before "{" in every file.
        assert list(found) == ["the", "jquery-1.9", "{", ",", "ünï"], path.name


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("the 5\nof\n", "line 2"),
        ("the 5\nof -1\n", "line 2"),
        ("the 5\nof 2.5\n", "line 2"),
        ("the 5\nof 2 1\n", "line 2"),
        ("the 5\nthe 3\n", "line 2"),
        (f"the {2**63}\n", "line 1"),
        ("\n", "no counts"),
    ],
)
def test_anything_else_is_refused_with_its_place(tmp_path, content, place):
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=f"a.txt.*{place}"):
        read_counts(path)


def test_counts_that_exceed_the_memory_are_not_read(tmp_path, monkeypatch):
    """TRUST 39: 32 MiB of memory; a kilobyte of .tar.bz2 may hold a gigabyte."""
    monkeypatch.setattr(checks, "machine_memory", lambda: 2**25)
    content = "the 5\n" + "\n" * 10**6
    archived(tmp_path / "a.tar.bz2", content)
    (tmp_path / "a.txt").write_text(content)
    for path in tmp_path.iterdir():
        with pytest.raises(InputError, match=f"{path.name}: its counts, in memory, would take"):
            read_counts(path)


def test_damaged_archives_and_missing_files_are_refused(tmp_path):
    whole = tmp_path / "x.tar.bz2"
    archived(whole, "the 5\n" * 2000)
    cut = tmp_path / "cut.tar.bz2"
    cut.write_bytes(whole.read_bytes()[:-20])
    (tmp_path / "no.tar.bz2").write_text("the 5\n")
    for name in ("cut.tar.bz2", "no.tar.bz2"):
        with pytest.raises(CorruptFile, match=name):
            read_counts(tmp_path / name)
    archived(tmp_path / "two.tar.bz2", "the 5", "a 3")
    refusal(lambda: read_counts(tmp_path / "two.tar.bz2"), "must hold one file of counts, found 2")
    refusal(lambda: read_counts(tmp_path / "missing.json"), "no such file")
    (tmp_path / "latin.txt").write_bytes(b"the 5\n\xe4 3\n")
    refusal(lambda: read_counts(tmp_path / "latin.txt"), "byte 7")
