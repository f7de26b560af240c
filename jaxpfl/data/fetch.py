"""Fetches a file from its public address, whole and checked, or not at all.

NAME.origin.json, beside it, says where it is from, when it came, its size and SHA-256.
"""

import datetime
import http.client
import lzma
import tempfile
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
    """Fetches a file to `target`; returns the record that is also written to NAME.origin.json.

    Raises:
      InputError: `target` exists already, the folder cannot be made, the address cannot be reached
        or the disk is full.
      CorruptFile: the file has another SHA-256 than the stated one, or it is damaged.
    """
    url = download.url
    if target.exists():
        raise InputError(f"{target} exists already: remove it, to fetch it anew")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            fetched = Path(folder) / url.rsplit("/", 1)[-1]
            with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
                size = int(answer.headers.get("Content-Length") or 0)
                count = _copy(answer, fetched, fetched.name, size, progress)
            if size and count != size:
                raise http.client.IncompleteRead(b"", size - count)
            record = {"url": url, "fetched": datetime.date.today().isoformat(), "bytes": count}
            record["sha256"] = sha256 = files.sha256_file(fetched)
            if sha256 != (download.sha256 or sha256):
                expected = f"expected {download.sha256}; the file was removed"
                raise CorruptFile(f"{url}: {count} bytes of SHA-256 {sha256} came, {expected}")
            if url.endswith(".lzma"):
                packed, fetched = fetched, fetched.with_suffix("")
                with errors_of(packed), lzma.open(packed) as content:
                    label = f"unpacking {fetched.name}"
                    record["unpacked"] = _copy(content, fetched, label, 0, progress)
            files.publish(fetched, target)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise InputError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        raise InputError(f"{url}: cannot be fetched to {target} ({reason})") from None
    files.write_json(target.with_name(f"{target.name}.origin.json"), record)
    return record


def _copy(source: Any, path: Path, label: str, total: int, progress: bool) -> int:
    """Writes the rest of a source to a file; returns the number of bytes."""
    count, most = 0, max(1, total // 10**6) if total else None
    with (
        path.open("wb") as file,
        Progress(label, total=most, progress=progress, step="MB", waiting="") as bar,
    ):
        while piece := source.read(_PIECE):
            file.write(piece)
            count += len(piece)
            bar.update(count // 10**6)
        files.sync(file)
    return count
