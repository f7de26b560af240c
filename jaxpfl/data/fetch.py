"""Fetches a file from its public address: whole or not at all, and on from where it was cut off.

.NAME.part        what has come so far; the same call goes on from there
.NAME.part.json   which version of the file it is of (the server's ETag)
.NAME.unpacked    what has been unpacked so far; made anew by the same call
NAME              the file, complete and checked
NAME.origin.json  where it is from, when it came, its size and SHA-256
"""

import contextlib
import datetime
import errno
import hashlib
import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.data.catalogue import Download
from jaxpfl.data.readers.sqlite_file import unpacked_pieces
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.progress import Progress

_PACKED = ".lzma"
_PIECE = 1 << 20
_SECONDS = 60.0
_MB = 1e6
_FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch(download: Download, target: Path, *, progress: bool = True) -> dict[str, Any]:
    """Fetches a file to `target`, unpacked if its address ends in ".lzma".

    Returns:
      What is also written to NAME.origin.json.

    Raises:
      InputError: `target` exists already, the folder cannot be made, the address cannot be reached
        or the disk has too little room.
      CorruptFile: what came is not the file that is known, or it is damaged.
      RunLocked: another process is fetching it.
    """
    if target.exists():
        raise InputError(f"{target} exists already: remove it, to fetch it anew")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target.parent}: cannot be made: {error.strerror}") from error
    part = target.with_name(f".{target.name}.part")
    with _nothing_empty(part), files.alone(part) as file:
        sha256 = _download(download, part, file, progress)
        record = {
            "url": download.url,
            "fetched": datetime.date.today().isoformat(),
            "bytes": part.stat().st_size,
            "sha256": sha256,
        }
        if download.url.endswith(_PACKED):
            record["unpacked"] = _unpack(part, target, progress)
            part.unlink()
        else:
            files.publish(part, target)
        _version_file(part).unlink(missing_ok=True)
        files.write_json(target.with_name(f"{target.name}.origin.json"), record)
    return record


def _download(download: Download, part: Path, file: Any, progress: bool) -> str:
    """Completes `part` and returns its SHA-256."""
    known = _version_file(part)
    version = files.read_record(known, {"etag": str, "bytes": int}) if known.exists() else {}
    # Bytes of an unknown version are worth nothing.
    begin = part.stat().st_size if version else 0
    digest = _hashed(part) if begin else hashlib.sha256()
    if not begin or begin != version["bytes"]:
        headers = {"Range": f"bytes={begin}-", "If-Range": version["etag"]} if begin else {}
        with _reached(download.url), _opened(download.url, headers) as answer:
            if answer.status != http.client.PARTIAL_CONTENT:
                digest, begin = hashlib.sha256(), 0
                file.truncate(0)
                _note_version(known, answer)
            length = answer.headers.get("Content-Length")
            left = int(length) if length else max(0, (download.size or 0) - begin)
            _require_room(part, left + (download.unpacked or 0))
            total = begin + left if left else None
            with _bar(download.url.rsplit("/", 1)[-1], total, begin, progress) as bar:
                while piece := answer.read(_PIECE):
                    file.write(piece)
                    digest.update(piece)
                    begin += len(piece)
                    bar.update(int(begin / _MB))
            files.sync(file)
            if length and begin != total:
                raise http.client.IncompleteRead(b"")
    _check(download, part, begin, digest.hexdigest())
    return digest.hexdigest()


def _note_version(known: Path, answer: Any) -> None:
    """Writes down of which version the bytes will be; a weak ETag does not tell."""
    etag, length = answer.headers.get("ETag") or "", answer.headers.get("Content-Length")
    known.unlink(missing_ok=True)
    if length and etag and not etag.startswith("W/"):
        files.write_json(known, {"etag": etag, "bytes": int(length)})


def _check(download: Download, part: Path, size: int, sha256: str) -> None:
    expected = download.sha256 or sha256
    if sha256 == expected and (download.size is None or size == download.size):
        return
    _version_file(part).unlink(missing_ok=True)
    part.unlink()
    raise CorruptFile(
        f"{download.url}: {size} bytes with the SHA-256 {sha256} came, expected "
        f"{download.size or 'a file'} with {expected}; they were removed"
    )


def _unpack(part: Path, target: Path, progress: bool) -> int:
    """Writes the unpacked content of `part` to `target`; the number of its bytes."""
    temporary = target.with_name(f".{target.name}.unpacked")
    written = 0
    try:
        with (
            temporary.open("wb") as file,
            _bar(f"unpacking {target.name}", None, 0, progress) as bar,
        ):
            for piece in unpacked_pieces(part):
                file.write(piece)
                written += len(piece)
                bar.update(int(written / _MB))
            files.sync(file)
        files.publish(temporary, target)
    except CorruptFile:
        _version_file(part).unlink(missing_ok=True)
        part.unlink()
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return written


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _hashed(path: Path) -> Any:
    """The state of SHA-256 after the bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest


def _opened(url: str, headers: dict[str, str]) -> Any:
    if not url.startswith(("https://", "http://")):
        raise InputError(f"{url}: expected an address that begins with https://")
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_SECONDS)


def _bar(label: str, total: int | None, begin: int, progress: bool) -> Progress:
    most = None if total is None else max(1, int(total / _MB))
    bar = Progress(label, total=most, progress=progress, step="MB", waiting="")
    bar.begin(int(begin / _MB))
    return bar


def _require_room(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise InputError(
            f"{part.parent}: has {free / _MB:,.0f} MB of free space, expected "
            f"{needed / _MB:,.0f} MB; --folder names another folder"
        )


@contextlib.contextmanager
def _reached(url: str) -> Iterator[None]:
    """Says in one sentence why an address gave nothing, or not all."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise InputError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        if getattr(error, "errno", None) in _FULL:
            raise
        reason = getattr(error, "reason", None) or error
        raise InputError(
            f"{url}: cannot be fetched ({getattr(reason, 'strerror', None) or reason}); what has "
            "come is kept, and the same command goes on from there"
        ) from None


@contextlib.contextmanager
def _nothing_empty(part: Path) -> Iterator[None]:
    """Removes `part` if nothing came, and says what becomes of it where the disk is full."""
    try:
        yield
    except BaseException as error:
        if part.exists() and not part.stat().st_size:
            part.unlink()
            _version_file(part).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise InputError(
                f"{part.parent}: the disk is full; what has come is kept: make room, and the same "
                "command goes on from there"
            ) from None
        raise
