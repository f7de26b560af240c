"""Whose releases a ledger holds: populations as marks under the ledger's secret.

A fingerprint is a plain hash of the data: whoever guesses somebody's data can test the guess on it.
So a ledger holds its HMAC-SHA256 under 32 secret bytes, in a file of its own beside the ledger.

A fingerprint tells equal sources apart from others, but not "one client fewer" from "somebody
else". For that there are two sketches, of client ids and of what clients hold: random samples of
the clients, coordinated in that every population samples the clients with the smallest keyed hashes
(bottom-k sampling: Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007). What
is stored of a sampled client is not that hash but another keyed one, its tag, so that

- without the key a sketch is a fixed number of values that look random, sorted: it tells neither
  who nor what nor how many, and a guess cannot be tested;
- with the key, the share of tags that a population's clients account for estimates how much of the
  sketched population is in it; and of its clients with hashes up to the largest one found, the
  share found estimates how much of it is in the sketched population.

Ids that are running numbers ("0", "1", "client 7") and contents that most clients share ("yes")
say nothing of who it is: they have an empty sketch, which looks like any other and matches nobody.
Of contents, the column with the most bytes is sketched, and of each client its first 16 KiB there,
in the order in which it holds them: other columns, more of them, other names or an order of the
clients make no difference; another order of a client's own examples does.
"""

import hmac
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError

_KEY_BYTES = 32
_TAGS = 256
_TAG_BYTES = 6
_MOST_CONTENT = 2**14
_NUMBERED = re.compile(r"(\D*)(\d{1,18})(\D*)")
_DENSITY = 0.1


class Clients(Protocol):
    """What a population must tell; `data.Population` does."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def client_ids(self) -> Any: ...


class SameClientsWarning(UserWarning):
    """A population is not the ledger's, but most of its clients are, or seem to be."""


class Secret:
    """The key of one ledger, and what is made with it.

    Attributes:
      check: tells this key from others; public.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.check = self._hmac("key", b"").hex()

    def mark(self, clients: Clients) -> str:
        """Returns the HMAC (hex) of the fingerprint of the clients' source."""
        return self._hmac("population", clients.fingerprint.encode()).hex()

    def sketch(self, clients: Clients) -> dict[str, str]:
        """Returns the sketches of these clients; passes over one column, or over those it must."""
        contents: Collection[bytes] = ()
        by_size = sorted(clients.columns.values(), key=lambda column: -_bytes_of(column)[0])
        for column in by_size:
            contents = self._contents(clients, column)
            if contents:
                break
        sketches = {"ids": self._tags(self._ids(clients)), "contents": self._tags(contents)}
        return {name: b"".join(sorted(tags)).hex() for name, tags in sketches.items()}

    def overlap(self, clients: Clients, sketches: Sequence[dict[str, Any]]) -> float:
        """Returns which share of the smaller population is in the other one, in 0 .. 1, estimated.

        The largest over `sketches`, over ids and contents, and over the clients' columns.

        Args:
          sketches: of `sketch`, with this key.
        """
        ids = [sketch["ids"] for sketch in sketches]
        found = self._shares(self._ids(clients), ids)
        contents = [sketch["contents"] for sketch in sketches]
        for column in clients.columns.values():
            found += self._shares(self._contents(clients, column), contents)
        return max(found, default=0.0)

    def _hmac(self, purpose: str, message: bytes) -> bytes:
        return hmac.digest(self._key, purpose.encode() + b"\0" + message, "sha256")

    def _ids(self, clients: Clients) -> Collection[bytes]:
        """A keyed hash of each client's id; none if the ids are running numbers."""
        ids = clients.client_ids.to_pylist()
        if _are_numbers(ids):
            return ()
        return [self._hmac("id", client.encode()) for client in ids]

    def _contents(self, clients: Clients, column: Any) -> Collection[bytes]:
        """The different keyed hashes of what clients hold in a column; none if they say little."""
        key = self._hmac("contents", _type_of(column).encode())
        pieces = _pieces(column, clients.offsets)
        hashes = [hmac.digest(key, piece, "sha256") for piece in pieces]
        different = set(hashes)
        return different if 2 * len(different) > len(hashes) else ()

    def _tag(self, item: bytes, copy: int) -> bytes:
        return self._hmac("tag", copy.to_bytes(4) + item)[:_TAG_BYTES]

    def _tags(self, items: Collection[bytes]) -> list[bytes]:
        """A fixed number of tags, also of fewer items: then an item has several."""
        sample = sorted(items)[:_TAGS] or [b"nobody"]
        return [self._tag(sample[i % len(sample)], i // len(sample)) for i in range(_TAGS)]

    def _shares(self, items: Collection[bytes], sketches: Sequence[str]) -> list[float]:
        first = [(item, self._tag(item, 0)) for item in sorted(items)]
        return [self._share(first, sketch) for sketch in sketches]

    def _share(self, first: Sequence[tuple[bytes, bytes]], sketch: str) -> float:
        stored = bytes.fromhex(sketch)
        tags = {stored[i : i + _TAG_BYTES] for i in range(0, len(stored), _TAG_BYTES)}
        places = [place for place, (_, tag) in enumerate(first) if tag in tags]
        if not places:
            return 0.0
        matched = 0
        for place in places:
            copy = 0
            while self._tag(first[place][0], copy) in tags:
                copy += 1
            matched += copy
        # The largest hash found says how far the sample reaches, so it is no sample itself.
        last = places[-1]
        return max(matched / len(tags), (len(places) - 1) / last if last else 0.0)


def open_secret(path: Path, *, create: bool) -> Secret:
    """Reads a key, or makes it: 32 random bytes, mode 0600, on the disk when this returns.

    Args:
      create: whether an absent one is made. One that is there is never replaced.

    Raises:
      CorruptFile: it is missing, or is no key.
    """
    if create and not path.exists():
        files.private_directory(path.parent)
        files.write_atomically(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        raise CorruptFile(
            f"{path} is missing: without its key a ledger can be read but not charged"
        ) from None
    if len(key) != _KEY_BYTES:
        raise CorruptFile(f"{path} has {len(key)} bytes, expected a key of {_KEY_BYTES}")
    return Secret(key)


class _Bytes(NamedTuple):
    """A column as bytes: those of the examples i .. j - 1 are content[edges(i) : edges(j)]."""

    size: int
    content: memoryview
    edges: np.ndarray | int


def _type_of(column: Any) -> str:
    """Type and shape of one example."""
    return f"{column.dtype}{column.shape[1:]}" if isinstance(column, np.ndarray) else "text"


def _bytes_of(column: Any) -> _Bytes:
    if not len(column):
        return _Bytes(0, memoryview(b""), 0)
    if isinstance(column, np.ndarray):
        return _Bytes(column.nbytes, column.data.cast("B"), column.nbytes // len(column))
    # Arrow's large_string: int64 offsets into one buffer of UTF-8; an array may start anywhere.
    _, offsets_buffer, content = column.buffers()
    edges = np.frombuffer(offsets_buffer, np.int64)[column.offset :][: len(column) + 1]
    return _Bytes(int(edges[-1] - edges[0]), memoryview(content or b""), edges)


def _pieces(column: Any, offsets: np.ndarray) -> Iterator[memoryview]:
    """The first bytes of each client that has any, without copying the column."""
    size, content, edges = _bytes_of(column)
    if not size:
        return
    ends = edges[offsets] if isinstance(edges, np.ndarray) else offsets * edges
    begins, ends = ends[:-1], np.minimum(ends[1:], ends[:-1] + _MOST_CONTENT)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if begin < end:
            yield content[begin:end]


def _are_numbers(ids: Sequence[str]) -> bool:
    """Whether ids are running numbers, perhaps with one word around, perhaps a part of them."""
    parts = [_NUMBERED.fullmatch(client) for client in ids]
    words = {(part[1], part[3]) if part else None for part in parts}
    if len(words) != 1 or None in words:
        return False
    numbers = [int(part[2]) for part in parts if part]
    return len(numbers) >= _DENSITY * (max(numbers) - min(numbers) + 1)


def check_sketch(sketch: Any) -> dict[str, str]:
    """Returns what a ledger's line holds as its sketch.

    Raises:
      InputError: it is none.
    """
    if not isinstance(sketch, dict) or set(sketch) != {"ids", "contents"}:
        raise InputError("it holds no sketch of clients")
    for tags in sketch.values():
        bytes.fromhex(tags)
    return sketch
