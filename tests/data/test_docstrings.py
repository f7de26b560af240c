"""The embedded default: docstrings of well-known packages, as sentences."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.readers import embedded

FOLDER = Path(embedded.__file__).parent


@pytest.fixture(scope="module")
def optax():
    return open_population("docstrings:optax")


def test_a_package_gives_clients_with_sentences(optax):
    assert optax.unit == "documented class or function"
    assert optax.name == "docstrings:optax"
    assert list(optax.columns) == ["text"]
    assert len(optax) == 353
    assert 3 <= np.median(optax.sizes()) <= 12
    assert optax.sizes().min() >= 1
    ids = optax.client_ids.to_pylist()
    assert all(path.startswith("optax.") for path in ids)
    assert not any("_test" in path for path in ids)


def test_the_corpora_are_the_same_everywhere(optax):
    """They do not change with the version of a package that happens to be installed."""
    assert optax.fingerprint.startswith("ee2630a8e4fedc51")
    several = "jax,scipy,pandas,sklearn,orbax,flax,optax,tensorboard,rich,absl,tyro,dp_accounting"
    population = open_population(f"docstrings:{several},pyarrow")
    assert len(population) == 8263
    assert population.fingerprint.startswith("c5238389b0e1f538")


def test_clients_come_in_the_order_of_the_packages_asked_for_and_none_twice():
    population = open_population("docstrings:optax,flax")
    packages = [path.partition(".")[0] for path in population.client_ids.to_pylist()]
    assert packages == sorted(packages, reverse=True)
    held = [tuple(population.examples(i)["text"].to_pylist()) for i in range(len(population))]
    assert len(set(held)) == len(held)


def test_the_notice_names_the_releases_that_the_snapshot_holds():
    releases = json.loads(parquet.read_schema(FOLDER / "docstrings.parquet").metadata[b"packages"])
    text = (FOLDER / "docstrings.NOTICE.txt").read_text("utf-8")
    assert len(releases) == 21
    for package, release in releases.items():
        line = f"{package} +{release['distribution']} {re.escape(release['version'])}, "
        assert re.search(f"^{line}", text, re.MULTILINE), package
