"""A run goes on with the clients with which it began, or not at all."""

from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl import files
from jaxpfl.algorithms import Algorithm
from jaxpfl.data import Population
from tests.refusals import refusal

NUMBER, ROUNDS = 12, 3


class Keeps:
    """Sends 1 where the state that it is given is not its own."""

    def client_state(self, broadcast):
        return jnp.float32(-1)

    def __call__(self, broadcast, state, examples, key):
        own = jnp.where(examples.mask, examples.batches["x"], 0).sum()
        return jnp.where((state >= 0) & (state != own), 1.0, 0.0), own


KEEPS = Keeps()


def people(numbers, name="person {}", values=None) -> Population:
    """Each holds its number, a hundredth of it."""
    held = np.asarray(numbers if values is None else values, np.float32)[:, None] / 100
    names = [name.format(number) for number in numbers]
    return Population({"x": held}, np.arange(len(names) + 1), names)


EVERYBODY = people(range(2 * NUMBER))


def algorithm(fails: int | None) -> Algorithm:
    """The sum of what clients send; its step fails in a round, before it asks."""
    plan = jp.Plan(ROUNDS, jp.Clip(1.0), jp.Noise(1e-3), jp.Poisson(NUMBER, NUMBER), 1e-3)
    query = jp.Query("sum", KEEPS, plan, jp.CohortSpec(1, 1))

    def step(state, release, round):
        if round == fails:
            raise RuntimeError("stop")
        return state + np.asarray(release(query).value), {}

    return Algorithm("a", lambda key: jnp.float32(0), step, (query,))


def run(folder, clients, fails=None, resume=True, out="run"):
    return jp.run(
        algorithm(fails), clients, ledger=folder / "ledger.jsonl", out=folder / out, every=1,
        resume=resume,
    )  # fmt: skip


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    "others",
    [
        lambda clients: clients.select(np.arange(NUMBER)[::-1]),
        lambda clients: EVERYBODY.select(np.arange(NUMBER, 2 * NUMBER)),
        lambda clients: EVERYBODY.select([*range(NUMBER - 1), NUMBER]),
        lambda clients: clients.with_columns({"x": clients.columns["x"] * 2}),
        lambda clients: clients.with_columns({"x": clients.columns["x"], "y": np.zeros(NUMBER)}),
    ],
    ids=["order", "others", "another", "data", "columns"],
)
def test_other_clients_or_the_same_in_another_order_are_refused(others, finished, tmp_path):
    """TRUST 55: before anything is charged; with the first ones it goes on to the same end."""
    clients = EVERYBODY.select(range(NUMBER))
    with nullcontext() if finished else pytest.raises(RuntimeError, match="stop"):
        run(tmp_path, clients, fails=None if finished else 2, resume=False)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    words = "clients are not those with which the run"
    assert "person" not in refusal(lambda: run(tmp_path, others(clients)), words)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    found = run(tmp_path, clients)
    assert abs(float(found.state)) < 0.1
    assert len(jp.Ledger.read(tmp_path / "ledger.jsonl").charges) == ROUNDS


def test_a_record_shows_nothing_of_its_clients(tmp_path):
    """Equal clients have another hash in each run, on one ledger, too."""
    hashes = set()
    for name in ("one", "two"):
        run(tmp_path, EVERYBODY.select(range(NUMBER)), resume=False, out=name)
        hashes.add(files.read_json(tmp_path / name / "run.json")["origin"])
    assert len(hashes) == 2
