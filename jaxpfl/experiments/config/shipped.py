"""The configs that come with jaxpfl, by name, from `configs/` here or in the installed package."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl import checks, files
from jaxpfl.errors import InputError, NoDataFolder

_PACKAGE = Path(__file__).parents[2]
_SUFFIX = ".yaml"
_HEAD: Any = re.compile(r"(?:#.*\n)*")
# After a full stop that is not an abbreviation's.
_SENTENCE = re.compile(r"(?<!\bal\.)(?<=[.])\s")


def folder() -> Path:
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
    """The names of all configs: paths below `folder()` without the suffix, "/" between parts."""
    paths = (path.relative_to(folder()) for path in folder().rglob(f"*{_SUFFIX}"))
    # Those of the papers, which are many, come last.
    ordered = sorted((len(path.parts), path.with_suffix("").as_posix()) for path in paths)
    return [name for _, name in ordered]


def find(given: str | Path) -> Path:
    """The file of a config: of a path the file itself, of a name the one that comes with jaxpfl.

    What ends in `.yaml`, or is a file, is a path; everything else is a name. `InputError`: there is
    neither such a file nor such a name; or both, the name and a file of that name with the suffix.
    """
    path, own = files.user_path(given), names()
    if path.is_file():
        return path
    if path.suffix == _SUFFIX:
        name = path.with_suffix("").as_posix().removeprefix("configs/")
        other = "`jaxpfl configs` lists jaxpfl's own configs"
        if name in own:
            other = f"jaxpfl's own config is named {name}, without folder and suffix"
        raise InputError(f"{given}: {files.missing(path)}; {other}")
    here = path.with_name(f"{path.name}{_SUFFIX}") if path.name else path
    if here.is_file():
        if path.as_posix() not in own:
            raise InputError(f"{given}: {files.missing(path)}; name {here} with its suffix")
        both = f"{given} is a config that comes with jaxpfl, and {here} is a file here"
        raise InputError(f"{both}: name the file with its suffix, or run this in another folder")
    if path.as_posix() in own:
        return folder() / f"{path.as_posix()}{_SUFFIX}"
    hint = checks.nearest(path.as_posix(), own) or "; `jaxpfl configs` lists their names"
    place = f"a file{files.where(path)}"
    raise InputError(f"{given}: neither {place} nor a config that comes with jaxpfl{hint}")


def sources(name: str) -> tuple[str, ...]:
    """The sources of data that the config of this name, or its base, reads."""
    return tuple(re.findall(r"(?:\$\w+/|\bdocstrings:|\bdigits\?)[^\s\"',}]*", _settings(name)))


@contextmanager
def form_without_data_named(path: Path) -> Iterator[None]:
    """Adds to a `NoDataFolder` the command for data that comes with jaxpfl, if there is one."""
    try:
        yield
    except NoDataFolder as error:
        command = _without_data(path.read_text("utf-8"))
        if not command:
            raise
        raise NoDataFolder(f"{error}. On data that comes with jaxpfl: {command}") from None


class About(NamedTuple):
    """What a config says of itself."""

    sentence: str  # the first of the comment at its head
    command: str  # "run" or "sweep"
    needs: tuple[str, ...]  # the environment variables that its sources of data are named by
    without_data: str  # a command for data that comes with jaxpfl; "" if none is given


def about(name: str) -> About:
    """Reads what the config of this name says of itself, without building it."""
    text = (folder() / f"{name}{_SUFFIX}").read_text("utf-8")
    words = " ".join(line.lstrip("# ") for line in _HEAD.match(text)[0].splitlines())
    needs = {source[1:].partition("/")[0] for source in sources(name) if source.startswith("$")}
    command = "sweep" if re.search("^base: ", text, re.M) else "run"
    return About(_SENTENCE.split(words)[0], command, tuple(sorted(needs)), _without_data(text))


def _without_data(text: str) -> str:
    """The command after "No data:" in the head of a config, on one line; "" if there is none."""
    line = re.search(r"^# No data: +((?:.*\\\n)*.*)$", _HEAD.match(text)[0], re.M)
    return re.sub(r"\s*\\\n#\s*", " ", line[1]) if line else ""


def _settings(name: str) -> str:
    own = re.sub(r"(^|\s)#.*", "", (folder() / f"{name}{_SUFFIX}").read_text("utf-8"))
    base = re.search(r"^base: (\S+)\.yaml", own, re.M)
    return _settings((Path(name).parent / base[1]).as_posix()) + own if base else own
