"""Scores by groups of clients: whom noise harms, against a plain loop."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.data.columns import text_array
from jaxpfl.experiments.engine.by_client import SIMULATION
from tests.algorithms.systems import Linear
from tests.algorithms.test_fed_avg_variants import SIZES, population
from tests.federated.test_local_training import DIM
from tests.refusals import refusal

OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
GROUP = ["south" if client % 3 else "north" for client in range(len(SIZES))]


def models():
    draws = np.random.default_rng(0).normal(size=(3, DIM + 1))
    return [{"w": jnp.float32(own[:-1]), "b": jnp.float32(own[-1])} for own in draws], draws


def clients(of_example):
    held = population()
    return held.with_columns({**held.columns, "region": of_example})


def grouped(of_example=None):
    if of_example is None:
        of_example = text_array(
            [g for g, size in zip(GROUP, SIZES, strict=True) for _ in range(size)]
        )
    (private, untrained, noiseless), _ = models()
    public = jp.DeclaredPublic(clients(of_example), "test clients")
    evaluator = jp.Evaluator(Linear(), public, batch_size=2)
    return evaluator.by_group("region", private, untrained=untrained, noiseless=noiseless)


def test_each_group_has_the_mean_of_its_clients_for_each_model():
    found, (_, draws) = grouped(), models()
    names = ("with noise", "untrained", "without noise")
    for name, weights in zip(names, draws, strict=True):
        for group in ("north", "south"):
            own = []
            for client, size in enumerate(SIZES):
                if size and GROUP[client] == group:
                    held = population().examples(client)
                    x = np.column_stack([np.float64(held["x"]), np.ones(size)])
                    own.append(np.mean((x @ weights - np.float64(held["y"])) ** 2) / 2)
            assert found.means[name][group]["loss"] == pytest.approx(np.mean(own), rel=1e-5)
            assert found.clients[group] == len(own)
    for row in found.rows("loss"):
        assert row["cost of noise"] == row["with noise"] - row["without noise"]
    # It is said to be a simulation wherever it is shown.
    assert str(found).startswith(SIMULATION)


def test_groups_may_be_numbers():
    numbers = np.repeat([int(group == "south") for group in GROUP], SIZES)
    found = grouped(numbers)
    assert set(found.clients) == {"0", "1"}
    assert found.means["with noise"]["1"] == grouped().means["with noise"]["south"]


def test_a_client_of_two_groups_is_refused_without_its_values():
    first = next(client for client, size in enumerate(SIZES) if size > 1)
    mixed = [f"group {client}" for client, size in enumerate(SIZES) for _ in range(size)]
    mixed[OFFSETS[first]] = "a private word"
    said = refusal(lambda: grouped(text_array(mixed)), f"'region' client {first}")
    assert "a private word" not in said
    evaluator = jp.Evaluator(Linear(), jp.DeclaredPublic(population(), "t"), batch_size=2)
    (one, *_), _ = models()
    refusal(
        lambda: evaluator.by_group("region", one, untrained=one, noiseless=one),
        "no column 'region'",
    )
