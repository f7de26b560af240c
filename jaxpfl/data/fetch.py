"""Fetches a file from its public address: whole or not at all, and on from where it was cut off.

.NAME.VERSION.part   what has come so far of a version of the file (the server's ETag, hashed)
.NAME.unpacked       what has been unpacked so far; made anew by the same call
NAME                 the file, complete and checked
NAME.origin.json     where it is from, when it came, its size and SHA-256
"""

import datetime
import hashlib
import http.client
import lzma
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.data.catalogue import Download
from jaxpfl.data.readers.compressed import errors_of
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.progress import Progress

_PIECE = 1 << 20
_SECONDS = 60.0


def fetch(download: Download, target: Path, *, progress: bool = True) -> dict[str, Any]:
    """Fetches a file to `target`, unpacked if its address ends in ".lzma".

    Returns:
      What is also written to NAME.origin.json.

    Raises:
      InputError: `target` exists already, the folder cannot be made, the address cannot be reached
        or the disk is full.
      CorruptFile: what came is not the file that is known, or it is damaged; it is removed.
      RunLocked: another process is fetching it.
    """
    url, part = download.url, None
    temporary = target.with_name(f".{target.name}.unpacked")
    if target.exists():
        raise InputError(f"{target} exists already: remove it, to fetch it anew")
    if not url.startswith(("https://", "http://")):
        raise InputError(f"{url}: expected an address that begins with https://")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        head = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(head, timeout=_SECONDS) as answer:
            etag = answer.headers.get("ETag") or ""
            size = int(answer.headers.get("Content-Length") or 0)
        version = hashlib.sha256(f"{etag} {size}".encode()).hexdigest()[:8]
        part = target.with_name(f".{target.name}.{version}.part")
        with files.alone(part) as file:
            if not etag or etag.startswith("W/"):  # which does not tell two versions apart
                file.truncate(0)
            begin = part.stat().st_size
            if not size or begin < size:
                headers = {"Range": f"bytes={begin}-", "If-Range": etag} if begin else {}
                asked = urllib.request.Request(url, headers=headers)
                with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
                    if answer.status != http.client.PARTIAL_CONTENT:
                        file.truncate(begin := 0)
                    begin = _copy(answer, file, url.rsplit("/", 1)[-1], begin, size, progress)
            if size and begin != size:
                raise http.client.IncompleteRead(b"")
            record = {"url": url, "fetched": datetime.date.today().isoformat(), "bytes": begin}
            record["sha256"] = sha256 = files.sha256_file(part)
            if sha256 != (download.sha256 or sha256):
                raise CorruptFile(
                    f"{url}: {begin} bytes with the SHA-256 {sha256} came, expected "
                    f"{download.sha256}; they were removed"
                )
            if url.endswith(".lzma"):
                with errors_of(part), lzma.open(part) as packed, temporary.open("wb") as unpacked:
                    label = f"unpacking {target.name}"
                    record["unpacked"] = _copy(packed, unpacked, label, 0, 0, progress)
                files.publish(temporary, target)
                part.unlink()
            else:
                files.publish(part, target)
    except CorruptFile:
        if part is not None:
            part.unlink(missing_ok=True)
        raise
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise InputError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        kept = "what has come is kept, and the same command goes on from there"
        raise InputError(f"{url}: cannot be fetched to {target} ({reason}); {kept}") from None
    finally:
        temporary.unlink(missing_ok=True)
    files.write_json(target.with_name(f"{target.name}.origin.json"), record)
    return record


def _copy(source: Any, file: Any, label: str, begin: int, total: int, progress: bool) -> int:
    """Copies what is left of a file of `total` bytes, of which `begin` are there; their number."""
    most = max(1, total // 10**6) if total else None
    with Progress(label, total=most, progress=progress, step="MB", waiting="") as bar:
        bar.begin(begin // 10**6)
        while piece := source.read(_PIECE):
            file.write(piece)
            begin += len(piece)
            bar.update(begin // 10**6)
    files.sync(file)
    return begin
