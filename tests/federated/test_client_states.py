"""What clients keep between rounds: their own alone, as on one device, and back after a crash."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data import CohortSpec, Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.federated import Execution, Query, Releaser, RunSecret, client_mesh
from jaxpfl.federated.release.client_states import ClientStates
from jaxpfl.privacy import Ledger
from tests.plans import flat_plan, flat_without_privacy

# In four rounds of a quarter of so many clients, some take part twice and some never: all of them
# do, or none twice, on fewer than one machine in 10^8.
NUMBER, TAKEN, ROUNDS, CLIP = 64, 16, 4, 0.5
SAME = RunSecret.reproducible(0)


def population() -> Population:
    """Client k holds 1 + k % 3 examples, each the number k."""
    sizes = 1 + np.arange(NUMBER) % 3
    edges = np.concatenate([[0], np.cumsum(sizes)])
    held = {"x": np.repeat(np.arange(NUMBER, dtype=np.float32), sizes)}
    return Population(held, edges, [f"client {k}" for k in range(NUMBER)], name="numbers")


@dataclasses.dataclass(frozen=True)
class Counting:
    """A client says who it is, times its rounds so far; it keeps both, and what it was sent."""

    def client_state(self, broadcast):
        return {"me": jnp.int32(-1), "rounds": jnp.int32(0), "sent": jnp.zeros_like(broadcast)}

    def __call__(self, broadcast, state, examples, key):
        me = examples.batches["x"][0, 0].astype(jnp.int32)
        rounds = state["rounds"] + jnp.int32(1)
        said = jax.nn.one_hot(me, NUMBER, dtype=jnp.float32) * rounds.astype(jnp.float32)
        # Whoever gets another's state says so for ever.
        mine = (state["me"] == -1) | (state["me"] == me)
        said = jnp.where(mine, said, jnp.float32(1e3))
        return said, {"me": me, "rounds": rounds, "sent": broadcast}


@dataclasses.dataclass(frozen=True)
class Summing:
    """By steps: sends its number and key's draws; keeps the sum of what was added up for it."""

    bad: int = -1

    def client_state(self, broadcast):
        return jnp.zeros(2, jnp.float32)

    def init(self, broadcast, client_state, key):
        return client_state, jnp.zeros(2, jnp.float32)

    def step(self, broadcast, state, batch, mask, key):
        drawn = jax.random.normal(key, dtype=jnp.float32)
        return state[0], state[1] + jnp.stack([jnp.sum(batch["x"]) + 1, drawn])

    def finish(self, broadcast, state):
        _, sent = state
        return jnp.where(jnp.abs(sent[0] - 1 - self.bad) < 0.5, jnp.nan, sent)

    def keep(self, broadcast, state, sent):
        return state[0] + sent


@dataclasses.dataclass(frozen=True)
class Keeping(Summing):
    """Keeps what it computed, whatever was added up."""

    def keep(self, broadcast, state, sent):
        return state[0] + state[1]


def query(client_fn=Counting(), clip_norm=1e6, taken=TAKEN, execution=Execution(), **changes):  # noqa: B008
    plan = flat_without_privacy(
        population=NUMBER, clients_per_round=taken, rounds=ROUNDS, clip_norm=clip_norm
    )
    spec = CohortSpec(2, 4, clients_per_bucket=8)
    return Query("asked", client_fn, changes.get("plan", plan), spec, execution=execution)


def asked(asked, folder, *, rounds=range(1, ROUNDS + 1), done=0, broadcast=1.0):
    """The values of rounds, and the releaser, which is still good for its clients' states."""
    with Ledger(folder / "ledger.jsonl", population()) as ledger:
        states = folder / "states", done
        releaser = Releaser(
            population(), ledger, SAME, run="run", warn=lambda _: None, states=states
        )
        values = []
        for round in rounds:
            sent = jnp.full(2, broadcast * round, jnp.float32)
            values.append(np.asarray(releaser.release(asked, sent, round=round).value))
    return values, releaser, ledger


def kept(releaser, clients=None):
    (states,) = releaser.client_states
    return states.rows(np.arange(NUMBER) if clients is None else clients)


LAYOUTS = [
    pytest.param(Execution(client_mesh(1), chunk=1), id="alone"),
    pytest.param(Execution(client_mesh(1), chunk=4), id="side by side"),
    pytest.param(Execution(), id="devices"),
    pytest.param(Execution(client_mesh(2, model=2)), id="split models", marks=pytest.mark.long),
]


@pytest.mark.parametrize("execution", LAYOUTS)
def test_each_client_gets_its_own_state_back(execution, tmp_path):
    values, releaser, _ = asked(query(execution=execution), tmp_path)
    rows, new = kept(releaser)
    rounds, last = np.zeros(NUMBER, int), np.zeros(NUMBER)
    for number, value in enumerate(values, 1):
        took_part = value > 0
        rounds[took_part] += 1
        last[took_part] = number
        np.testing.assert_array_equal(value[took_part], rounds[took_part])
    assert 0 < np.sum(rounds == 0) and rounds.max() > 1
    np.testing.assert_array_equal(new, rounds == 0)
    np.testing.assert_array_equal(rows["rounds"], rounds)
    np.testing.assert_array_equal(rows["sent"][:, 0], last)
    np.testing.assert_array_equal(rows["me"][~new], np.arange(NUMBER)[~new])


@pytest.mark.parametrize("execution", LAYOUTS)
def test_a_state_moves_by_what_was_added_up(execution, tmp_path):
    """After the clip: the states' sum is that of all releases."""
    values, releaser, _ = asked(query(Summing(), CLIP, execution=execution), tmp_path)
    rows, _ = kept(releaser)
    assert np.linalg.norm(rows, axis=1).max() > 1.9 * CLIP
    np.testing.assert_allclose(rows.sum(axis=0), np.sum(values, axis=0), rtol=1e-5, atol=1e-6)


def test_a_contribution_that_is_not_finite_leaves_the_state_as_it_was(tmp_path):
    """TRUST 9: it counts as zero, and nothing of it remains."""
    values, releaser, _ = asked(query(Keeping(bad=0), CLIP, taken=NUMBER), tmp_path)
    rows, new = kept(releaser)
    assert not new.any() and np.isfinite(rows).all() and np.isfinite(values).all()
    bad = np.flatnonzero(np.all(rows == 0, axis=1))
    assert bad.size == 1
    assert np.linalg.norm(np.delete(rows, bad, axis=0), axis=1).min() > 1.9 * CLIP


def test_rounds_after_a_crash_are_the_same_releases(tmp_path):
    values, releaser, ledger = asked(query(), tmp_path)
    charges, rows = len(ledger.charges), kept(releaser)[0]
    # As if it had been killed while it wrote.
    with (tmp_path / "states" / "rows").open("r+b") as file:
        for path in (tmp_path / "states").glob("0000000[34].*"):
            content = path.read_bytes()[32:]  # after whose they are
            for place in np.frombuffer(content, np.int64, len(content) // (8 + 24)).tolist():
                file.seek(24 * place + 5)
                file.write(bytes(range(17)))
    again, releaser, ledger = asked(query(), tmp_path, rounds=[3, 4], done=2)
    np.testing.assert_array_equal(again, values[2:])
    assert len(ledger.charges) == charges
    jax.tree.map(np.testing.assert_array_equal, kept(releaser)[0], rows)


def private():
    sizes = dict(population=NUMBER, clients_per_round=NUMBER // 2, rounds=ROUNDS)
    return query(Summing(), plan=flat_plan(**sizes, clip_norm=CLIP, delta=1e-3))


def test_other_states_make_another_release_which_is_charged(tmp_path):
    """A replay whose states have another history is a round of its own, not a free one."""
    _, _, ledger = asked(private(), tmp_path)
    charges = len(ledger.charges)
    with pytest.raises(InputError, match="round 2 cannot be asked after round 2"):
        asked(private(), tmp_path, rounds=[2], done=2)
    (path,) = (tmp_path / "states").glob("00000002.*")
    path.rename(path.with_suffix("." + 64 * "0"))
    _, _, ledger = asked(private(), tmp_path, rounds=[3], done=2)
    assert len(ledger.charges) == charges + 1


def test_what_no_round_can_need_again_is_deleted_and_what_is_gone_is_missed(tmp_path):
    _, releaser, _ = asked(query(taken=NUMBER), tmp_path)
    (states,) = releaser.client_states
    rows = kept(releaser)[0]
    states.sync()
    states.forget(3)
    folder = tmp_path / "states"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.stem for path in folder.iterdir()) == ["00000003", "00000004", "rows"]
    jax.tree.map(np.testing.assert_array_equal, kept(releaser)[0], rows)
    _, releaser, _ = asked(query(taken=NUMBER), tmp_path, rounds=[4], done=3)
    jax.tree.map(np.testing.assert_array_equal, kept(releaser)[0], rows)
    (path,) = folder.glob("00000004.*")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match=path.name):
        asked(query(taken=NUMBER), tmp_path, rounds=[4], done=3)
    shutil.rmtree(folder)
    with pytest.raises(CorruptFile, match="after round 3 are not here, the last are of round 0"):
        asked(query(taken=NUMBER), tmp_path, rounds=[4], done=3)


def test_the_store_is_what_a_dictionary_is(tmp_path):
    """Of any dtypes and shapes; also after it was opened anew, at any round."""
    rng, shape = np.random.default_rng(0), jax.ShapeDtypeStruct
    like = {
        "a": shape((3, 2), jnp.float32), "b": shape((), jnp.bfloat16),
        "c": shape((5,), bool), "d": shape((0, 2), jnp.int32),
    }  # fmt: skip
    ids = [f"client {k}" for k in range(9)]
    states, held = ClientStates((tmp_path, 0, b"key"), ids, like), [dict()]
    for round in range(1, 8):
        clients = rng.permutation(9)[: rng.integers(0, 4)]
        new = {
            name: rng.integers(0, 2, (len(clients), *leaf.shape)).astype(leaf.dtype)
            for name, leaf in like.items()
        }
        states.write(round, clients, new)
        rows = {c: {name: leaf[i] for name, leaf in new.items()} for i, c in enumerate(clients)}
        held.append(held[-1] | rows)
    states.sync()
    states.forget(5)
    for round in (7, 6, 5):
        opened = ClientStates((tmp_path, round, b"key"), ids, like)
        rows, new = opened.rows(np.array([*range(9), -1]))
        assert [c for c in range(9) if not new[c]] == sorted(held[round]) and new[9]
        for client, expected in held[round].items():
            for name, value in expected.items():
                assert rows[name].dtype == like[name].dtype
                np.testing.assert_array_equal(rows[name][client], value)


def test_a_state_is_found_by_the_id_of_its_client(tmp_path):
    """TRUST 55: in every order of the clients. Those of others, or under another key, are not."""
    like, ids = jax.ShapeDtypeStruct((), jnp.float32), [f"client {k}" for k in range(9)]
    states = ClientStates((tmp_path, 0, b"key"), ids, like)
    states.write(1, np.array([7, 0, 3]), np.float32([7, 0, 3]))
    states.write(2, np.array([3, 5]), np.float32([33, 5]))
    states.sync()
    order = np.random.default_rng(0).permutation(9)
    shuffled = [ids[k] for k in order]
    others = ([*ids[:8], "somebody else"], ids[:8], [*ids, "one more"])
    for each, key in [*((each, b"key") for each in others), (ids, b"another key")]:
        for round in (2, 1):
            with pytest.raises(InputError, match="of other clients"):
                ClientStates((tmp_path, round, key), each, like)
    for round, expected in ((2, {7: 7, 0: 0, 3: 33, 5: 5}), (1, {7: 7, 0: 0, 3: 3})):
        opened = ClientStates((tmp_path, round, b"key"), shuffled, like)
        rows, new = opened.rows(np.arange(9))
        assert {int(order[k]): float(rows[k]) for k in np.flatnonzero(~new)} == expected


def test_states_are_told_apart_by_what_they_are(tmp_path):
    """Of the same clients in the same round: another state makes another release."""
    like, ids = jax.ShapeDtypeStruct((), jnp.float32), ["a", "b", "c"]
    found = []
    for clients, values in (([0, 1], [1, 2]), ([0, 1], [1, 2.0000002]), ([0, 2], [1, 2])) * 2:
        states = ClientStates((tmp_path / str(len(found)), 0, b"key"), ids, like)
        states.write(1, np.array(clients), np.float32(values))
        found.append(states.before(2))
    assert len(set(found)) == 3 and found[:3] == found[3:]


def test_states_that_cannot_be_kept_are_refused_before_a_charge(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Wider(Counting):
        def client_state(self, broadcast):
            return {**super().client_state(broadcast), "more": jnp.float32(0)}

    @dataclasses.dataclass(frozen=True)
    class Keyed:
        def client_state(self, broadcast):
            return jax.random.key(0)

        def __call__(self, broadcast, state, examples, key):
            return jnp.float32(0), state

    for client_fn, message in (
        (Wider(), "like that of client_state"),
        (Keyed(), "key_data of a key"),
    ):
        with pytest.raises(InputError, match=message):
            asked(query(client_fn), tmp_path)
    with Ledger(tmp_path / "ledger.jsonl", population()) as ledger:
        assert not ledger.charges
    of_examples = dataclasses.replace(query().plan, unit="example")
    with pytest.raises(InputError, match="needs unit = 'client'"):
        query(plan=of_examples)
