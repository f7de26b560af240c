"""Mistakes in Python: each is an `InputError` that says what was found and what to do."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest

import jaxpfl as jp
from jaxpfl.algorithms import Algorithm

CLIENTS = 12
IMAGES = {
    f"c{number}": {"image": np.zeros((2, 8, 8, 1), np.float32), "label": np.array([0, number % 3])}
    for number in range(CLIENTS)
}
MODEL = jp.models.classifier_cnn((8, 8, 1), 3)
SGD = optax.sgd(0.1)
SPECIAL = ("<unused>", "<bos>", "<eos>", "<oov>")


def population() -> jp.data.Population:
    return jp.data.from_clients(IMAGES)


def plan(**changes: Any) -> jp.Plan:
    given = {
        "epsilon": 8.0,
        "delta": 1e-3,
        "rounds": 1,
        "clip": jp.Clip(1.0),
        "participation": jp.Poisson(CLIENTS, 4),
        "accountant": "rdp",
    }
    return jp.Plan.calibrated(**{**given, **changes})


def fed_avg(model: Any = MODEL, **changes: Any) -> Any:
    given = {"client": SGD, "server": SGD, "plan": plan()}
    return jp.algorithms.fed_avg(model, **{**given, **changes})


def run(**changes: Any) -> Any:
    given = {"algorithm": fed_avg(), "clients": population(), "ledger": "ledger", "out": "out"}
    return jp.run(**{**given, **changes})


@dataclasses.dataclass
class Unhashable:
    factor: float = 1.0

    def __call__(self, broadcast: Any, examples: Any, key: Any) -> Any:
        return jnp.zeros(2) * self.factor


def release(client_fn: Any = lambda broadcast, examples, key: jnp.zeros(2), **changes: Any) -> Any:
    given = {"clients": population(), "plan": plan(), "ledger": "ledger"}
    return jp.release(client_fn, **{**given, **changes})


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a number as a source": (lambda: jp.data.open(5), "source path int"),  # pyright: ignore
    "a partition by its name": (
        lambda: jp.data.partition(population(), "dirichlet"),  # pyright: ignore
        "scheme Dirichlet found 'dirichlet'",
    ),
    "a vocabulary of two": (
        lambda: jp.text.Vocabulary.from_public("docstrings:numpy", 2),
        "size found 2",
    ),
    "images given to a vocabulary": (
        lambda: jp.text.Vocabulary(SPECIAL, (0,) * 4, "public").encode(population()),
        "'text' image",
    ),
    "a negative epsilon": (lambda: plan(epsilon=-1.0), "epsilon positive -1"),
    "epsilon as text": (lambda: plan(epsilon="8"), "epsilon number '8'"),
    "epsilon NaN": (lambda: plan(epsilon=float("nan")), "epsilon finite nan"),
    "a large delta": (lambda: plan(delta=0.5), "delta smaller"),
    "half a round": (lambda: plan(rounds=1.5), "rounds whole number 1.5"),
    "a number as the clip": (lambda: plan(clip=1.0), "clip Clip found float"),
    "a clip norm of 0": (lambda: jp.Clip(0.0), "clip_norm positive"),
    "a number as participation": (lambda: plan(participation=4), "Poisson found int"),
    "more clients than there are": (
        lambda: plan(participation=jp.Poisson(CLIENTS, 20)),
        "20 population of 12",
    ),
    "a learning rate as the optimiser": (lambda: fed_avg(client=0.1), "client optax float"),
    "an optimiser's name": (lambda: fed_avg(server="sgd"), "server optax str"),
    "a model's name": (lambda: fed_avg("cnn"), "model jaxpfl.models str"),
    "a model's class": (lambda: fed_avg(jp.models.CNN), "model settings CNN"),
    "epsilon as the plan": (lambda: fed_avg(plan=8.0), "plan jaxpfl.Plan float"),
    "a plan of another population": (
        lambda: run(algorithm=fed_avg(plan=plan(participation=jp.Poisson(50, 4)))),
        "population of 50 another",
    ),
    "a dictionary of clients": (lambda: run(clients=IMAGES), "clients from_clients dict"),
    "clients without the column": (
        lambda: run(clients=jp.data.from_clients({c: {"x": np.zeros(2)} for c in IMAGES})),
        "'image' found x",
    ),
    "images of another shape": (
        lambda: run(algorithm=fed_avg(jp.models.classifier_cnn((28, 28, 1), 3))),
        "'image' [28, 1] [8, 1]",
    ),
    "too few classes": (
        lambda: run(algorithm=fed_avg(jp.models.classifier_cnn((8, 8, 1), 2))),
        "classes = 2 'label' larger",
    ),
    "a vocabulary larger than the model's": (
        lambda: run(
            algorithm=fed_avg(jp.models.CIFGLanguageModel(vocab_size=9)),
            clients=jp.data.from_clients(
                {c: {"tokens": np.full((1, 4), 40, np.int32)} for c in IMAGES}
            ),
        ),
        "vocab_size = 9 'tokens' larger",
    ),
    "text without a vocabulary": (
        lambda: run(
            algorithm=fed_avg(jp.models.CIFGLanguageModel(vocab_size=9)),
            clients=jp.data.from_clients({c: {"text": ["a b"]} for c in IMAGES}),
        ),
        "text tokens vocabulary PUBLIC",
    ),
    "evaluation on the clients": (
        lambda: run(evaluation=jp.Evaluator(MODEL, jp.DeclaredPublic(population(), "mine"))),
        "mine private clients",
    ),
    "declared public, but no population": (
        lambda: jp.DeclaredPublic([1]),  # pyright: ignore
        "Population list",
    ),
    "a population as the evaluation": (
        lambda: run(evaluation=population()),
        "evaluation jaxpfl.Evaluator Population",
    ),
    "a number as the budget": (lambda: run(budget=8.0), "budget jaxpfl.Budget float"),
    "every round 0": (lambda: run(every=0), "every at least 1"),
    "a seed as text": (lambda: run(seed="a"), "seed whole number 'a'"),
    "a release in several rounds": (lambda: release(plan=plan(rounds=2)), "rounds = 1 found 2"),
    "a release of no function": (lambda: release(5), "client_fn function int"),
    "a function of one argument": (lambda: release(lambda examples: 0.0), "broadcast examples key"),
    "a function that cannot be hashed": (lambda: release(Unhashable()), "hashable Unhashable"),
    "a function that returns text": (lambda: release(lambda b, e, k: "a"), "float arrays str"),
    "a function that returns whole numbers": (
        lambda: release(lambda b, e, k: jnp.zeros(2, jnp.int32)),
        "float arrays int32",
    ),
    "a missing column": (lambda: release(lambda b, e, k: e.batches["img"]), "'img' image, label"),
    "a number as a column": (
        lambda: jp.data.from_clients({"a": {"x": 3.0}}),
        "client 0 'x' axis single value",
    ),
    "one column as a table": (lambda: jp.data.from_dataframe(pd.Series(["a"])), "found Series"),
    "a text to encode": (
        lambda: jp.text.Vocabulary(SPECIAL, (0,) * 4, "public").encode("a b"),  # pyright: ignore
        "encoded Population str",
    ),
    "no model to evaluate": (
        lambda: jp.Evaluator(None, jp.DeclaredPublic(population())),  # pyright: ignore
        "model jaxpfl.models NoneType",
    ),
    "a loss of one argument": (
        lambda: jp.models.from_functions(lambda key: 0, lambda batch: 0),  # pyright: ignore
        "loss function (params, batch) too many",
    ),
    "no directory": (lambda: run(out=None), "out path NoneType"),
    "a word to call after a round": (lambda: run(on_round="stop"), "on_round (round) 'stop'"),
    "a step of two arguments": (
        lambda: run(algorithm=fed_avg()._replace(step=lambda state, release: None)),
        "step 'fed_avg' (state, release, round)",
    ),
    "a function as a query": (
        lambda: run(algorithm=fed_avg()._replace(queries=(jnp.zeros,))),
        "queries jaxpfl.Query",
    ),
    "a ledger that is not there": (lambda: jp.Ledger.read("absent.jsonl"), "absent.jsonl ledger"),
    "no ledger": (lambda: jp.Ledger.read(None), "path ledger NoneType"),  # pyright: ignore
    "a client's id": (lambda: population().examples("c1"), "client number 'c1'"),  # pyright: ignore
    "nowhere to save": (lambda: population().save(None), "folder NoneType"),  # pyright: ignore
}


# What a step returns, and what the message says; the state before it is {"x": zeros [3]}.
STATE = {"x": jnp.zeros(3)}
STEPS: list[tuple[Any, str]] = [
    (STATE, "(state, metrics) found dict"),
    ((STATE, 3.0), "(state, metrics) found dict, float"),
    ((STATE, {"m": jnp.zeros(3)}), "metric 'm' number found [0. 0. 0.]"),
    (({"y": jnp.zeros(3)}, {}), "state 'x' None float32"),
    (({"x": 0.0}, {}), "state 'x' 'float' expected 'float32'"),
]


@pytest.mark.parametrize(("returned", "said"), STEPS, ids=[said for _, said in STEPS])
def test_what_a_step_returns_is_checked(returned, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = jp.Query("q", lambda b, e, k: jnp.zeros(2), plan(), jp.CohortSpec(2, 2))
    algorithm = Algorithm("own", lambda key: STATE, lambda s, release, r: returned, (asked,))
    with pytest.raises(jp.InputError) as caught:
        run(algorithm=algorithm)
    assert "\n" not in str(caught.value)
    for word in said.split():
        assert word in str(caught.value)
    assert not (tmp_path / "out").exists()  # nothing was charged


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, said = MISTAKES[name]
    with pytest.raises(jp.InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in said.split():
        assert word in message
    # Nothing was charged, and no run was begun.
    assert not list(tmp_path.rglob("run.json"))
    assert not (tmp_path / "ledger").exists() or len(jp.Ledger.read(tmp_path / "ledger")) == 0
