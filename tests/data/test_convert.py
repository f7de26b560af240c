"""`jaxpfl convert`: any source becomes a folder, whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpfl.cli import main
from jaxpfl.data import Population
from jaxpfl.data import open as open_population
from jaxpfl.data.folders import convert
from jaxpfl.errors import CorruptFile, InputError
from tests.data.populations import same
from tests.data.tff_files import example, write_file


@pytest.fixture
def plays(tmp_path):
    path = tmp_path / "plays.sqlite"
    texts = {f"role {n}": [f"line {k}".encode() for k in range(n)] for n in range(5)}
    clients = {i: [example({"snippets": text}) for text in held] for i, held in texts.items()}
    return write_file(path, clients)


@pytest.mark.parametrize("query", ["", "&split=train", "&min_examples=2"])
def test_tff_files(plays, query, tmp_path):
    before = set(tmp_path.iterdir())
    source = f"{plays}?dataset=shakespeare{query}"
    record = convert(source, tmp_path / "out")
    expected = open_population(source)
    assert (record["clients"], record["examples"]) == (len(expected), expected.num_examples)
    same(Population.load(tmp_path / "out"), expected)
    same(open_population(record["out"]), expected)
    # Nothing temporary stays behind.
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}


def test_a_folder_is_converted_without_being_read(plays, tmp_path):
    """TRUST 29: to a folder that is charged to the same ledger."""
    record = convert("digits?clients=7", tmp_path / "new" / "digits")
    assert (record["clients"], record["examples"]) == (7, 1797)
    convert(record["out"], tmp_path / "again")
    for path in (tmp_path / "new" / "digits").iterdir():
        if path.name != "manifest.json":
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    same(open_population(tmp_path / "again"), open_population("digits?clients=7"))


def test_what_fails_leaves_nothing(plays, tmp_path):
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(plays.read_bytes()[:-9])
    before = set(tmp_path.iterdir())
    with pytest.raises(CorruptFile, match="its SQLite header counts"):
        convert(f"{cut}?dataset=shakespeare", tmp_path / "out")
    with pytest.raises(InputError, match="client 1, row 1: it has a feature that is not declared"):
        convert(f"{plays}?dataset=emnist", tmp_path / "out")
    with pytest.raises(InputError, match="no such file"):
        convert(f"{tmp_path}/absent.sqlite?dataset=emnist", tmp_path / "out")
    with pytest.raises(InputError, match="exists already"):
        convert("digits", tmp_path)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_nothing_stays(number, plays, tmp_path, monkeypatch, interruptible):
    before, seen = set(tmp_path.iterdir()), []
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    partial = tmp_path / ".out.partial"

    def interrupted(*_):
        seen.extend(partial.iterdir())
        assert partial.stat().st_mode & 0o77 == 0
        os.kill(os.getpid(), number)
        time.sleep(10)

    command = ["convert", f"{plays}?dataset=shakespeare", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr("jaxpfl.data.storage.hash_of", interrupted)
        assert main(command) == 128 + number
    assert seen and set(tmp_path.iterdir()) == before
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert main(command) == 0
    same(open_population(tmp_path / "out"), open_population(command[1]))


def test_command(plays, tmp_path, capsys):
    out = tmp_path / "out"
    source = f"{plays}?dataset=shakespeare"
    assert main(["convert", source, str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["out"], printed["clients"], printed["examples"]) == (str(out), 5, 10)
    assert main(["convert", source, str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out == f"5 clients written to {tmp_path / 'other'}\n"
    assert main(["convert", source, str(tmp_path / "third"), "--vocab-size", "9"]) == 2
    assert "--vocabulary" in capsys.readouterr().err


# Not getrusage: its peak begins with that of the process which started this one.
MEASURE = """
import pathlib, sys
from jaxpfl.data.folders import convert
convert(sys.argv[1], sys.argv[2])
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """TRUST 4: ten times the clients, a few megabytes more at most."""
    peaks = []
    for clients in (1_000, 10_000):
        # 8 KB a client: 80 MB in the larger file.
        held = {f"{n:05}": [example({"snippets": b"%07d" % n * 570})] * 2 for n in range(clients)}
        path = write_file(tmp_path / f"{clients}.sqlite", held)
        command = [sys.executable, "-c", MEASURE, f"{path}?dataset=shakespeare"]
        done = subprocess.run([*command, str(tmp_path / str(clients))], capture_output=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] + 20, f"peak memory {peaks} MB"
