"""The systems by name. No other file lists them all: a new system is one line here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.config import reader
from jaxpfl.experiments.systems import CONFIG as RUN_CONFIG
from jaxpfl.experiments.systems.base import System

DEFAULT = "federated_training"
"""The system of a config that names none."""

SYSTEMS = {
    "federated_training": "jaxpfl.experiments.systems.federated_training",
    "chosen_corpus": "jaxpfl.experiments.systems.chosen_corpus",
    "gan_inversion": "jaxpfl.experiments.systems.gan_inversion",
    "oov_concatenation": "jaxpfl.experiments.systems.oov_concatenation",
    "training_bias": "jaxpfl.experiments.systems.training_bias",
    "synthetic_text": "jaxpfl.experiments.systems.synthetic_text",
}
"""Name -> package, which is imported when the system is first used."""

ONE_RUN = ("federated_training", "chosen_corpus", "synthetic_text")
"""The systems whose plans, each of them once, are all that a run of theirs releases."""


def system_of(name: Any) -> System:
    """Returns the system of this name, or raises `InputError` if there is none."""
    if not isinstance(name, str) or name not in SYSTEMS:
        known = ", ".join(map(repr, SYSTEMS))
        raise InputError(f"system must be one of {known}, found {name!r}")
    return System(name, SYSTEMS[name])


def load(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Reads the config of any system from a YAML file and the command line."""
    mapping = reader.read_mapping(path)
    if isinstance(mapping, Mapping) and "base" in mapping:
        raise InputError(f"{path}: a config with the key base is a sweep, for `jaxpfl sweep`")
    return from_mapping(mapping, str(path), overrides)


def load_run(directory: Path) -> Any:
    path = directory / RUN_CONFIG
    if not path.is_file():
        if (directory / "run.json").exists():
            how = "call jaxpfl.run again with the same arguments and resume=True"
            raise InputError(f"{directory}: holds a run from Python, which has no config: {how}")
        absent = f"there is no such directory{files.where(directory)}"
        found = f"there is no {RUN_CONFIG} in it" if directory.is_dir() else absent
        raise InputError(f"{directory}: holds no run: {found}")
    return load(path)


def from_mapping(mapping: Any, where: str, overrides: Sequence[str] = ()) -> Any:
    """The config of the system that `system` names; arguments as of `reader.from_mapping`."""
    return reader.from_mapping(mapping, where, config_type(mapping, where, overrides), overrides)


def config_type(mapping: Any, where: str, overrides: Sequence[str] = ()) -> Any:
    """The config class of the system that a config names; arguments as for `from_mapping`."""
    name = mapping.get("system", DEFAULT) if isinstance(mapping, Mapping) else DEFAULT
    for place, argument in enumerate(overrides):
        key, has_value, value = argument.partition("=")
        if key == "--system":
            name = value if has_value else "".join(overrides[place + 1 : place + 2])
    with named(where):
        return system_of(name).part("config").Config
