"""The data sets that the shipped configs read, as `catalogue.yaml` lists them."""

import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from jaxpfl import files
from jaxpfl.errors import InputError, NoDataFolder


@dataclass(frozen=True)
class Download:
    """A file at a public address, unpacked if it ends in ".lzma"; `sha256` where it is known."""

    url: str
    sha256: str | None = None


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
      variable: the environment variable that names the folder of its files; "" for a data set that
        comes with the installation.
      files: paths in that folder, or the beginnings of sources that need no file.
      clients: who they are and how many.
      licence: as its authors state it.
      form: the content of the files, for those who make them.
      downloads: by file, where it is at a public address in a form that is read here.
      hub: OWNER/NAME on the Hugging Face hub.
      sources: by the folder to write, the source that `jaxpfl convert` groups by client, with
        {revision} in place of the commit.
      converted: folders that `jaxpfl convert` makes of it, as the heads of configs say.
    """

    name: str
    files: Sequence[str]
    clients: str
    origin: str
    licence: str
    variable: str = ""
    form: str = ""
    downloads: Mapping[str, Download] = field(default_factory=dict)
    hub: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    converted: Sequence[str] = ()

    def folder(self, given: Path | None = None) -> Path:
        """The folder of its files: `given`, or the one that the variable names."""
        named = os.environ.get(self.variable)
        if given is None and not named:
            what = f"{self.name}: the environment variable {self.variable}, its folder, is not set"
            raise InputError(f"{what}: export {self.variable}=FOLDER, or give --folder FOLDER")
        return files.user_path(given or named or "")

    def holds(self, source: str) -> bool:
        """Whether a source of a config, such as "$JAXPFL_TFF/emnist_all.sqlite?...", is of it."""
        head = source.partition("?")[0]
        if not self.variable:
            return head.partition(":")[0] in self.files
        own = (f"${self.variable}/{file}" for file in (*self.files, *self.converted))
        return head.removesuffix(".lzma") in own

    def state(self) -> str:
        """Whether it is available, in a few words; asks no network."""
        if not self.variable:
            return "embedded"
        folder = os.environ.get(self.variable)
        here = [file for file in self.files if folder and (Path(folder) / file).exists()]
        if len(here) == len(self.files):
            return "here"
        if here:
            return f"{len(here)} of {len(self.files)} files here"
        return "absent" if folder else f"absent (no {self.variable})"


@functools.cache
def data_sets() -> dict[str, DataSet]:
    """Every data set by name."""
    listed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    for entry in listed.values():
        downloads = entry.get("downloads", {})
        entry["downloads"] = {file: Download(**download) for file, download in downloads.items()}
    return {name: DataSet(name, **entry) for name, entry in listed.items()}


def find(name: str) -> DataSet:
    """The data set of this name."""
    by_name = data_sets()
    if name in by_name:
        return by_name[name]
    # The end of a name is what people remember: irc_ubuntu, nova.
    inside = [full for full in by_name if name and name in full]
    near = difflib.get_close_matches(name, by_name, 1, 0.5) or inside
    hint = f"did you mean {near[0]}?" if near else "`jaxpfl data list` has their names"
    raise InputError(f"there is no data set {name!r}; {hint}")


def holding(source: str) -> str:
    """The name of the data set that a source of a config is of; "" for another source."""
    return next((data_set.name for data_set in data_sets().values() if data_set.holds(source)), "")


def expanded(path: str) -> str:
    """A path with its ~ and its environment variables replaced."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            what = f"source {path!r}: the environment variable {name} is not set"
            if name in {data_set.variable for data_set in data_sets().values()}:
                raise NoDataFolder(f"{what}; `jaxpfl data list` says what belongs there")
            raise InputError(what)
        return os.environ[name]

    return os.path.expanduser(files.VARIABLE.sub(value, path))
