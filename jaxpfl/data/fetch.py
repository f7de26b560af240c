"""Fetches a file from its public address: whole or not at all, and on from where it was cut off.

.NAME.part        what has come so far; the same call goes on from there
.NAME.part.json   which version of the file it is of (the server's ETag)
.NAME.unpacked    what has been unpacked so far; made anew by the same call
NAME              the file, complete and checked
NAME.origin.json  where it is from, when it came, its size and SHA-256
"""

import datetime
import errno
import http.client
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.data.catalogue import Download
from jaxpfl.data.readers.compressed import unpacked_pieces
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.progress import Progress

_PACKED = ".lzma"
_PIECE = 1 << 20
_SECONDS = 60.0
_MB = 1e6
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEPT = "what has come is kept"


def fetch(download: Download, target: Path, *, progress: bool = True) -> dict[str, Any]:
    """Fetches a file to `target`, unpacked if its address ends in ".lzma".

    Returns:
      What is also written to NAME.origin.json.

    Raises:
      InputError: `target` exists already, the folder cannot be made, the address cannot be reached
        or the disk has too little room.
      CorruptFile: what came is not the file that is known, or it is damaged; it is removed.
      RunLocked: another process is fetching it.
    """
    if target.exists():
        raise InputError(f"{target} exists already: remove it, to fetch it anew")
    if not download.url.startswith(("https://", "http://")):
        raise InputError(f"{download.url}: expected an address that begins with https://")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target.parent}: cannot be made: {error.strerror}") from error
    part = target.with_name(f".{target.name}.part")
    version = part.with_name(f"{part.name}.json")
    try:
        with files.alone(part) as file:
            _download(download, part, version, file, progress)
            record = {
                "url": download.url,
                "fetched": datetime.date.today().isoformat(),
                "bytes": part.stat().st_size,
                "sha256": _checked(download, part),
            }
            if download.url.endswith(_PACKED):
                record["unpacked"] = _unpack(part, target, progress)
                part.unlink()
            else:
                files.publish(part, target)
            version.unlink(missing_ok=True)
            files.write_json(target.with_name(f"{target.name}.origin.json"), record)
    except BaseException as error:
        if part.exists() and (isinstance(error, CorruptFile) or not part.stat().st_size):
            part.unlink()
            version.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            again = "make room, and the same command goes on from there"
            raise InputError(f"{part.parent}: the disk is full; {_KEPT}: {again}") from None
        raise
    return record


def _download(download: Download, part: Path, version: Path, file: Any, progress: bool) -> None:
    """Completes `part`, from where an earlier call was cut off if it is of the same version."""
    known = files.read_record(version, {"etag": str, "bytes": int}) if version.exists() else {}
    # Bytes of an unknown version are worth nothing.
    begin = part.stat().st_size if known else 0
    if begin and begin == known["bytes"]:
        return
    url = download.url
    headers = {"Range": f"bytes={begin}-", "If-Range": known["etag"]} if begin else {}
    try:
        asked = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
            length = int(answer.headers.get("Content-Length") or 0)
            if answer.status != http.client.PARTIAL_CONTENT:
                begin = 0
                file.truncate(0)
                version.unlink(missing_ok=True)
                etag = answer.headers.get("ETag") or ""
                # A weak one does not tell two versions apart.
                if length and etag and not etag.startswith("W/"):
                    files.write_json(version, {"etag": etag, "bytes": length})
            left = length or max(0, (download.size or 0) - begin)
            _require_room(part, left + (download.unpacked or 0))
            total = begin + left
            with _bar(url.rsplit("/", 1)[-1], total or None, begin, progress) as bar:
                while piece := answer.read(_PIECE):
                    file.write(piece)
                    begin += len(piece)
                    bar.update(int(begin / _MB))
            files.sync(file)
            if length and begin != total:
                raise http.client.IncompleteRead(b"")
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise InputError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        if getattr(error, "errno", None) in _FULL:
            raise
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        again = "the same command goes on from there"
        raise InputError(f"{url}: cannot be fetched ({reason}); {_KEPT}, and {again}") from None


def _checked(download: Download, part: Path) -> str:
    """The SHA-256 of what came."""
    sha256, size = files.sha256_file(part), part.stat().st_size
    if sha256 != (download.sha256 or sha256) or size != (download.size or size):
        raise CorruptFile(
            f"{download.url}: {size} bytes with the SHA-256 {sha256} came, expected "
            f"{download.size or 'a file'} with {download.sha256 or sha256}; they were removed"
        )
    return sha256


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
    finally:
        temporary.unlink(missing_ok=True)
    return written


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
