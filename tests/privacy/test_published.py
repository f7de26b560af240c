"""The epsilons that Augenstein et al. 2020 print (appendix A.1), in their form and in valid ones.

They draw exactly n of N users in each round, and take the Renyi divergence of a round by Wang et
al. 2018 (Theorem 27) for a Gaussian whose shift is S, converted by Mironov 2017
(Proposition 3). NOT VALID for such rounds: the theorem is about REPLACING one client, and in a
cohort of fixed size one update then leaves the sum and another enters it, so that it moves by 2 S.
Valid are a shift of 2 S, or cohorts of random size (Poisson).
"""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from jaxpfl.privacy import Clip, FixedSize, Noise, Plan, Poisson, confirmation
from jaxpfl.privacy.accounting import RDP_ORDERS

# SPEC D.1: n, N, T, delta, printed; then the valid forms, with fixed-size and Poisson rounds.
PRINTED = [
    (5_000, 342_477, 2_000, 1 / 342_477, 9.22, 57.374, 4.2232),
    (1_000, 250_000, 1_000, 4e-8, 2.38, 17.394, 1.0324),
    pytest.param(1_000, 500_000, 1_000, 2e-8, 1.79, 9.8624, 0.5646, marks=pytest.mark.slow),
    pytest.param(1_000, 1_250_000, 1_000, 8e-9, 1.48, 8.5553, 0.24877, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("n", "N", "T", "delta", "printed", "fixed", "poisson"), PRINTED)
def test_augensteins_epsilons_are_reproduced_and_do_not_hold(
    n, N, T, delta, printed, fixed, poisson
):
    """SPEC D.1, D.2: fixed-size rounds cost several times what is claimed, Poisson rounds less."""
    account = rdp.RdpAccountant(list(RDP_ORDERS), dp_accounting.NeighboringRelation.REPLACE_ONE)
    # dp-accounting takes the multiplier relative to the shift, here S as published.
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    a_round = dp_accounting.SampledWithoutReplacementDpEvent(N, n, gaussian)
    account.compose(dp_accounting.SelfComposedDpEvent(a_round, T))
    orders = np.array(RDP_ORDERS)
    found = float(np.min(np.asarray(account.rdp) - math.log(delta) / (orders - 1)))
    assert round(found, 2) == printed
    # A second source: Theorem 27 in 400-digit decimals, integer orders.
    moments = confirmation._moments(1.0, n, N)
    other = min((T * moments[a] - math.log(delta)) / (a - 1) for a in range(2, 64))
    assert found == pytest.approx(other, rel=1e-9)
    for participation, valid in ((FixedSize(N, n), fixed), (Poisson(N, n), poisson)):
        plan = Plan(
            rounds=T,
            clip=Clip(1.0),
            noise=Noise(1.0),
            participation=participation,
            delta=delta,
            allow_large_delta="the delta of one is 1 / N" if delta >= 1 / N else None,
        )
        assert plan.epsilon() == pytest.approx(valid, rel=1e-4)
        assert plan.guarantee().confirmed_epsilon() == pytest.approx(valid, rel=1e-3)
    assert poisson < found < fixed / 2.4
