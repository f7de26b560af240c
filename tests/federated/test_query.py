"""The buckets that a query gets where its cohort names none, and those that no memory holds."""

import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from jaxpfl.federated import Execution, Query, client_mesh
from jaxpfl.federated.release import query
from tests.federated.cohorts import held_vector, plan


def capacity(clients=100, *, model=1, **settings):
    """Of the buckets of a query over two devices."""
    execution = Execution(client_mesh(2, model=model), settings.pop("chunk", None))
    spec = jp.CohortSpec(4, 8, **settings)
    asked = Query("asked", held_vector, plan(clients_per_round=clients), spec, execution=execution)
    return asked.cohort.clients_per_bucket


def test_two_cpu_devices_get_64_clients():
    assert capacity() == capacity(clients=9_000) == capacity(chunk=8) == capacity(model=2) == 64
    # A chunk divides each device's share, and a given number is kept.
    assert capacity(clients=1_000, chunk=24) == 96
    assert capacity(clients_per_bucket=6) == 6


def test_devices_that_train_many_clients_side_by_side_get_full_chunks(monkeypatch):
    """But not many more than the plan has, because empty slots take memory, too."""
    monkeypatch.setattr(query, "default_chunk", lambda mesh: 100)
    assert capacity(clients=1_000) == 200
    assert capacity(clients=1_000, model=2) == 100
    assert capacity(clients=60) == 120
    assert capacity(clients=3) == 6


def test_blocks_of_examples_count_and_not_examples(monkeypatch):
    """Few of them get few slots: a block of padding would take memory and time, too."""

    def bounded(broadcast, examples, key):
        return held_vector(broadcast, examples, key)

    bounded.example_bound = 1.0

    def blocks(examples):
        everyone = jp.Plan(
            clip=jp.Clip(1.0), participation=jp.Poisson(examples, examples), rounds=1,
            noise=jp.Noise(1.0), delta=1e-6, unit="example",
        )  # fmt: skip
        execution = Execution(client_mesh(2))
        asked = Query("asked", bounded, everyone, jp.CohortSpec(4, 8), execution=execution)
        return asked.cohort.clients_per_bucket

    assert blocks(33) == 10
    assert blocks(960) == 64
    monkeypatch.setattr(query, "default_chunk", lambda mesh: 100)
    assert blocks(960) == 200


@pytest.mark.parametrize(
    ("settings", "bucket"),
    [
        ({"batch_size": 10**9}, "20 clients with 1 steps of 1,000,000,000 examples"),
        ({"max_examples": 10**10}, "20 clients with 2,500,000,000 steps of 4 examples"),
        ({"epochs": 10**15}, "20 clients with 2,000,000,000,000,000 steps of 4 examples"),
        ({"clients_per_bucket": 10**12}, "1,000,000,000,000 clients with 2 steps of 4 examples"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_bucket_that_no_machine_holds_is_refused_with_its_size(settings, bucket):
    """TRUST 38, 39: before anything of it is allocated."""
    spec = jp.CohortSpec(**{"batch_size": 4, "max_examples": 8, **settings})
    asked = Query("asked", held_vector, plan(clients_per_round=10), spec)
    with pytest.raises(InputError, match=f"'asked': a bucket of {bucket} would take .* GiB"):
        query.require_room(asked, {"x": np.empty((0, 1_000), np.float32)})
