"""The secret key of a ledger, by which it recognises the clients whose releases it holds.

A fingerprint is a plain hash of the data, against which a guess of somebody's data can be tested.
A ledger therefore holds its HMAC-SHA256, the source's digest, whose key of 32 secret bytes is in a
file next to the ledger. Digests are equal or not: a source with one client fewer is another source.
"""

import hmac
import secrets
from pathlib import Path
from typing import Protocol

from jaxpfl import files
from jaxpfl.errors import CorruptFile

_KEY_BYTES = 32


class Clients(Protocol):
    """The part of `data.Population` that a ledger reads."""

    @property
    def fingerprint(self) -> str: ...


class LedgerKey:
    """The key of one ledger; `check`, a hash that identifies it, is public."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.check = self.digest("key", "")

    def digest_of(self, clients: Clients) -> str:
        """Returns the HMAC (hex) of the fingerprint of the clients' source."""
        return self.digest("population", clients.fingerprint)

    def digest(self, purpose: str, text: str) -> str:
        """Returns the HMAC (hex) of a text."""
        return hmac.digest(self._key, f"{purpose}\0{text}".encode(), "sha256").hex()


def open_key(path: Path, *, create: bool) -> LedgerKey:
    """Reads a key of 32 random bytes.

    With `create`, a missing key is made, with mode 0600 and on the disk when this returns.
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
