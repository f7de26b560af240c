"""What a broadcast may hold: numbers are arrays, and anything else is refused before a charge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from jaxpfl.federated import check_information_flow
from tests.federated.releases import sum_by

PLAN = jp.Plan(1, jp.Clip(9.0), jp.Noise(0.01), jp.Poisson(4, 4), 1e-3)


def _clients():
    return jp.data.from_clients({f"c{i}": {"x": np.ones(1, np.float32)} for i in range(4)})


def _client_fn(broadcast, examples, key):
    return sum(map(jnp.float32, jax.tree.leaves(broadcast)), jnp.float32(0)) * examples.mask.sum(
        dtype=jnp.float32
    )


def _asked(how, broadcast, folder):
    """The sum, by each of the interfaces."""
    if how != "check":
        return sum_by(how, _client_fn, _clients(), PLAN, folder / "l.jsonl", broadcast)
    query = jp.Query("mine", _client_fn, PLAN, jp.CohortSpec(1, 1))
    assert check_information_flow(query, _clients(), broadcast).noisy
    return 4 * 3.5


WAYS = ["release", "secure_release", "run", "check"]


@pytest.mark.parametrize("how", WAYS)
def test_numbers_are_arrays(how, tmp_path):
    broadcast = {"a": 0.5, "b": 1, "c": True, "d": np.float64(1), "e": None}
    assert _asked(how, broadcast, tmp_path) == pytest.approx(4 * 3.5, abs=1.0)


def test_an_array_may_be_empty(tmp_path):
    def client_fn(broadcast, examples, key):
        return jnp.sum(broadcast["none"]) + broadcast["one"]

    broadcast = {"none": np.zeros((0, 3), np.float32), "one": np.float32(2)}
    total = sum_by("release", client_fn, _clients(), PLAN, tmp_path / "l.jsonl", broadcast)
    assert total == pytest.approx(4 * 2, abs=1.0)


@pytest.mark.parametrize("leaf", ["text", object(), 2**40, np.array(["a"]), b"x"])
@pytest.mark.parametrize("how", WAYS)
def test_what_is_no_number_is_refused_before_a_charge(how, leaf, tmp_path):
    with pytest.raises(InputError, match="the broadcast of query 'mine' must be"):
        _asked(how, {"a": leaf}, tmp_path)
    ledger = tmp_path / "l.jsonl"
    assert not ledger.exists() or not jp.Ledger.read(ledger).charges
