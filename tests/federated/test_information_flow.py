"""A release's program: what is proven of it, and that each planted leak is named with its line."""

import dataclasses
import re
import sys
import types
from contextlib import nullcontext
from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.data import from_clients
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InformationLeak, InputError
from jaxpfl.federated import (
    ClientSteps,
    Execution,
    LocalTraining,
    Query,
    check_information_flow,
    client_mesh,
)
from jaxpfl.federated.flow import lanes
from jaxpfl.federated.release.program import require_known_calls
from jaxpfl.privacy import AdaptiveClip, Clip, Ledger, Noise, Plan, Poisson
from tests.federated.cohorts import DIM, no_noise, plan, sum_of_all
from tests.federated.releases import sum_by
from tests.federated.telling import TELLING
from tests.federated.test_local_training import LinearModel
from tests.trees import drawn

CLIENTS = 8


def held(broadcast, examples, key):
    """Some steps of a client's own vector towards the broadcast."""

    def step(index, found):
        return found + 0.1 * jnp.tanh(broadcast - found)

    start = examples.batches["x"][0, 0]
    return {"a": jax.lax.fori_loop(0, examples.steps, step, start), "b": jnp.sum(start)}


def population():
    vectors = np.random.default_rng(0).normal(size=(CLIENTS, 1, DIM)).astype(np.float32)
    return from_clients({f"client {k}": {"x": each} for k, each in enumerate(vectors)})


def query(client_fn=held, of: Plan | None = None, **execution) -> Query:
    made = small() if of is None else of
    spec = CohortSpec(batch_size=1, max_examples=1, clients_per_bucket=4)
    return Query("q", client_fn, made, spec, execution=Execution(**execution))


def small(**changes) -> Plan:
    return plan(population=CLIENTS, clients_per_round=4, delta=1e-2, **changes)


@pytest.mark.parametrize(
    ("of", "execution"),
    [
        (small(), {}),
        (small(), {"mesh": client_mesh(1), "chunk": 1}),
        (small(), {"mesh": client_mesh(2, model=2), "chunk": 2}),
        (small(adaptive_clip=AdaptiveClip(indicator_noise=1.0)), {}),
        (small(noise="exact"), {"mesh": client_mesh(1), "chunk": 4}),
        (small(noise="exact", adaptive_clip=AdaptiveClip(indicator_noise=1.0)), {}),
        (small(noise="banded", sampling="cyclic"), {}),
        (small(noise="exact_banded", sampling="cyclic"), {}),
    ],
    ids=["flat", "alone", "split", "adaptive", "exact", "exact and adaptive", "banded", "both"],
)
def test_a_release_depends_on_clients_by_noisy_sums_alone(of, execution):
    found = check_information_flow(query(of=of, **execution), population(), np.zeros(DIM, "f4"))
    adaptive = (".clip_norm",) if of.clip.adaptive is not None else ()
    assert found.noisy == (".value['a']", ".value['b']", *adaptive)
    assert found.equations > 100
    assert not found.bounded_by_client


@dataclasses.dataclass(frozen=True)
class Counting:
    """A client function by steps: the number of examples."""

    example_bound: float = 1.0

    def init(self, broadcast, key):
        return jnp.float32(0)

    def step(self, broadcast, state, batch, mask, key):
        return state + jnp.sum(jnp.float32(mask))

    def finish(self, broadcast, state):
        return state


def test_what_is_found_follows_from_plan_and_client_function():
    """Without noise no output is noisy; a bound by example is said; a constant may be sent."""
    silent = check_information_flow(query(of=no_noise()), population(), np.zeros(DIM, "f4"))
    assert silent.noisy == ()
    by_example = query(Counting(), of=dataclasses.replace(PLAN, unit="example"))
    assert check_information_flow(by_example, population()).bounded_by_client
    # A count of clients, which is the same for all of them, is clipped like anything else.
    for chunk in (1, 4):
        constant = query(lambda b, e, k: jnp.float32(1), mesh=client_mesh(1), chunk=chunk)
        assert check_information_flow(constant, population()).noisy == (".value",)


class Holding:
    """A client function of one's own class."""

    factor = 2.5

    def __init__(self):
        self.table = np.arange(DIM, dtype=np.float32)

    def __call__(self, broadcast, examples, key):
        return examples.batches["x"][0, 0] * self.table * self.factor


MEAN, CLIENT_NAME = 17.25, "client 3"


def held_global(broadcast, examples, key):
    return examples.batches["x"][0, 0] + (MEAN if CLIENT_NAME else 0.0)


def held_in_closure():
    mean, one = jnp.float32(3.5), np.ones(1, np.float32)

    def holds(broadcast, examples, key, scale=0.5):
        return examples.batches["x"][0, 0] * scale + mean + one

    return holds


@pytest.mark.parametrize(
    ("client_fn", "named"),
    [
        (Holding(), {"table: float32[5]", "factor: a number"}),
        (held_global, {"MEAN: a number", "CLIENT_NAME: text"}),
        (held_in_closure(), {"mean: float32[]", "one: float32[1]", "default 0: a number"}),
        (
            ClientSteps(
                lambda broadcast, key: jnp.zeros(DIM),
                partial(lambda b, *given, by: given[0] + by, by=1.5),
                lambda broadcast, state: state * MEAN,
            ),
            {"step.by: a number", "finish.MEAN: a number"},
        ),
    ],
    ids=["object", "globals", "closure", "steps"],
)
def test_what_a_client_function_captures_is_listed_by_name_without_values(client_fn, named):
    """Nobody can tell whether it was computed from clients: whoever reads the record sees it."""
    found = check_information_flow(query(client_fn), population()).constants
    assert named <= set(found)
    assert not any("17.25" in each or "client 3" in each or "3.5" in each for each in found)


LARGE = {f"key {k}": np.full(1, 17.25, np.float32) for k in range(40)}


@pytest.fixture
def a_module(tmp_path, monkeypatch):
    """A module of the user's, which holds a number of the clients."""
    made = types.ModuleType("statistics_of_mine")
    made.__file__ = str(tmp_path / "statistics_of_mine.py")
    made.MEAN = np.full(1, 17.25, np.float32)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    np.save(tmp_path / "mean.npy", made.MEAN)
    return made


def test_a_number_is_listed_wherever_it_comes_from(a_module, tmp_path):
    """By name, or where it enters the program: in the ledger, too. Never its value."""

    def by_module(broadcast, examples, key):
        return examples.batches["x"][0, 0] - a_module.MEAN[0]

    def by_a_module_of_its_own(broadcast, examples, key):
        import statistics_of_mine

        return examples.batches["x"][0, 0] - jnp.sum(statistics_of_mine.MEAN)

    def by_file(broadcast, examples, key):
        return examples.batches["x"][0, 0] * float(np.load(tmp_path / "mean.npy")[0])

    def by_large_container(broadcast, examples, key):
        return examples.batches["x"][0, 0] - LARGE["key 3"]

    def behind_another(broadcast, examples, key):
        found = optax.sgd(sys.modules["statistics_of_mine"].MEAN[0].item())
        return found.update(examples.batches["x"][0, 0], found.init(()))[0]

    named = {
        by_module: ["a_module.MEAN: float32[1]", "float32[]"],
        by_a_module_of_its_own: ["statistics_of_mine.MEAN: float32[1]", "float32[1]"],
        by_file: ["float32[]"],
        by_large_container: ["LARGE: dict of 40", "float32[1]"],
        behind_another: ["float32[]"],
    }
    for number, (client_fn, expected) in enumerate(named.items()):
        line = client_fn.__code__.co_firstlineno
        ledger = tmp_path / f"{number}.jsonl"
        jp.release(client_fn, population(), PLAN, ledger=ledger)
        (asked,) = Ledger.read(ledger).queries
        *names, entering = expected
        assert set(names) <= set(asked["captured"])
        pattern = re.compile(rf"{re.escape(entering)} \({__name__.rpartition('.')[2]}\.py:(\d+)\)")
        lines = [int(m[1]) for each in asked["captured"] if (m := pattern.fullmatch(each))]
        assert any(line <= each <= line + 3 for each in lines), asked["captured"]
        assert not any("17.25" in each for each in asked["captured"])


def test_numbers_that_a_line_says_itself_are_not_listed():
    def client_fn(broadcast, examples, key):
        x = examples.batches["x"][0, 0]
        return jnp.where(x > 0.25, x * -1_000.5, jnp.zeros_like(x)) + jax.random.normal(key, (DIM,))

    found = check_information_flow(query(client_fn), population()).constants
    assert found == ("DIM: a whole number",)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("which", TELLING)
def test_a_client_function_that_tells_something_is_named_with_its_line(which, chunk):
    """TRUST 42: whatever the chunk, though a rule is gone from the program of several clients."""
    client_fn, name = TELLING[which]
    asked = query(client_fn, mesh=client_mesh(1), chunk=chunk)
    with pytest.raises(InformationLeak) as caught:
        check_information_flow(asked, population())
    assert name in str(caught.value)
    if which != "collective":
        assert re.search(r"telling\.py:\d+", str(caught.value))


PLAN = Plan(1, Clip(1.0), Noise(1.0), Poisson(CLIENTS, CLIENTS), 1e-2)


def left_in(broadcast, examples, key):
    jax.debug.print("CLIENT {}", jnp.sum(examples.batches["x"]))
    return examples.batches["x"][0, 0]


@pytest.mark.parametrize("way", ["run", "run without noise", "release", "secure_release"])
def test_the_check_runs_by_itself_before_the_first_charge(way, tmp_path, capfd):
    """TRUST 42: a print that was left in a client function prints nothing, and costs nothing."""
    silent = Plan.without_privacy(rounds=1, participation=Poisson(CLIENTS, CLIENTS))
    plan, ledger = silent if "without" in way else PLAN, tmp_path / "ledger.jsonl"
    with pytest.raises(InformationLeak, match="debug_print"):
        sum_by(way, left_in, population(), plan, ledger)
    out, err = capfd.readouterr()
    assert "CLIENT" not in out + err
    assert not ledger.exists() or len(Ledger.read(ledger)) == 0


def test_unchecked_it_runs_and_everything_says_that_it_is_not_private(tmp_path, capfd):
    participation = Poisson(CLIENTS, CLIENTS)
    made = Plan.without_privacy(rounds=1, participation=participation, unchecked=True)
    found = jp.release(left_in, population(), made, ledger=tmp_path / "ledger.jsonl")
    jax.effects_barrier()
    assert "CLIENT" in capfd.readouterr().out
    assert "NOT PRIVATE" in found.privacy
    assert "not checked" in found.privacy
    assert "NOT PRIVATE" in found.ledger
    assert Plan.from_dict(made.to_dict()) == made
    with pytest.raises(InputError, match="without noise"):
        dataclasses.replace(PLAN, unchecked=True)


@pytest.mark.parametrize("chunk", [1, 32])
@pytest.mark.parametrize("batch", [4, 16, 32])
def test_local_training_passes_at_any_batch_and_chunk(batch, chunk):
    """Its one rule for clients side by side mixes none of them, and is followed."""
    spec = CohortSpec(batch, 3 * batch, clients_per_bucket=32)
    clients = from_clients(
        {str(i): {"x": np.ones((2, 3), np.float32), "y": np.ones(2, np.float32)} for i in range(8)}
    )
    model = LinearModel()
    asked = Query(
        "q",
        LocalTraining(model, optax.adamw(0.1)),
        small(),
        spec,
        execution=Execution(client_mesh(1), chunk),
    )
    params = drawn(model, 0)
    assert len(check_information_flow(asked, clients, params).noisy) == 2


def _special(x):
    """Its loop goes on for all until the slowest has converged."""
    return jax.scipy.special.betainc(x[0], x[1], x[2])


def _slope_of_a_kernel(x):
    """Of a depthwise convolution: on a CPU, side by side, a neighbour's NaN is everyone's."""

    def loss(kernel):
        image = jnp.tile(x[:3], (1, 4, 4, 1))
        order = ("NHWC", "HWIO", "NHWC")
        found = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=order, feature_group_count=3
        )
        return jnp.sum(jnp.sin(found))

    return jnp.sum(jax.grad(loss)(jnp.ones((2, 2, 1, 6))))


SLOW = np.float32([1e6, 1e6, 0.5, 0.0, 0.0])
OTHERS = np.float32([0.13245437, 0.00117885, 0.9299075, 0.0, 0.0])
MIXING = {
    "special function": (_special, 0.011621, SLOW, "regularized_incomplete_beta"),
    "slope of a kernel": (
        _slope_of_a_kernel,
        0.0,
        np.full(5, np.nan, "f4"),
        "conv_general_dilated",
    ),
    "linear algebra": (lambda x: jnp.linalg.svd(jnp.outer(x, x))[1][0], 0.0, SLOW, "svd"),
}


@pytest.mark.parametrize("which", MIXING)
def test_what_was_not_tried_side_by_side_runs_one_client_at_a_time(which):
    """TRUST 52: one client moves the sum by at most its own contribution, at any chunk."""
    function, threshold, worst, name = MIXING[which]

    def sign(broadcast, examples, key):
        return jnp.where(function(examples.batches["x"][0, 0]) < threshold, 1.0, -1.0)

    def total(last):
        rows = [*[OTHERS] * 31, last]
        clients = from_clients({f"client {k:02}": {"x": each[None]} for k, each in enumerate(rows)})
        spec, execution = CohortSpec(1, 1, clients_per_bucket=32), Execution(client_mesh(1), 32)
        asked = Query("q", sign, small(), spec, execution=execution)
        (found,) = check_information_flow(asked, clients).alone
        assert name in found
        assert f"{__name__.rpartition('.')[2]}.py:" in found
        return float(sum_of_all(sign, clients, spec, execution, (), 1.0))

    assert abs(total(worst) - total(OTHERS)) <= 2


@dataclasses.dataclass(frozen=True)
class CountingSpecially(Counting):
    def step(self, broadcast, state, batch, mask, key):
        return state + _special(jnp.abs(batch["x"][0]))


def test_what_was_not_tried_is_refused_where_examples_are_side_by_side():
    asked = query(CountingSpecially(), of=dataclasses.replace(PLAN, unit="example"))
    with pytest.raises(InformationLeak, match=r"regularized_incomplete_beta.*_flow\.py:\d+"):
        check_information_flow(asked, population())


def lowered(function):
    return jax.jit(function).lower(np.ones((3, 3), np.float32)).as_text()


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: jax.pure_callback(np.abs, x, x), "callback"),
        (lambda x: jax.ffi.ffi_call("nothing", jax.typeof(x))(x), "nothing"),
        (lambda x: jax.lax.rng_uniform(0.0, x[0, 0], (2,)), "rng"),
        *((f, None) for f in (jnp.linalg.svd, jnp.linalg.inv, jnp.sort, jnp.fft.fft)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_call_in_the_lowered_text_is_refused_but_for_jaxs_own(function, named):
    with pytest.raises(InformationLeak, match=named) if named else nullcontext():
        require_known_calls([lowered(function)], "cpu", "q")


def test_the_text_that_is_lowered_is_read_before_the_first_charge(monkeypatch, tmp_path):
    """Even if the list of primitives were wrong."""
    monkeypatch.setattr(lanes, "COMPUTES", lanes.COMPUTES | {"pure_callback"})
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(InformationLeak, match="lowered for a cpu"):
        jp.release(TELLING["callback"][0], population(), PLAN, ledger=ledger)
    assert not ledger.exists() or len(Ledger.read(ledger)) == 0
