"""The sealed file: what was written whole is kept whole, or the file is refused."""

import json
import os

import pytest

from jaxpfl.errors import CorruptFile
from jaxpfl.privacy import chain
from jaxpfl.privacy.chain import Chain
from tests.privacy.ledgers import synced
from tests.refusals import refusal

LINES = [{"a": 1, "z": "é\n"}, {"kept": [1, 2.5, None]}, {"b": {"c": "d"}}, {"last": "x" * 40}]


def filled(path, lines=LINES) -> bytes:
    """A closed chain; its bytes."""
    written = Chain(path)
    for fields in lines:
        written.append(fields)
    written.close()
    return path.read_bytes()


def opened(path) -> list:
    """The lines that an opened chain has; reading must give the same first."""
    read = Chain.read(path).lines
    chain = Chain(path)
    chain.close()
    assert chain.lines == read
    return chain.lines


def test_lines_come_back_and_each_states_its_length_and_the_one_before(path):
    whole = filled(path)
    assert opened(path) == LINES
    assert path.read_bytes() == whole
    previous = "0" * 64
    for line in whole.splitlines():
        fields = json.loads(line)
        assert fields["bytes"] == len(line) - len(b'{"bytes":%d,' % fields["bytes"])
        assert fields["previous"] == previous
        previous = fields["hash"]
    assert Chain.read(path).head == previous


def test_every_flipped_bit_is_refused_by_file_and_line(path):
    """TRUST 35, 40: newlines too. Nothing is deleted, so nothing is lost."""
    whole = filled(path)
    starts = [0]
    for line in whole.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    # In place: making the file anew takes ten times as long.
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            os.pwrite(file.fileno(), damaged, 0)
            number = next(i for i, end in enumerate(starts[1:], 1) if bit // 8 < end)
            with pytest.raises(CorruptFile, match=f"line {number} was altered") as caught:
                Chain(path)
            assert str(path) in str(caught.value)
            assert path.read_bytes() == damaged
            with pytest.raises(CorruptFile):
                Chain.read(path)


def test_a_flipped_bit_in_an_unfinished_file_costs_no_finished_line(path):
    """A crash and a flipped bit: what was synced (it has its newline) is there, or refused."""
    whole = filled(path, LINES[:3])
    synced = whole[: whole[:-1].rindex(b"\n") + 1]
    for length in (len(synced) + 30, len(whole) - 1):
        # Of nearly every byte one bit, and each of the eight.
        for bit in range(0, 8 * length, 7):
            damaged = bytearray(whole[:length])
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                assert opened(path)[:2] == LINES[:2]
                assert path.read_bytes().startswith(synced)
            except CorruptFile:
                assert path.read_bytes() == damaged


def test_a_line_cut_short_is_whole_or_gone(path):
    """TRUST 33: after a crash at any byte of any write; and the chain goes on where it ended."""
    whole = filled(path)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut + 1 for end in ends)
        assert opened(path) == LINES[:kept]
        assert path.read_bytes() == (whole[: ends[kept - 1]] if kept else b"")
        if cut == len(whole) - 40:
            filled(path, LINES[3:])
            assert path.read_bytes() == whole


NO_LINES = [
    b"[]",
    b"3",
    b"null",
    b'"text"',
    b"{}",
    b'{"bytes":2,}',
    b'{"bytes":0,}',
    b'{"bytes":3,[]}',
    b'{"bytes":11,"hash":"x"}',
    b'{"bytes":9,"hash":1}',
    b'{"bytes":' + b"9" * 5000 + b',"a":1}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"bytes":500005,"a":' + b'{"a":' * 99_999 + b"1" + b"}" * 6,
    b'{"bytes":200004,"a":' + b"[" * 100_000 + b"]" * 100_000,
    b"\xff\xfe",
    b'{"bytes":-1,"a":1}',
    b'{"bytes":NaN,"a":NaN}',
]


@pytest.mark.parametrize("line", NO_LINES, ids=lambda line: repr(line[:24]))
@pytest.mark.parametrize("end", [b"\n", b""], ids=["line", "tail"])
@pytest.mark.parametrize("before", [0, 2])
def test_what_is_no_line_is_refused(path, line, end, before):
    """TRUST 39: nested deeply, of another type, or none at all; also as what a crash left."""
    filled(path, LINES[:before])
    content = path.read_bytes() + line + end
    path.write_bytes(content)
    for open_it in (Chain, Chain.read):
        with pytest.raises(CorruptFile, match=f"line {before + 1} was altered"):
            open_it(path)
    assert path.read_bytes() == content


def _with_something_behind_it(whole):
    """The last newline damaged, alone or with what is around it."""
    last = len(whole) - whole[:-1].rindex(b"\n") - 2  # bytes of the last line, without its newline
    for garbage in (b"\0", b"\x0b", b"J", b"}", b" ", b" \t", b"{", b"\xff\xfe", b'{"bytes":5'):
        yield 4, whole[:-1] + garbage
    # More of the end overwritten, by nothing that lacks.
    for many in range(1, last + 1):
        for zeros in (many, many + 1):
            yield 4, whole[: -1 - many] + b"\0" * zeros


def _glued(whole):
    """A newline that became something else, or nothing: in the middle, and before a torn line."""
    newlines = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for number, place in enumerate(newlines[:-1], 1):
        for between in (b"", b"J", b" ", b","):
            for end in (len(whole), len(whole) - 1, len(whole) - 20, place + 2):
                yield number, whole[:place] + between + whole[place + 1 : end]


def _with_the_length_of_a_longer_line(whole):
    """Two faults: a last line whose newline is gone and whose length was damaged."""
    start = whole[:-1].rindex(b"\n") + 1
    length = b'"bytes":%d' % json.loads(whole[start:])["bytes"]
    yield 4, whole[:start] + whole[start:-1].replace(length, b'"bytes":999')


def _moved(whole):
    first, second, third, fourth = whole.splitlines(keepends=True)
    yield 1, second + third + fourth
    yield 2, first + third + fourth
    yield 3, first + second + fourth + third
    yield 4, first + second + third + third + fourth
    yield 5, whole + fourth


def _spelt_otherwise(whole):
    """The same object with a space, another order or a name twice is not the line."""
    first, after = whole.split(b"\n", 1)
    rest = first.split(b",", 1)[1]
    for other in (
        rest.replace(b":", b": ", 1),
        rest.replace(b'"a":1,', b"").replace(b"}", b',"a":1}'),
        rest.replace(b'"a":1', b'"a":1,"a":1'),
        rest.replace(b'"a":1', b'"\\u0061":1'),
        rest.replace(b'"a":1', b'"a":1.0'),
    ):
        assert other != rest
        yield 1, b'{"bytes":%d,%s\n%s' % (len(other), other, after)


@pytest.mark.parametrize(
    "damage",
    [
        _with_something_behind_it,
        _glued,
        _with_the_length_of_a_longer_line,
        _moved,
        _spelt_otherwise,
    ],
)
def test_a_damaged_chain_is_refused_by_its_line_and_left_as_it_is(path, damage):
    """TRUST 35: nothing is dropped that may have counted."""
    for number, damaged in damage(filled(path)):
        path.write_bytes(damaged)
        refusal(lambda: Chain(path), f"line {number} ", CorruptFile)
        assert path.read_bytes() == damaged


def test_every_line_is_on_the_disk_before_it_counts(path, monkeypatch):
    """TRUST 34: charges, and the records of releases that are published next.

    So is what a killed process left, which may be in the kernel's cache only."""
    seen = synced(monkeypatch)
    chain = Chain(path)
    file = path.stat().st_ino
    assert {inode for inode, _ in seen} == {file, path.parent.stat().st_ino}
    for line in LINES[:2]:
        seen.clear()
        chain.append(line)
        assert seen == [(file, path.stat().st_size)] and path.read_bytes().endswith(b"\n")
    seen.clear()
    chain.close()
    assert chain.head == Chain.read(path).head and not seen
    Chain(path).close()
    assert seen == [(file, path.stat().st_size)]


@pytest.mark.parametrize("raised", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_line_that_cannot_be_synced_does_not_count(path, monkeypatch, raised):
    """TRUST 36; and Ctrl-C while the disk is waited for, after which more must fit the chain."""
    chain = Chain(path)
    chain.append(LINES[0])
    before = chain.head, path.read_bytes()

    def fail(descriptor):
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(type(raised)):
            chain.append(LINES[1])
    assert (chain.head, path.read_bytes()) == before
    refusal(lambda: chain.append(LINES[1]), "closed")
    again = Chain(path)
    again.append(LINES[1])
    again.close()
    assert opened(path) == LINES[:2]


def test_a_chain_that_was_altered_while_open_is_closed(path):
    """TRUST 40"""
    whole = filled(path)
    for content in (whole[: whole[:-1].rindex(b"\n") + 1], whole[:-2] + b"x\n", b""):
        path.write_bytes(whole)
        chain = Chain(path)
        path.write_bytes(content)
        with pytest.raises(CorruptFile, match="altered"):
            chain.verify()
        refusal(lambda chain=chain: chain.append(LINES[1]), "closed")


def test_numbers_that_json_lacks_are_not_written(path):
    written = Chain(path)
    with pytest.raises(ValueError):
        written.append({"a": float("nan")})
    assert path.read_bytes() == b""
    written.append(LINES[0])
    written.close()
    assert opened(path) == LINES[:1]
    assert chain.altered(path, 1, "why").exit_code == 2
