"""Fetching: whole or not at all, and only what is known."""

import dataclasses
import errno
import hashlib
import http.server
import json
import lzma
import threading

import pytest

from jaxpfl.cli import main
from jaxpfl.data import catalogue
from jaxpfl.data.catalogue import Download
from jaxpfl.data.fetch import fetch
from jaxpfl.errors import CorruptFile, InputError
from tests.data.hub import stand_in
from tests.data.tff_files import example, write_file
from tests.refusals import refusal

CONTENT = bytes(range(256)) * 12_000  # three pieces
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.content`; cuts the answer after `server.cut` bytes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        if self.path.endswith("absent"):
            self.send_error(404, "Not Found")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        self.wfile.write(server.content[: server.cut])
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    made.content, made.cut, made.asked = CONTENT, None, []
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def get(server, target, *, name="data.bin", **known):
    return fetch(Download(f"{server.url}/{name}", **known), target, progress=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_whole_with_its_record(server, tmp_path):
    target = tmp_path / "new" / "data.bin"
    record = get(server, target, sha256=SHA256)
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["data.bin", "data.bin.origin.json"]
    assert json.loads((target.parent / "data.bin.origin.json").read_text()) == record
    assert (record["sha256"], record["bytes"]) == (SHA256, len(CONTENT))
    refusal(lambda: get(server, target), "exists already")
    assert len(server.asked) == 1


def test_what_was_cut_off_or_is_another_file_is_removed_and_can_be_fetched_again(server, tmp_path):
    target, server.cut = tmp_path / "data.bin", 1_500_000
    refusal(lambda: get(server, target), "cannot be fetched")
    server.cut = None
    with pytest.raises(CorruptFile, match=SHA256):
        get(server, target, sha256=64 * "0")
    assert names(tmp_path) == []
    assert get(server, target)["sha256"] == SHA256
    assert target.read_bytes() == CONTENT


def test_packed_files_are_unpacked_and_damaged_ones_refused(server, tmp_path):
    target = tmp_path / "data.sqlite"
    server.content = lzma.compress(CONTENT, lzma.FORMAT_ALONE)
    get(server, target, name="data.sqlite.lzma")
    assert target.read_bytes() == CONTENT
    assert names(tmp_path) == ["data.sqlite", "data.sqlite.origin.json"]
    target.unlink()
    server.content = server.content[:-20]
    refusal(lambda: get(server, target, name="data.sqlite.lzma"), "truncated", CorruptFile)
    assert names(tmp_path) == ["data.sqlite.origin.json"]


def test_a_full_disk_leaves_nothing(server, tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("jaxpfl.files.sync", full)
        refusal(lambda: get(server, tmp_path / "data.bin"), "No space left on device")
        assert names(tmp_path) == []
    get(server, tmp_path / "data.bin", sha256=SHA256)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_without_an_answer_one_sentence_says_so_and_nothing_is_left(server, tmp_path):
    refusal(lambda: get(server, tmp_path / "data.bin", name="absent"), "404")
    with pytest.raises(InputError, match="cannot be fetched"):
        fetch(Download("http://127.0.0.1:9/x"), tmp_path / "data.bin", progress=False)
    assert names(tmp_path) == []


def test_the_command_fetches_a_file_that_a_config_reads(server, tmp_path, monkeypatch, capsys):
    row = example({"snippets": b"to be or not"})
    stored = write_file(tmp_path / "made.sqlite", {"HAMLET": [row, row]}, split="train")
    server.content = lzma.compress(stored.read_bytes(), lzma.FORMAT_ALONE)
    known = catalogue.data_sets()["shakespeare"]
    moved = {
        file: Download(f"{server.url}/{each.url.rsplit('/', 1)[1]}")
        for file, each in known.downloads.items()
    }
    changed = dataclasses.replace(known, downloads=moved)
    monkeypatch.setitem(catalogue.data_sets(), "shakespeare", changed)
    monkeypatch.setenv("JAXPFL_TFF", str(tmp_path / "tff"))
    assert main(["data", "get", "shakespeare", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["fetched"]) == [str(tmp_path / "tff" / "shakespeare.sqlite")]
    from jaxpfl.data import open as open_population
    from jaxpfl.experiments.config import shipped

    source = next(each for each in shipped.sources("shakespeare_characters") if "train" in each)
    assert open_population(source).num_examples == 2
    assert main(["data", "get", "shakespeare"]) == 2
    assert "here already" in capsys.readouterr().err


def test_the_command_groups_a_data_set_of_the_hub(tmp_path, monkeypatch, capsys):
    rows = {"url": ["https://a.org/1", "https://b.org/", "https://a.org/2"], "text": ["x"] * 3}
    module = stand_in(monkeypatch, rows)
    monkeypatch.setattr("jaxpfl.data.readers.frames.newest_commit", lambda repository: 40 * "c")
    assert main(["data", "get", "fedccnews", "--folder", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fetched"][str(tmp_path / "fedccnews")]["clients"] == 2
    assert {options["revision"] for _, options in module.asked} == {40 * "c"}


def test_the_command_says_what_is_at_no_address_and_what_uses_a_data_set(capsys):
    assert main(["data", "get", "text_irc_ubuntu"]) == 0
    said = capsys.readouterr().out
    for word in ("irc-disentanglement at 82ed04f", "CC BY 4.0", "client and text", "$JAXPFL_DATA"):
        assert word in said
    assert said.strip().count("\n") == 0
    assert main(["data", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data_sets"]
    assert found.keys() == catalogue.data_sets().keys()
    assert "irc_word_lm" in found["text_irc_ubuntu"]["used_by"]
