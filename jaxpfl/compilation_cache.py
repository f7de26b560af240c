"""Enables JAX's persistent compilation cache, so that a command compiles each program only once.

Without it, a short run spends most of its time on compilation. A cache key covers the program, the
versions of JAX and XLA, their flags and the processor's features: another machine or version
compiles its own programs. The cache holds programs, never their inputs.
"""

import os
import sys
import warnings
from pathlib import Path

# A program that compiles faster than this is not worth reading from the disk.
_LEAST_SECONDS = 0.1
_MOST_BYTES = 1 << 30


def folder() -> Path:
    """Returns the folder for compiled programs in the user's cache; does not create it."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        caches = named
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path.home() / ".cache"
    return caches / "jaxpfl" / "compiled"


def enable() -> None:
    """Makes JAX cache compiled programs in `folder()`; call it before JAX is first imported.

    JAX's own settings take precedence: JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. A folder that cannot be written disables
    it, too. Child processes inherit the setting.
    """
    # A cache file that another process has not finished writing is ignored.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        path = folder()
        # Only the owner may write there, because this process executes what it finds.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _drop_oldest(path)
    except (OSError, RuntimeError):
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(_LEAST_SECONDS))


def _drop_oldest(path: Path) -> None:
    """Deletes the oldest programs until the rest take at most `_MOST_BYTES`."""
    found = [(entry, entry.stat()) for entry in path.iterdir() if entry.is_file()]
    size = sum(stat.st_size for _, stat in found)
    for entry, stat in sorted(found, key=lambda each: each[1].st_mtime):
        if size <= _MOST_BYTES:
            break
        entry.unlink(missing_ok=True)
        size -= stat.st_size
