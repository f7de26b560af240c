"""Every shipped config of a published study has the study's settings, or says where it departs.

tests/papers/*.yaml lists, for each config, its keys with the published value and where it stands:

    KEY: {paper: VALUE, at: PLACE}                                  the config's value
    KEY: {computed: VALUE, at: HOW}                                 follows from what is published
    KEY: {within: [LOW, HIGH], at: PLACE}                           the published range
    KEY: {paper: ..., at: ..., here: VALUE, departs: WORDS}         WORDS stand in the config's head
    KEY: {ours: VALUE}                                              nothing is published

Configs are read by the library's own reader, so a default counts like a value in the file.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml

from jaxpfl.experiments import registry
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.config.reader import read_mapping, to_mapping
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.privacy import participation

ROOT = Path(__file__).parents[3]
CONFIGS, TABLES = ROOT / "configs", ROOT / "tests" / "papers"
# LibYAML reads them in a tenth of the time.
read = partial(yaml.load, Loader=yaml.CSafeLoader)
LISTS = read((TABLES / "lists.yaml").read_text())
DEFAULTS = read((TABLES / "defaults.yaml").read_text())
TABLE: dict[str, dict[str, Any]] = {
    name: rows
    for path in sorted(TABLES.glob("*.yaml"))
    if path.stem not in ("defaults", "lists")
    for name, rows in read(path.read_text()).items()
}
SWEEPS = [name for name in shipped.names() if shipped.about(name).command == "sweep"]
# How a run is carried out, which no result depends on, and where its data is.
UNPUBLISHED = re.compile(
    r"system|base|metric|gap|cases|run\..*|corpora\..*|fred\.candidates\..*|.*\.source|.*\.public"
    r"|privacy\.private|evaluation\..*|training\.(chunk|clients_per_bucket)"
    r"|popri\.preference\.(microbatch_size|remat)"
)


def leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys with their values; a mapping of names, such as a mixture, is a value, too."""
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield prefix + name, value
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def validation(config: Any) -> str:
    """What the models of a run are validated on."""
    evaluation = getattr(config, "evaluation", None)
    if evaluation is None:
        return "none"
    if evaluation.source is None:
        return "a part of the clients"
    if config.system == "synthetic_text":
        return "half of the test clients"
    return "the test clients"


def train_clients(config: Any) -> int:
    return round((config.data.clients or 1) * config.data.split.train)


def rounds_of_an_epoch(config: Any) -> int:
    clients = participation.of("cyclic", train_clients(config), config.training.clients_per_round)
    return clients.rounds_per_epoch


def settings(config: Any) -> dict[str, Any]:
    """The values by key, with those that follow from several keys."""
    found = dict(leaves(to_mapping(config)))
    found |= {"train clients": train_clients(config), "validation": validation(config)}
    if found.get("privacy.sampling") == "cyclic":
        found["rounds of an epoch"] = rounds_of_an_epoch(config)
    for name, values in parse_qs(config.data.source.partition("?")[2]).items():
        found[f"data.source?{name}"] = values[0]
    return found


def _released_privately(config: Any) -> bool:
    """Whether the rounds are private, or FreD's release beside rounds that are not."""
    fred = getattr(config, "fred", None)
    return config.privacy.private or (fred is not None and fred.epsilon is not None)


@cache
def points(name: str, overrides: tuple[str, ...] = ()) -> list[Any]:
    return [point.config for point in load_sweep(shipped.find(name), overrides).points]


def of_config(name: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A config's settings; those that all private points of a sweep share, and lists of others."""
    path = shipped.find(name)
    if "base" not in read_mapping(path):
        return settings(registry.load(path, overrides))
    values: dict[str, list[Any]] = {}
    for point in map(settings, filter(_released_privately, points(name, overrides))):
        for key, value in point.items():
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: found[0] if len(found) == 1 else found for key, found in values.items()}


def wrong(rows: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The keys whose value is not the one that the table has."""
    return [key for key, row in rows.items() if row and not agrees(row, found.get(key, "absent"))]


def agrees(row: Mapping[str, Any], value: Any) -> bool:
    if "within" in row:
        low, high = row["within"]
        return all(low <= each <= high for each in (value if isinstance(value, list) else [value]))
    (expected,) = [row[kind] for kind in ("here", "paper", "computed", "ours") if kind in row][:1]
    return value == expected


def head(name: str) -> str:
    """A config's comment at its beginning in one line, with the heads that it refers to."""
    text = (CONFIGS / f"{name}.yaml").read_text()
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    said = " ".join(lines)
    folder = Path(name).parent
    for other in re.findall(r"\b[Aa]s (?:in )?(?:configs/)?(\w+)\.yaml", said):
        said += head(str(folder / other))
    return said


@pytest.mark.parametrize("name", TABLE)
def test_a_config_has_the_published_settings(name):
    assert wrong(TABLE[name], of_config(name)) == []


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_is_as_published(name):
    rows = dict(DEFAULTS[name])
    config = registry.from_mapping(rows.pop("of"), name)
    assert wrong(rows, settings(config)) == []


@pytest.mark.parametrize("name", TABLE)
def test_a_head_says_where_its_config_departs(name):
    said = head(name)
    assert "alidation" in said, f"the head of {name} does not say what validates"
    for key, row in TABLE[name].items():
        if row and "departs" in row:
            assert row["departs"] in said, f"the head of {name} does not say: {row['departs']}"
            published = row.get("paper", row.get("computed"))
            assert row["here"] != published, f"{key} does not depart"
        elif row:
            kinds = row.keys() & {"paper", "computed", "ours", "within"}
            assert len(kinds) == 1, f"{name}: {key} has {row}"
            assert "at" in row or kinds == {"ours"}, f"{name}: {key} names no place"


@pytest.mark.parametrize("name", sorted(TABLE.keys() - set(LISTS["small"])))
def test_every_setting_of_a_published_study_is_in_the_table(name):
    mapping = read_mapping(CONFIGS / f"{name}.yaml")
    given = {key for key, value in leaves(mapping) if not isinstance(value, Mapping)}
    for case in (mapping.get("cases") or {}).values():
        given |= case.keys()
    given = {key for key in given if not key.startswith(("cases.", "grid.", "gap."))}
    given |= (mapping.get("grid") or {}).keys()
    missing = {key for key in given - TABLE[name].keys() if not UNPUBLISHED.fullmatch(key)}
    assert not missing


def test_every_config_is_of_a_published_study_or_ours():
    names = {name for name in shipped.names() if not name.startswith("sweeps/")}
    assert names == TABLE.keys() | set(LISTS["ours"])


@pytest.mark.parametrize("name", SWEEPS)
def test_what_is_called_dp_ftrl_is_not_dp_fed_avg(name):
    """Banded noise with a single round in an epoch is independent noise, which the head says."""
    epochs = {
        rounds_of_an_epoch(config) for config in points(name) if config.privacy.noise == "banded"
    }
    assert 1 not in epochs or "DP-FTRL is DP-FedAvg" in head(name)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, key, value) for name, wrong in LISTS["wrong"].items() for key, value in wrong.items()],
)
def test_a_wrong_setting_is_noticed(name, key, value):
    assert key in wrong(TABLE[name], of_config(name, (f"--{key}", value)))
