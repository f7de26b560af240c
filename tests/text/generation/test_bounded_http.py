"""Answers without end, in bytes or in time: each ends in an error, whatever part it is in."""

import gzip
import itertools
import socket
from contextlib import contextmanager
from threading import Event, Thread

import jax
import pytest

from jaxpfl.errors import InputError
from jaxpfl.text.generation import bounded_http, remote
from jaxpfl.text.generation.decoding import Decoding
from tests.loopback import completions
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

MOST = 10_000
OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def answering(pieces, pause_s=0.0):
    """An address that answers each request with these bytes, until nobody listens."""
    ended = Event()

    def serve():
        while not ended.is_set():
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                try:
                    read_whole(client)
                    for piece in pieces():
                        client.sendall(piece)
                        if ended.wait(pause_s):
                            return
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        finally:
            ended.set()


def read_whole(client):
    """Reads a request with its body: a socket that is closed before would reset the connection."""
    with client.makefile("rb") as request:
        length = 0
        while (line := request.readline()) not in (b"", b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        request.read(length)


def posted(api, seconds=60.0):
    return bounded_http.post(f"{api}/x", b"{}", {}, most_bytes=MOST, seconds=seconds)


LONG = b"x" * 1000
ENDLESS = {
    "a body": (OK + b"\r\n", LONG),
    "a body of a known length": (OK + b"Content-Length: 1000000000\r\n\r\n", LONG),
    "a body of a length beyond memory": (OK + b"Content-Length: %d\r\n\r\n" % 10**17, LONG),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"3e8\r\n" + LONG + b"\r\n"),
    "a chunk beyond memory": (OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffff\r\n", LONG),
    "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 100),
    "a header": (OK + b"a: ", LONG),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 10),
}


@pytest.mark.parametrize("first_and_rest", ENDLESS.values(), ids=ENDLESS)
def test_an_answer_without_end_is_refused(first_and_rest):
    first, rest = first_and_rest
    # It ends by itself at 100 times the limit, so that whoever reads it all is not waited for.
    endless = answering(lambda: [first, *itertools.repeat(rest, 1000)])
    with endless as api, pytest.raises(bounded_http.TooLong):
        posted(api)


@pytest.mark.parametrize("start", [b"", OK, OK + b"Content-Length: 30\r\n\r\n"])
def test_an_answer_that_drips_ends_at_the_deadline(start):
    """Each byte comes well within the limit, the last one after it."""
    whole = OK + b"Content-Length: 30\r\n\r\n" + b"x" * 30
    drops = [whole[i : i + 1] for i in range(len(start), len(whole))]
    with answering(lambda: [start, *drops], pause_s=0.05) as api, pytest.raises(TimeoutError):
        posted(api, seconds=0.5)


def test_what_is_short_and_in_time_is_returned_as_it_came():
    """Also where it is packed: nothing is unpacked, which could be a million times as long."""
    packed = gzip.compress(b"0" * 10**6)
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    with answering(lambda: [head + packed]) as api:
        assert posted(api) == (200, packed)
    with answering(lambda: [OK + b"Content-Length: 9000\r\n\r\n", b"y" * 9000]) as api:
        assert posted(api) == (200, b"y" * 9000)
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    with answering(lambda: [chunked]) as api:
        assert posted(api) == (200, b"abc")


def asked(api):
    model = remote.RemoteModel(api, "far", UTF8Bytes())
    return model.write(["a"], jax.random.key(1), decoding=Decoding())


def test_a_generators_answers_have_both_limits(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,) * 5)
    monkeypatch.setattr(remote, "_MOST_BYTES", MOST)
    with completions(lambda *_: (200, "x" * 20_000)) as (api, requests):
        with pytest.raises(InputError, match=f"found more than {MOST} bytes"):
            asked(api)
        assert len(requests) == 1
    monkeypatch.setattr(remote, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(remote, "_DEADLINE_S", 0.5)
    dripping = answering(lambda: itertools.repeat(b"H", 100), pause_s=0.05)
    with dripping as api, pytest.raises(InputError, match="TimeoutError"):
        asked(api)


def test_nobody_else_is_asked_and_a_server_cannot_repeat_the_key(monkeypatch):
    monkeypatch.setenv(remote.API_KEY, "secret-key-7")
    monkeypatch.setattr(remote, "_PAUSES_S", ())
    with completions(lambda *_: (200, "x")) as (elsewhere, requests):
        moved = b"HTTP/1.1 302 Found\r\nLocation: %s/completions\r\n\r\n" % elsewhere.encode()
        with answering(lambda: [moved]) as api, pytest.raises(InputError, match="status 302"):
            asked(api)
        assert not requests
    repeating = answering(lambda: [b"secret-key-7\x1b[2K\r\n" * 100])
    with repeating as api, pytest.raises(InputError) as caught:
        asked(api)
    said = str(caught.value)
    assert "secret" not in said and said.isprintable() and len(said) < 500
