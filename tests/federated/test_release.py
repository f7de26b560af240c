"""The release: what is charged, who takes part, and that no two releases share their noise."""

import dp_accounting
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.data import Population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated import Execution, Query, RunSecret, client_mesh
from jaxpfl.federated.release import identity
from jaxpfl.privacy import Cyclic, Ledger, Noise, Plan
from jaxpfl.privacy.chain import Chain
from tests.federated.lowering import lowered_programs
from tests.federated.releases import (
    CLIENTS,
    DIM,
    SIGMA,
    ask,
    half_of_it,
    held_vector,
    plan,
    population,
    query,
    releasing,
    require_independent_noise,
)
from tests.plans import flat_without_privacy


def test_the_same_question_is_the_same_release_and_one_charge(ledger_path):
    """Equal identity and equal sum: the same bits, one charge; also in another process."""
    first, _ = ask(ledger_path)
    second, charges = ask(ledger_path)
    np.testing.assert_array_equal(first, second)
    assert len(charges) == 1


def test_another_secret_round_label_or_run_is_another_release(ledger_path):
    first, _ = ask(ledger_path)
    changes = (
        dict(secret=RunSecret()),
        dict(round=2),
        dict(asked=query(label="other")),
        dict(run="run of another"),
    )
    for change in changes:
        second, charges = ask(ledger_path, **change)
        require_independent_noise(first, second)
    assert len(charges) == 5


def sampled(client_fn=held_vector, rounds: int = 6, delta: float = 1e-6, **changes) -> Query:
    """Half of the clients take part, so that a cohort of its own shows in the charge."""
    return query(client_fn, of=plan(rounds, taken=CLIENTS // 2, delta=delta), **changes)


CHANGES = {
    "client function": lambda: dict(asked=sampled(half_of_it)),
    "delta": lambda: dict(asked=sampled(delta=1e-7)),
    "rounds": lambda: dict(asked=sampled(rounds=7)),
    "devices": lambda: dict(asked=sampled(execution=Execution(mesh=client_mesh(1)))),
    "chunk": lambda: dict(asked=sampled(execution=Execution(chunk=4))),
    "cohort": lambda: dict(asked=sampled(cohort=CohortSpec(1, 2, clients_per_bucket=8))),
    "one client": lambda: dict(asked=sampled(), clients=population(replaced=3)),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_whatever_is_changed_the_noise_is_independent_and_charged(changed, ledger_path):
    """A replayed round with other code, plan or devices; one client replaced, on one ledger."""
    first, _ = ask(ledger_path, sampled())
    change = CHANGES[changed]()
    if changed == "one client":
        # A client's data is not the source's: the ledger is of the same source all the same.
        clients = population()
        change["clients"] = clients.with_columns(dict(change["clients"].columns))
    second, charges = ask(ledger_path, **change)
    require_independent_noise(first, second)
    if changed == "one client":
        # Nor on a second ledger: nobody's update is the difference of two releases.
        second, _ = ask(ledger_path.with_name("second.jsonl"), **CHANGES[changed]())
        require_independent_noise(first, second)
    # Amplified, both: each has a cohort of its own.
    assert len(charges) == 2
    assert all(isinstance(charge.event, dp_accounting.PoissonSampledDpEvent) for charge in charges)


def test_a_ledger_tells_what_was_asked_and_that_a_program_was_changed(ledger_path):
    for asked, round in ((sampled(), 1), (sampled(), 2), (sampled(half_of_it), 3)):
        ask(ledger_path, asked, round=round)
    first, second = Ledger.read(ledger_path).queries
    assert first["plan"] == sampled().plan.to_dict() and first["flow_checked"]
    assert first["program"] != second["program"]
    assert {**first, "program": ""} == {**second, "program": ""}


PACKAGES = ["jaxpfl", "jax", "jaxlib", "flax", "optax", "numpy"]


@pytest.mark.parametrize("changed", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", *PACKAGES])
def test_flags_of_the_compiler_and_versions_are_part_of_the_identity(
    changed, ledger_path, monkeypatch
):
    first, _ = ask(ledger_path)
    if changed in PACKAGES:
        real = identity.version
        monkeypatch.setattr(identity, "version", lambda n: "9.9" if n == changed else real(n))
    else:
        monkeypatch.setenv(changed, "--xla_cpu_max_isa=SSE4_2")
    second, charges = ask(ledger_path)
    require_independent_noise(first, second)
    assert len(charges) == 2


class ForgetfulSecret(RunSecret):
    """One of its purposes gives the same words in every round."""

    def __init__(self, forgotten: str) -> None:
        super().__init__(bytes(range(16)))
        self.forgotten = forgotten

    def words_of(self, purpose, text):
        return super().words_of(purpose, "" if purpose == self.forgotten else text)


@pytest.mark.parametrize("forgotten", ["", "noise", "checksum"])
def test_equal_sums_of_two_rounds_have_independent_noise(forgotten, ledger_path):
    """Both secrets of the noise are the round's own, so that either tells two rounds apart."""
    clients = population()
    clients = clients.with_columns({"x": np.zeros((CLIENTS, DIM), np.float32)})
    settings = dict(clients=clients, secret=ForgetfulSecret(forgotten))
    first, second = (ask(ledger_path, round=round, **settings)[0] for round in (1, 2))
    require_independent_noise(first, second)
    releases = [line["release"] for line in Chain.read(ledger_path).lines if "release" in line]
    assert len(set(releases)) == 2


def who_takes_part(asked, secret, path) -> frozenset[int]:
    """Without noise, by what each client adds."""
    clients = Population(
        {"x": np.eye(CLIENTS, dtype=np.float32)}, np.arange(CLIENTS + 1), list(map(str, range(24)))
    )
    value, _ = ask(path, asked, clients=clients, secret=secret)
    return frozenset(np.flatnonzero(value).tolist())


def test_a_cohort_is_a_secret_draw_of_the_identity(tmp_path):
    """Amplification by sampling needs independent cohorts wherever a round is charged anew."""
    public = flat_without_privacy(population=CLIENTS, clients_per_round=12, rounds=6)
    asked, secret = query(of=public), RunSecret.reproducible(3)
    cohorts = [
        who_takes_part(asked, secret, tmp_path / "a"),
        who_takes_part(query(half_of_it, of=public), secret, tmp_path / "b"),
        who_takes_part(asked, RunSecret.reproducible(4), tmp_path / "c"),
    ]
    assert who_takes_part(asked, secret, tmp_path / "d") == cohorts[0]
    assert len(set(cohorts)) == 3
    assert all(0 < len(cohort) < CLIENTS for cohort in cohorts)


def test_which_examples_a_client_gives_is_as_secret_as_the_cohort(tmp_path):
    """Who knew the order of all examples could tell how it changes without a client."""
    # Of whole numbers, other examples might have the same sum.
    held = np.random.default_rng(0).normal(size=(4 * CLIENTS, 1)).astype(np.float32)
    names = [str(k) for k in range(CLIENTS)]
    clients = Population({"x": held}, np.arange(CLIENTS + 1) * 4, names)
    # Everyone takes part, each with one of four examples.
    public = flat_without_privacy(population=CLIENTS, rounds=6)
    found = [
        ask(
            tmp_path / str(k),
            query(of=public),
            clients=clients,
            secret=RunSecret.reproducible(seed),
        )[0]
        for k, seed in enumerate((1, 1, 2))
    ]
    assert found[0] == found[1] != found[2]


def test_an_empty_cohort_is_charged_and_noised(ledger_path):
    """TRUST 24."""
    # Which round is empty follows from the machine. One is in 0.36; none of 40, in 2e-8.
    asked, seen = query(of=plan(taken=1, rounds=40)), []
    with releasing(ledger_path, observe=seen.append) as releaser:
        for round in range(1, 41):
            value = np.asarray(releaser.release(asked, jnp.float32(0), round=round).value)
            if not seen[-1]["clients"]:
                break
    assert not seen[-1]["clients"]
    assert len(releaser.ledger.charges) == len(seen)
    assert np.std(value) == pytest.approx(SIGMA, rel=0.03)


@pytest.mark.parametrize("came", [CLIENTS - 1, 1])
def test_the_noise_and_the_charge_stay_the_plans_when_clients_drop_out(
    came, ledger_path, monkeypatch
):
    """TRUST 25."""
    monkeypatch.setattr(jp.Poisson, "sample", lambda *_: np.arange(came))
    value, (charge,) = ask(ledger_path)
    assert np.std(value) == pytest.approx(SIGMA, rel=0.03)
    assert charge.event == plan().charge_event()


def cyclic(noise="independent", rounds: int = 8, epoch: int = 4) -> Plan:
    """An epoch has so many rounds."""
    participation = Cyclic(CLIENTS, CLIENTS // epoch)
    return plan(rounds, noise=Noise(SIGMA, noise), participation=participation)


def test_an_epoch_is_charged_once_and_again_whole_where_it_goes_on_otherwise(ledger_path):
    asked, changed = query(of=cyclic()), query(half_of_it, of=cyclic())
    for round in (1, 2, 3):
        _, charges = ask(ledger_path, asked, round=round)
    assert [charge.event for charge in charges] == [dp_accounting.GaussianDpEvent(SIGMA)]
    # Another client function deals the clients to rounds anew: someone may take part twice.
    _, charges = ask(ledger_path, changed, round=4)
    assert len(charges) == 2
    _, charges = ask(ledger_path, changed, round=5)
    assert len(charges) == 3


def test_correlated_noise_goes_on_only_as_it_began(ledger_path):
    asked = query(of=cyclic("banded"))
    changed = query(half_of_it, of=cyclic("banded"))
    ask(ledger_path, asked, round=1)
    second, charges = ask(ledger_path, asked, round=2)
    with pytest.raises(InputError, match="must be those of its first round"):
        ask(ledger_path, changed, round=3)
    # The same round of the same run: the same bits, and no charge.
    again, found = ask(ledger_path, asked, round=2)
    np.testing.assert_array_equal(again, second)
    assert found == charges
    # Its noise follows from the identity alone, so another sum must not meet it.
    with pytest.raises(InputError, match="already asked in round 2 with another broadcast"):
        ask(ledger_path, asked, round=2, broadcast=1e-6)


def test_correlated_noise_is_one_stream_for_all_releasers_of_a_run(tmp_path):
    """Of a resumed run, too: parts of two streams would not cancel as the cost assumes."""
    asked = query(of=cyclic("banded"))
    with releasing(tmp_path / "one.jsonl") as releaser:
        expected = [
            releaser.release(asked, jnp.float32(0), round=round).value for round in (1, 2, 3)
        ]
    for round in (1, 2, 3):
        found, _ = ask(tmp_path / "several.jsonl", asked, round=round)
        np.testing.assert_array_equal(found, expected[round - 1])


def test_a_second_sum_with_shared_noise_is_never_returned(ledger_path, monkeypatch):
    """Of a change that no identity knows."""
    monkeypatch.setattr(identity, "described", lambda *_: "always the same")
    # Of four rounds an epoch, one draw in a thousand leaves the first without a client.
    ask(ledger_path, query(of=cyclic("banded", epoch=2)))
    with pytest.raises(InputError, match="second release would reveal it"):
        ask(ledger_path, query(half_of_it, of=cyclic("banded", epoch=2)))


def test_one_number_is_charged_and_says_what_it_costs(ledger_path):
    clients = population()
    once = plan(rounds=1)
    settings = dict(ledger=ledger_path, broadcast=jnp.float32(0), cohort=jp.CohortSpec(1, 1))
    found, second = (jp.release(held_vector, clients, once, **settings) for _ in range(2))
    require_independent_noise(found.value, second.value)
    assert found.privacy == second.privacy == once.statement()
    both = dp_accounting.GaussianDpEvent(SIGMA / np.sqrt(2))
    with Ledger(ledger_path, clients) as ledger:
        assert len(ledger.charges) == 2
        assert ledger.spent(1e-6) == pytest.approx(
            jp.privacy.Guarantee(both, 1e-6).epsilon(), rel=1e-9
        )
    assert second.ledger != second.privacy


def test_a_secret_shows_nothing_of_itself():
    secret = RunSecret(bytes(range(16)))
    assert "0, 1, 2" not in repr(secret) and secret.words.hex() not in repr(secret)
    with pytest.raises(InputError):
        RunSecret(b"short")


def test_what_clients_compute_is_lowered_once_for_the_identity_and_the_sum(ledger_path):
    """Lowering takes as long as a small round does."""

    def told_apart(broadcast, examples, key):
        return jnp.float32(0.25) * held_vector(broadcast, examples, key)

    with lowered_programs() as names:
        ask(ledger_path, query(told_apart))
    assert sum("accumulate" in name for name in names) == 1
    assert not any("told_apart" in name for name in names)
