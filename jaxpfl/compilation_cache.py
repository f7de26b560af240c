"""Enables JAX's persistent compilation cache, so that a command compiles each program only once.

A cache key covers the program, the versions of JAX and XLA, their flags and the processor's
features. The cache holds programs, never their inputs; but an array that a client function closes
over is part of its program, and so should not be made of clients' data.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A program that compiles faster than this is not worth reading from the disk.
_LEAST_SECONDS = 0.1
_MOST_BYTES = 1 << 30


def caches() -> Path:
    """Returns jaxpfl's folder in the user's cache; does not create it."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        user = named
    elif sys.platform == "darwin":
        user = Path.home() / "Library" / "Caches"
    else:
        user = Path.home() / ".cache"
    return user / "jaxpfl"


def enable() -> None:
    """Makes JAX cache compiled programs in `caches()`; call it before JAX is first imported.

    JAX's own settings take precedence: JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. A folder that cannot be written disables
    it, too. Child processes inherit the setting.
    """
    _ignore_unfinished_files()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and (path := _cache_folder()) is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(_LEAST_SECONDS))


@contextmanager
def enabled() -> Iterator[None]:
    """Enables the cache inside the context, where JAX is imported; then restores JAX's settings.

    A folder that JAX has already, from its settings or from `enable`, stays in use.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    config: Any = jax.config
    unset = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir is None
    path = _cache_folder() if unset else None
    if path is None:
        yield
        return
    _ignore_unfinished_files()
    settings: dict[str, Any] = {"jax_compilation_cache_dir": str(path)}
    settings["jax_persistent_cache_min_compile_time_secs"] = _LEAST_SECONDS
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            config.update(name, value)
        # JAX would go on to use the folder that it has opened.
        compilation_cache.reset_cache()


def _ignore_unfinished_files() -> None:
    """A cache file that another process has not finished writing is compiled again."""
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")


def _cache_folder() -> Path | None:
    """Makes the folder if absent, and removes the oldest programs; None if it cannot be used."""
    try:
        path = caches() / "compiled"
        # Only the owner may write there, because this process executes its files.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return None
        programs = [(file, file.stat()) for file in path.iterdir() if file.is_file()]
        size = sum(stat.st_size for _, stat in programs)
        for file, stat in sorted(programs, key=lambda program: program[1].st_mtime):
            if size <= _MOST_BYTES:
                break
            file.unlink(missing_ok=True)
            size -= stat.st_size
    except (OSError, RuntimeError):
        return None
    return path
