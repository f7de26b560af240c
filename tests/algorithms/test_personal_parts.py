"""FedPer and FedRep against plain loops in float64, with cohorts that differ by round."""

import dataclasses

import numpy as np
import pytest

from jaxpfl.federated import Execution, PersonalParts, client_mesh
from jaxpfl.privacy import Poisson
from tests.algorithms import test_client_memory as memory
from tests.algorithms.systems import Linear
from tests.federated.test_local_training import DIM
from tests.refusals import refusal
from tests.trees import assert_close

OWN = np.arange(DIM + 1) == DIM  # b, beside w


def parts(first, own="^b$"):
    return PersonalParts(Linear(), memory.SGD, own, first)


def by_hand(drawn, first, sign=1.0, order=1):
    """The shared part, and the own part of each client that was asked."""
    w, own = np.zeros(DIM + 1), {}
    # FedPer: one pass for both parts. FedRep: the own part, then the shared one.
    phases = [OWN] * first + [~OWN] if first else [OWN | ~OWN]
    for cohort in drawn:
        total = np.zeros(DIM + 1)
        for client in cohort:
            local = np.where(OWN, own.get(client, 0.0), w)
            for moved in phases[::order]:
                rate = memory.RATE * moved * np.where(OWN, sign, 1.0)
                for _ in range(memory.steps_of(client)):
                    local -= rate * memory.slope(client, local)
            own[client] = local[-1]
            total += memory.clipped((local - w) * ~OWN, memory.CLIP)
        w = w + total / memory.TAKEN
    return w, own


@pytest.mark.parametrize("execution", memory.LAYOUTS)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_rounds_are_what_a_plain_loop_gives(first, execution, cohorts, tmp_path):
    client = parts(first)
    algorithm = memory.averaged(client=client, execution=execution)
    state, own = memory.run(algorithm, tmp_path, read=lambda rows: rows["b"])
    assert len({tuple(each) for each in cohorts}) > 2
    w, expected = by_hand(cohorts, first)
    # What the server has in place of the own part stays as it began.
    assert_close(memory.flat(state.params), w, atol=1e-6)
    assert_close([own[each] for each in expected], list(expected.values()), atol=1e-6)
    one = min(expected)
    model = client.own_model(state.params, {"w": None, "b": own[one]})
    np.testing.assert_allclose(memory.flat(model), [*w[:-1], expected[one]], rtol=1e-5, atol=1e-6)
    for wrong in [{"sign": -1.0}] + [{"order": -1}] * (first > 0):
        assert np.abs(memory.flat(state.params) - by_hand(cohorts, first, **wrong)[0]).max() > 1e-3


def test_no_noise_is_added_to_what_stays_with_clients(tmp_path):
    few = Poisson(memory.NUMBER, memory.TAKEN)
    noisy = dataclasses.replace(memory.PRIVATE, participation=few)
    algorithm = memory.averaged(client=parts(1), plan=noisy)
    params = memory.run(algorithm, tmp_path, read=lambda rows: rows)[0].params
    assert params["b"] == 0
    assert np.linalg.norm(params["w"]) > 1e-3


def test_what_cannot_be_kept_by_clients_is_refused(tmp_path):
    """A pattern that matches no parameter or all; and devices that share a model."""
    shared = Execution(client_mesh(2, model=2))
    for number, (changes, words) in enumerate((
        ({"client": parts(0, "nothing")}, "own must match none"),
        ({"client": parts(0, "")}, "own must match all"),
        ({"client": parts(1), "execution": shared}, "whole model"),
    )):  # fmt: skip
        algorithm = memory.averaged(**changes)
        refusal(lambda a=algorithm, n=number: memory.run(a, tmp_path / str(n)), words)
