"""One copy of a model on several devices: the sums, the bits and the places of one device."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxpfl as jp
from jaxpfl.data.cohort import Bucket, CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated import Execution, LocalTraining, Query, client_mesh
from jaxpfl.federated.mesh import shardings
from jaxpfl.federated.release import identity
from jaxpfl.models import adapter_trees
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from tests.federated.cohorts import bucket_of, door, held_vector, no_noise, plan, through
from tests.federated.two_processes import ended, start
from tests.refusals import refusal
from tests.trees import drawn

TINY = DecoderConfig("llama", vocab_size=16, hidden_size=8, layers=2, heads=2, inner_size=16)
MLP = jp.models.MLP(features=6, classes=3, hidden=8)


def lora_training():
    """Clients that tune adapters, the pair (adapters, base) and their token rows."""
    model, params = lora.attach(
        Decoder(TINY), drawn(Decoder(TINY), 0), LoRA(rank=2), jax.random.key(1)
    )
    tokens = np.random.default_rng(0).integers(0, 16, (8, 2, 2, 6)).astype(np.int32)
    training = LocalTraining(model, optax.sgd(0.5), adapters=True)
    return training, adapter_trees.split(params), {"tokens": tokens}


def mlp_training():
    draw = np.random.default_rng(1)
    columns = {
        "features": draw.normal(size=(8, 2, 2, 6)).astype(np.float32),
        "label": draw.integers(0, 3, (8, 2, 2)).astype(np.int32),
    }
    training = LocalTraining(MLP, optax.sgd(0.5, momentum=0.9))
    return training, drawn(MLP, 0), columns


def change(made, mesh, *, clients=8, chunk=None):
    """The clipped sum of clients' changes, of whom some have one step and some two."""
    training, broadcast, columns = made
    count = np.arange(8) < clients
    steps = np.where(count, 1 + np.arange(8) % 2, 0).astype(np.int32)
    mask = np.broadcast_to((np.arange(2)[None] < steps[:, None])[..., None], (8, 2, 2))
    bucket = Bucket(columns, mask, steps, count.astype(np.float32), np.zeros((8, 2), np.uint32))
    contribution = broadcast[0] if training.adapters else broadcast
    settings = dict(cohort=CohortSpec(2, 4), mesh=mesh, chunk=chunk)
    opened = door(training, no_noise(clip_norm=0.2), contribution, **settings)
    broadcast = jax.device_put(broadcast, shardings(training, mesh, broadcast))
    return through(opened, broadcast, [bucket]).value


def stored_sum(mesh, chosen=None, chunk=1):
    """The release of 13 stored vectors, in a leaf that can be split and one that cannot."""

    def stored(broadcast, examples, key):
        value = examples.batches["x"][0, 0]
        return {"a": value[:2500].reshape(50, 50), "b": value[2500:]}

    values = (3 * np.random.default_rng(2).normal(size=(13, 2505))).astype(np.float32)
    shapes = {"a": (50, 50), "b": (5,)}
    like = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    chosen = plan(noise="exact") if chosen is None else chosen
    opened = door(stored, chosen, like, mesh=mesh, chunk=chunk)
    # The second bucket leaves some replicas without a client.
    found = through(opened, (), [bucket_of(values[:8]), bucket_of(values[8:], slots=8)])
    return flat(found.value), np.asarray(found.name)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_exact_sums_and_noise_have_the_bits_of_one_device():
    alone, name = stored_sum(client_mesh(1))
    split, same_name = stored_sum(client_mesh(2, model=2))
    np.testing.assert_array_equal(split, alone)
    np.testing.assert_array_equal(same_name, name)


# As a user's process compiles, which the tests' own flags do not. It prints the sums' bits.
OPTIMISED = """
from tests.federated.test_split_models import client_mesh, stored_sum
for devices, model, chunk in ((1, 1, 1), (1, 1, 2), (1, 1, 8), (2, 2, 1)):
    value, name = stored_sum(client_mesh(devices, model=model), chunk=chunk)
    print(value.tobytes().hex(), name.tolist())
"""


@pytest.mark.long
def test_with_all_optimisations_they_have_these_bits_too():
    """XLA then adds up the squares of a norm in another order in each of these programs."""
    ((code, said, errors),) = ended([start(["-c", OPTIMISED], variables={"XLA_FLAGS": ""})])
    assert code == 0, errors
    bits = said.splitlines()
    assert len(bits) == 4 and len(set(bits)) == 1


@pytest.mark.parametrize(
    "made", [mlp_training, pytest.param(lora_training, marks=pytest.mark.long)], ids=["mlp", "lora"]
)
def test_clients_train_as_on_one_device(made):
    alone = flat(change(made(), client_mesh(1)))
    split = flat(change(made(), client_mesh(2, model=2)))
    assert np.linalg.norm(alone) > 0.1
    np.testing.assert_allclose(split, alone, atol=1e-6 * np.linalg.norm(alone))


def test_each_device_holds_its_part_of_the_frozen_base():
    """A decoder goes by its own rule, heads and inner features; what is trained, too."""
    training, broadcast, _ = lora_training()
    places = shardings(training, client_mesh(2, model=2), broadcast)
    _, base = jax.device_put(broadcast, places)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        kernel = base["layers"][name]["kernel"]
        held = [shard.data.size for shard in kernel.addressable_shards]
        assert held == [kernel.size // 2] * 2
    assert places[0]["down"]["a"].spec == PartitionSpec(None, "model", None)


def test_other_arrays_are_split_along_their_longest_axis_that_can_be():
    mesh = client_mesh(2, model=2)
    shapes = {"a": (3, 8, 4), "b": (4, 5), "c": (5, 7), "d": ()}
    tree = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    found = {name: place.spec for name, place in shardings(None, mesh, tree).items()}
    assert found["a"] == PartitionSpec(None, "model", None)
    assert found["b"] == PartitionSpec("model", None)
    assert found["c"] == found["d"] == PartitionSpec()


MANY = """
import json, sys
from tests.federated.test_split_models import *
rows = []
for devices, model in ((1, 1), (2, 1), (2, 2), (4, 2), (8, 2)):
    mesh = client_mesh(devices, model=model)
    value, name = (part.tobytes().hex() for part in stored_sum(mesh))
    row = {"noise": value, "name": name}
    # Five clients leave replicas with more and with less to do.
    row["mlp"] = flat(change(mlp_training(), mesh, clients=5, chunk=1)).tolist()
    rows.append(row)
for mesh in (client_mesh(1), client_mesh(4, model=2)):
    rows.append({"lora": flat(change(lora_training(), mesh, clients=5, chunk=1)).tolist()})
print(json.dumps(rows))
"""


@pytest.mark.long
def test_many_devices_release_the_bits_of_one_and_train_as_it_does():
    ((code, said, errors),) = ended([start(["-c", MANY], devices=8)])
    assert code == 0, errors
    first, *others, alone, split = json.loads(said.splitlines()[-1])
    assert len(others) == 4
    for row in others:
        for name in ("noise", "name"):
            assert row[name] == first[name]
        np.testing.assert_allclose(row["mlp"], first["mlp"], atol=1e-6)
    np.testing.assert_allclose(split["lora"], alone["lora"], atol=1e-6)


def test_what_cannot_be_split_is_refused():
    refusal(lambda: client_mesh(1, model=2), "model = 2 devices must share each copy has 1 devices")
    refusal(lambda: client_mesh(99), "a mesh of 99 devices was asked for, JAX sees 2")
    other = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    refusal(lambda: Execution(mesh=other), "must have the axis 'clients' found 'data'")
    devices = np.array([[SimpleNamespace(process_index=process) for process in (0, 1)]])
    with pytest.raises(InputError, match="must belong to one process"):
        Execution(mesh=SimpleNamespace(axis_names=("clients", "model"), devices=devices))


def test_the_shape_of_the_mesh_is_part_of_a_releases_identity():
    """Devices of one replica round otherwise than two replicas do."""

    def described(mesh):
        asked = Query("asked", held_vector, plan(), CohortSpec(1, 1), execution=Execution(mesh))
        return identity.described(asked, "", "", "", None)

    meshes = client_mesh(1), client_mesh(2), client_mesh(2, model=2)
    assert len({described(mesh) for mesh in meshes}) == 3
