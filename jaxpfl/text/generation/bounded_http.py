"""One HTTP request, whose answer has a limit of bytes and a deadline.

The standard library bounds neither: a timeout of its sockets begins anew with each byte, bodies,
trailers and interim answers may go on without end, and memory is taken for a length that is only
announced. So bytes are counted, and the time that is left is set, where they leave the socket.
"""

import http.client
import io
import socket
import time
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import urlsplit


class TooLong(Exception):
    """An answer has more bytes than the limit."""


def post(
    url: str, body: bytes, headers: dict[str, str], *, most_bytes: int, seconds: float
) -> tuple[int, bytes]:
    """Returns the status and the content of the answer; no redirect is followed, nothing unpacked.

    Args:
      most_bytes: the limit of the answer as it comes, its headers included.
      seconds: the time for the whole answer; to connect and to send have as many, too.

    Raises:
      TooLong: the answer is longer.
      OSError, http.client.HTTPException: it did not come, or not in time (`TimeoutError`).
      ValueError: the address or a header has characters that HTTP cannot send.
    """
    address = urlsplit(url)
    kind = getattr(http.client, f"{address.scheme.upper()}Connection")
    with closing(kind(address.netloc, timeout=seconds)) as connection:
        connection.response_class = partial(_Response, most_bytes, time.monotonic() + seconds)
        connection.request("POST", address.path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


class _Response(http.client.HTTPResponse):
    """An answer that is read through `_Bounded`."""

    def __init__(self, left: int, deadline: float, sock: socket.socket, **more: Any) -> None:
        super().__init__(sock, **more)
        self.fp = _Buffered(_Bounded(self.fp.detach(), sock, left, deadline), left)


class _Buffered(io.BufferedReader):
    """Never asks for more than one byte above the limit, for which memory would be allocated."""

    def __init__(self, raw: io.RawIOBase, most: int) -> None:
        super().__init__(raw)
        self._most = most

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, self._most + 1))


class _Bounded(io.RawIOBase):
    """The bytes from a socket, until they are too many or too late."""

    def __init__(self, raw: Any, sock: socket.socket, left: int, deadline: float) -> None:
        self._raw, self._socket, self._left, self._deadline = raw, sock, left, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(seconds)
        size = self._raw.readinto(buffer)
        self._left -= size or 0
        if self._left < 0:
            raise TooLong
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()
