"""What clients' own models predict, beside plain loops in float64; where it is written."""

import csv
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl import models
from jaxpfl.cli import main
from tests.refusals import refusal

RATE, PULL, EPOCHS = 0.5, 0.7, 3
FIELDS = "label=y&features=x,z"
CONFIG = """\
data: {source: "own.csv?label=y&features=x,z", split: {train: 1.0, valid: 0.0, test: 0.0}}
model: {name: classifier_mlp, features: 2, classes: 2, hidden: 0}
privacy: {private: false, clip_norm: 10.0}
training: {rounds: 2, clients_per_round: 6, batch_size: 32, max_examples: 32, epochs: 3,
           client: {name: sgd, learning_rate: 0.5}, algorithm: ALGORITHM}
evaluation: {every: 0}
run: {devices: 2}
"""
DRAWN = np.random.default_rng(0).normal(size=(6, 10, 2)).round(3)
LABELS = [(rows[:, 0] > 0).astype(int) ^ client % 2 for client, rows in enumerate(DRAWN)]
NEW = [(f"u{client}", x, 0.25) for x in (-1.0, 2.0) for client in (1, 0, 4)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("own.csv", "w") as file:
        file.write("client,z,x,y\n")
        for client, (rows, labels) in enumerate(zip(DRAWN, LABELS, strict=True)):
            for (x, z), y in zip(rows, labels, strict=True):
                file.write(f"u{client},{z},{x},{y}\n")
    with open("new.csv", "w") as file:
        file.write("client,x,z\n" + "".join(f"{c},{x},{z}\n" for c, x, z in NEW))
        file.write("stranger,1.0,0.25\n")
    return tmp_path


def logs(weights, rows):
    logits = np.arcsinh(np.atleast_2d(rows)) @ weights[:2] + weights[2]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def weights_of(params):
    layer = params["layer_0"]
    return np.float64(np.concatenate([layer["kernel"], np.atleast_2d(layer["bias"])]))


def loss(weights, client):
    return -logs(weights, DRAWN[client])[np.arange(10), LABELS[client]].mean()


def trained(weights, client):
    """Ditto's own model of a client that takes part once, with all its rows in each batch."""
    own = weights.copy()
    x = np.column_stack([np.arcsinh(DRAWN[client]), np.ones(10)])
    for _ in range(EPOCHS):
        slope = x.T @ (np.exp(logs(own, DRAWN[client])) - np.eye(2)[LABELS[client]]) / 10
        own -= RATE * (slope + PULL * (own - weights))
    return own


def predictions(run):
    (path,) = (run / "private").glob("predictions*.csv")
    assert path.stat().st_mode & 0o77 == 0
    with open(path) as file:
        return list(csv.DictReader(file))


def same(rows, weights_by_client):
    """Each client's rows, by its own weights, in the table's order."""
    for row in rows:
        own = [
            (x, z) for client, x, z in [*NEW, ("stranger", 1.0, 0.25)] if client == row["client"]
        ]
        expected = np.exp(logs(weights_by_client(row["client"]), own[int(row["row"]) - 1]))[0]
        found = [float(row[f"probability_{label}"]) for label in (0, 1)]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        assert int(row["label"]) == expected.argmax()
    assert len(rows) == len(NEW) + 1


def test_ditto_predicts_by_each_clients_own_model_and_exports_none(folder, capsys):
    (folder / "ditto.yaml").write_text(CONFIG.replace("ALGORITHM", "{name: ditto, mu: 0.7}"))
    run = folder / "ditto"
    assert main(["run", "ditto.yaml", "--out", str(run)]) == 0
    command = ["predict", str(run), "new.csv", "--own", f"own.csv?{FIELDS}"]
    assert main([*command, "--out", "open.csv"]) == 2
    assert not (folder / "open.csv").exists()
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr()
    assert "stranger" not in said.out + said.err
    assert "1 clients have no rows" in said.err
    assert main(["export", str(run), "exported"]) == 0
    assert not list((folder / "exported").rglob("*predict*"))
    shared = weights_of(jp.load("exported").params)
    own = {f"u{client}": trained(shared, client) for client in range(6)}
    same(predictions(run), lambda client: own.get(client, shared))
    assert len({tuple(weights.ravel()) for weights in own.values()}) == 6
    for swapped in ("own.csv?label=y&features=z,x", f"own.csv?{FIELDS}&classes=1,0"):
        assert main([*command[:-1], swapped]) == 2
        assert "in their order" in capsys.readouterr().err
    assert main(command) == 0
    assert len(list((run / "private").glob("predictions*.csv"))) == 2


def test_a_run_without_own_models_says_so(folder, capsys):
    (folder / "plain.yaml").write_text(CONFIG.replace("ALGORITHM", "{name: fed_avg}"))
    assert main(["run", "plain.yaml", "--out", "plain"]) == 0
    assert main(["predict", "plain", "new.csv", "--own", f"own.csv?{FIELDS}"]) == 2
    assert "ditto or apfl" in capsys.readouterr().err


def test_ifca_exports_its_models_and_each_client_uses_the_one_that_fits_it(folder):
    clients, model = jp.data.open(f"own.csv?{FIELDS}"), models.MLP(features=2, classes=2, hidden=0)
    kernel = np.float32(np.random.default_rng(1).normal(size=(2, 2, 2)))
    start = {"layer_0": {"kernel": jnp.array(kernel), "bias": jnp.zeros((2, 2))}}
    algorithm = jp.algorithms.ifca(
        model,
        clusters=2,
        client=optax.sgd(RATE),
        server=optax.sgd(2.0),
        plan=jp.Plan.without_privacy(rounds=3, participation=jp.Poisson(6, 6)),
        start=start,
    )
    result = jp.run(algorithm, clients, ledger="ledger.jsonl", out="ifca")
    assert main(["export", "ifca", "exported"]) == 0
    refusal(lambda: jp.load("exported"), "exported/cluster_1 exported/cluster_2")
    clusters = []
    for number in (1, 2):
        params = jp.load(f"exported/cluster_{number}").params
        np.testing.assert_array_equal(
            params["layer_0"]["kernel"], result.params["layer_0"]["kernel"][number - 1]
        )
        clusters.append(weights_of(params))
    best = [int(np.argmin([loss(weights, client) for weights in clusters])) for client in range(6)]
    assert {*best} == {0, 1}
    client_fn: Any = algorithm.queries[0].client_fn
    personal = jp.Personal(client_fn, result.params, clients, jp.CohortSpec(4, 32))
    for client, index in enumerate(best):
        np.testing.assert_allclose(weights_of(personal(client)), clusters[index], rtol=1e-6)
    assert main(["predict", "ifca", "new.csv?features=x,z", "--own", f"own.csv?{FIELDS}"]) == 0
    rows = predictions(folder / "ifca")
    same(rows, lambda client: clusters[best[int(client[1:])] if client[1:].isdigit() else 0])
    (folder / "ifca/model/cluster_1/model.safetensors").write_bytes(b"")
    shutil.rmtree(folder / "ifca/private")
    assert main(["predict", "ifca", "new.csv?features=x,z", "--own", f"own.csv?{FIELDS}"]) == 2
