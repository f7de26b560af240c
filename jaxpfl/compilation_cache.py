"""Compiled programs, kept between processes: the second start of a command compiles nothing anew.

Without it, most of the time of a short run is compilation. It is JAX's persistent cache, in the
user's cache folder. What is kept follows from the program, the versions of JAX and XLA, their
flags and the processor's features, so that another machine, or another version, finds nothing and
compiles. Kept are programs, not what they are called with.
"""

import os
import sys
import warnings
from pathlib import Path

# Programs that compile faster are compiled anew: reading them would not be faster by much.
_LEAST_SECONDS = 0.1
_MOST_BYTES = 1 << 30


def folder() -> Path:
    """The user's cache folder for compiled programs; nothing is created."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        caches = named
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path.home() / ".cache"
    return caches / "jaxpfl" / "compiled"


def enable() -> None:
    """Makes JAX keep what it compiles in `folder()`; to be called before JAX is first imported.

    JAX's own settings go first: a folder in JAX_COMPILATION_CACHE_DIR is used as it is, and
    JAX_ENABLE_COMPILATION_CACHE=false keeps nothing. Where the folder cannot be written, nothing is
    kept either. Processes that this one starts keep their programs there too.
    """
    # A file that another process is still writing, or never finished: it is compiled anew.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        path = folder()
        # Whoever may write there decides what this process executes.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _drop_oldest(path)
    except (OSError, RuntimeError):
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(_LEAST_SECONDS))


def _drop_oldest(path: Path) -> None:
    """Deletes the programs compiled longest ago until the others are few enough."""
    found = [(entry, entry.stat()) for entry in path.iterdir() if entry.is_file()]
    size = sum(stat.st_size for _, stat in found)
    for entry, stat in sorted(found, key=lambda each: each[1].st_mtime):
        if size <= _MOST_BYTES:
            break
        entry.unlink(missing_ok=True)
        size -= stat.st_size
