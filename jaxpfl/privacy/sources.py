"""Recognises the clients whose releases a ledger holds, by keyed hashes.

A fingerprint is a plain hash of the data, against which a guess of somebody's data can be tested.
A ledger therefore holds its HMAC-SHA256, the source's digest, whose key of 32 secret bytes is in a
file next to the ledger.

Digests are equal or not; they do not show that one source has a single client fewer than another.
For that there are two sketches, of client ids and of clients' contents. A sketch is a random sample
of the clients, in which every population samples those with the smallest keyed hashes (bottom-k
sampling: Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007). A sampled client
is stored as another keyed hash, its tag, so that

- without the key, a sketch is a fixed number of sorted values that look random. It reveals neither
  the clients nor their contents nor their number, and no guess can be tested;
- with the key, two shares can be estimated. The share of the sketched population that is in another
  one is the share of the tags that the other's clients have. The reverse share is that of the
  other's clients whose tag is found, among those with hashes up to the largest one found.

Ids that are running numbers ("0", "1", "client 7") and contents that most clients share ("yes") do
not identify a client: their sketch is that of no client, which looks like any other and matches
nobody. Contents are sketched by the column with the most bytes, and in it by each client's first 16
KiB. Other or renamed columns and another order of the clients therefore change nothing, but another
order of a client's examples does.
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
    """The part of `data.Population` that a ledger reads."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def client_ids(self) -> Any: ...


class SameClientsWarning(UserWarning):
    """A population is not the ledger's, but most of its clients seem to be."""


class LedgerKey:
    """The key of one ledger.

    Attributes:
      check: a hash that identifies the key; public.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.check = self._hmac("key", b"").hex()

    def digest_of(self, clients: Clients) -> str:
        """Returns the HMAC (hex) of the fingerprint of the clients' source."""
        return self._hmac("population", clients.fingerprint.encode()).hex()

    def sketch(self, clients: Clients) -> dict[str, str]:
        """Returns the sketches of these clients' ids and contents."""
        contents: Collection[bytes] = ()
        by_size = sorted(clients.columns.values(), key=lambda column: -_size_of(column))
        for column in by_size:
            contents = self._contents(clients, column)
            if contents:
                break
        sketches = {"ids": self._tags(self._ids(clients)), "contents": self._tags(contents)}
        return {name: b"".join(sorted(tags)).hex() for name, tags in sketches.items()}

    def overlap(self, clients: Clients, sketches: Sequence[dict[str, Any]]) -> float:
        """Returns the estimated share, in 0 .. 1, of the smaller population that is in the other.

        It is the largest over `sketches`, over ids and contents, and over the clients' columns.

        Args:
          sketches: results of `sketch` with this key.
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
        """A keyed hash of each client's id; empty if the ids are running numbers."""
        ids = clients.client_ids.to_pylist()
        if _are_numbers(ids):
            return ()
        return [self._hmac("id", client.encode()) for client in ids]

    def _contents(self, clients: Clients, column: Any) -> Collection[bytes]:
        """The different keyed hashes of clients' values in a column; empty if most are equal."""
        key = self._hmac("contents", _type_of(column).encode())
        pieces = _pieces(column, clients.offsets)
        hashes = [hmac.digest(key, piece, "sha256") for piece in pieces]
        different = set(hashes)
        return different if 2 * len(different) > len(hashes) else ()

    def _tag(self, item: bytes, copy: int) -> bytes:
        return self._hmac("tag", copy.to_bytes(4) + item)[:_TAG_BYTES]

    def _tags(self, items: Collection[bytes]) -> list[bytes]:
        """A fixed number of tags; if there are fewer items, each has several tags."""
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
        # The largest hash found only marks the end of the sample, and is not counted.
        last = places[-1]
        return max(matched / len(tags), (len(places) - 1) / last if last else 0.0)


def open_key(path: Path, *, create: bool) -> LedgerKey:
    """Reads a key of 32 random bytes.

    Args:
      create: whether a missing key is made, with mode 0600 and on the disk when this returns.

    Raises:
      CorruptFile: the file is missing or is not a key.
    """
    if create and not path.exists():
        files.private_directory(path.parent)
        files.write_atomically(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        raise CorruptFile(
            f"{path} is missing: without its key, a ledger can be read but not charged"
        ) from None
    if len(key) != _KEY_BYTES:
        raise CorruptFile(f"{path} has {len(key)} bytes, expected a key of {_KEY_BYTES}")
    return LedgerKey(key)


class _Bytes(NamedTuple):
    """A column as bytes: those of the examples i .. j - 1 are content[edges(i) : edges(j)]."""

    size: int
    content: memoryview
    edges: np.ndarray | int


def _type_of(column: Any) -> str:
    """Type and shape of one example."""
    if hasattr(column, "client_bytes"):
        return column.content_type
    return f"{column.dtype}{column.shape[1:]}" if isinstance(column, np.ndarray) else "text"


def _size_of(column: Any) -> int:
    return column.nbytes if hasattr(column, "client_bytes") else _bytes_of(column).size


def _bytes_of(column: Any) -> _Bytes:
    if not len(column):
        return _Bytes(0, memoryview(b""), 0)
    if isinstance(column, np.ndarray):
        return _Bytes(column.nbytes, column.data.cast("B"), column.nbytes // len(column))
    # Arrow's large_string: int64 offsets into one buffer of UTF-8; an array may start anywhere.
    _, offsets_buffer, content = column.buffers()
    edges = np.frombuffer(offsets_buffer, np.int64)[column.offset :][: len(column) + 1]
    return _Bytes(int(edges[-1] - edges[0]), memoryview(content or b""), edges)


def _pieces(column: Any, offsets: np.ndarray) -> Iterator[memoryview | bytes]:
    """Each client's first bytes, if it has any, without copying the column."""
    if hasattr(column, "client_bytes"):
        # Token ids, which need not lie one client after the other, or what is mapped from a file.
        yield from (held for held in column.client_bytes(offsets, _MOST_CONTENT) if held)
        return
    size, content, edges = _bytes_of(column)
    if not size:
        return
    ends = edges[offsets] if isinstance(edges, np.ndarray) else offsets * edges
    begins, ends = ends[:-1], np.minimum(ends[1:], ends[:-1] + _MOST_CONTENT)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if begin < end:
            yield content[begin:end]


def _are_numbers(ids: Sequence[str]) -> bool:
    """Whether ids are running numbers, possibly with gaps and a common text around them."""
    parts = [_NUMBERED.fullmatch(client) for client in ids]
    words = {(part[1], part[3]) if part else None for part in parts}
    if len(words) != 1 or None in words:
        return False
    numbers = [int(part[2]) for part in parts if part]
    return len(numbers) >= _DENSITY * (max(numbers) - min(numbers) + 1)


def check_sketch(sketch: Any) -> dict[str, str]:
    """Returns a ledger line's sketch; raises `ValueError` if it is not one."""
    if not isinstance(sketch, dict) or set(sketch) != {"ids", "contents"}:
        raise InputError("it holds no sketch of clients")
    for tags in sketch.values():
        bytes.fromhex(tags)
    return sketch
