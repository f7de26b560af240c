"""Scores client by client, and clients' own models, against plain loops in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpfl as jp
from jaxpfl.data.selection import random_examples
from jaxpfl.federated import APFL, Ditto, LocalTraining, PersonalParts, Proximal
from tests.algorithms.systems import Linear
from tests.algorithms.test_client_memory import fed_dyn, slope
from tests.algorithms.test_fed_avg_variants import BATCH, EPOCHS, RATE, SIZES, population
from tests.federated.test_local_training import DIM
from tests.refusals import refusal
from tests.trees import assert_same

WEIGHTS = np.linspace(-1.0, 1.0, DIM + 1)
PARAMS = {"w": jnp.float32(WEIGHTS[:-1]), "b": jnp.float32(WEIGHTS[-1])}


def evaluation(clients, batch_size=2):
    public = jp.DeclaredPublic(clients, "test clients")
    return jp.Evaluator(Linear(), public, batch_size=batch_size, max_examples=1)


def mean_loss(client, weights):
    held = population().examples(client)
    x = np.column_stack([np.float64(held["x"]), np.ones(len(held["x"]))])
    return np.mean((x @ weights - np.float64(held["y"])) ** 2) / 2


def test_each_client_is_scored_on_all_its_examples():
    found = evaluation(population()).by_client(PARAMS)
    scored = [client for client, size in enumerate(SIZES) if size]
    assert found.clients.tolist() == scored
    assert found.scores["count"].tolist() == [SIZES[client] for client in scored]
    expected = [mean_loss(client, WEIGHTS) for client in scored]
    np.testing.assert_allclose(found.scores["loss"], expected, rtol=1e-5)


def test_parameters_on_all_devices_are_scored_on_one():
    """The same sums, and no device computes what another one does."""
    mesh = jax.make_mesh((jax.device_count(),), ("clients",))
    everywhere = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    pending, expected = (evaluation(population())(params) for params in (everywhere, PARAMS))
    assert pending.result() == expected.result()
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(pending.sums)} == {1}


@pytest.mark.parametrize("number", [1, 9, 10, 11, 40])
def test_a_distribution_is_that_of_all_pairs_and_of_the_worst(number):
    values = np.random.default_rng(number).gamma(1.0, size=number)
    scores = {"accuracy": values, "loss": values, "count": values}
    found = jp.ClientScores(np.arange(number), scores).distribution()
    pairs = np.mean([abs(a - b) for a, b in itertools.product(values, values)])
    tenth = -(-number // 10)
    assert sorted(found) == ["accuracy", "loss"]
    for name, worst in (("accuracy", sorted(values)[:tenth]), ("loss", sorted(values)[-tenth:])):
        expected = {
            "mean": sum(values) / number,
            **{f"p{each}": np.quantile(values, each / 100) for each in (10, 25, 50, 75, 90)},
            "worst tenth": sum(worst) / tenth,
            "gini": pairs / (2 * np.mean(values)),
        }
        assert found[name] == pytest.approx(expected, abs=1e-12)


def trained(client, pull, most):
    """A client's own model, after training on at most so many of its examples, step by step."""
    own, held = WEIGHTS.copy(), min(SIZES[client], most)
    for _ in range(EPOCHS * -(-held // BATCH)):
        own -= RATE * (slope(client, own) + pull * (own - WEIGHTS))
    return own


@pytest.mark.parametrize("most", [5, 12])
@pytest.mark.parametrize(
    ("client", "pull"),
    [
        (Ditto(Linear(), optax.sgd(RATE), pull=2.0), 2.0),
        (LocalTraining(Linear(), optax.sgd(RATE)), 0.0),
        (LocalTraining(Linear(), optax.sgd(RATE), penalty=Proximal(2.0)), 2.0),
    ],
)
def test_own_models_are_those_of_a_plain_loop(client, pull, most):
    cohort = jp.CohortSpec(BATCH, most, epochs=EPOCHS)
    own = jp.Personal(client, PARAMS, population(), cohort)
    found = evaluation(population()).by_client(own)
    expected = [mean_loss(each, trained(each, pull, most)) for each in found.clients]
    np.testing.assert_allclose(found.scores["loss"], expected, rtol=1e-4, atol=1e-7)
    without = own(SIZES.index(0))
    assert_same(without, PARAMS)


def test_the_model_that_a_client_uses_is_scored_and_not_what_it_keeps():
    """APFL keeps v and uses a mixture; FedPer keeps a part. What FedDyn keeps is no model."""
    cohort = jp.CohortSpec(BATCH, 12, epochs=EPOCHS)
    mixing = APFL(Linear(), optax.sgd(RATE), mix=0.25)
    found = evaluation(population()).by_client(jp.Personal(mixing, PARAMS, population(), cohort))
    for client, loss in zip(found.clients, found.scores["loss"], strict=True):
        own, local = WEIGHTS.copy(), WEIGHTS.copy()
        for _ in range(EPOCHS * -(-SIZES[client] // BATCH)):
            at = 0.25 * own + 0.75 * local
            own, local = own - RATE * 0.25 * slope(client, at), local - RATE * slope(client, local)
        # The shared part of the mixture is what was broadcast.
        assert loss == pytest.approx(mean_loss(client, 0.25 * own + 0.75 * WEIGHTS), rel=1e-4)
    parts = PersonalParts(Linear(), optax.sgd(RATE), own="b")
    model = jp.Personal(parts, PARAMS, population(), cohort)(1)
    np.testing.assert_array_equal(model["w"], PARAMS["w"])
    assert model["b"] != PARAMS["b"]
    dynamic = fed_dyn(alpha=1.0).queries[0].client_fn
    for untrained in (dynamic, optax.sgd(0.1)):
        refusal(lambda fn=untrained: jp.Personal(fn, PARAMS, population(), cohort), "Ditto")


def test_own_models_see_one_part_of_the_examples_and_are_scored_on_the_other():
    """Of clients whose parts differ: who trained on the wrong one would score otherwise."""
    rng = np.random.default_rng(0)
    drawn = [np.float32(rng.normal(size=(20, DIM + 1))) for _ in range(5)]
    clients = jp.data.from_clients(
        {f"client {i}": {"x": xy[:, :DIM], "y": xy[:, DIM]} for i, xy in enumerate(drawn)}
    )
    kept = random_examples(clients, 0.7, seed=0)
    part, rest = clients.keeping(kept), clients.keeping(~kept)
    client, whole = Ditto(Linear(), optax.sgd(RATE), pull=0.5), jp.CohortSpec(20, 20, epochs=30)
    found = evaluation(rest).by_client(jp.Personal(client, PARAMS, part, whole))
    for index, loss in enumerate(found.scores["loss"]):
        held, own = clients.examples(index), WEIGHTS.copy()
        x, y = np.column_stack([held["x"], np.ones(20)]), np.asarray(held["y"], np.float64)
        mine = kept[index * 20 : index * 20 + 20]
        for _ in range(30):
            gradient = (x[mine] @ own - y[mine]) @ x[mine] / mine.sum()
            own -= RATE * (gradient + 0.5 * (own - WEIGHTS))
        assert loss == pytest.approx(np.mean((x[~mine] @ own - y[~mine]) ** 2) / 2, rel=1e-4)
