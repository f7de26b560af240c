"""Optimisers by name, for configs and the command line.

An algorithm takes any optax optimiser. These are the ones of McMahan et al. 2017 and Reddi et al.
2021 ("Adaptive Federated Optimization").
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.models.base import updated

_LATER = 1_000  # steps after a round's, in which an optimiser would move
NAMES = ("sgd", "momentum", "nesterov", "adam", "yogi")


def require_optimizer(name: str, value: object, steps: int = 0) -> None:
    """Refuses what is no optimiser of optax, or cannot be used, before a client computes anything.

    That is one that needs more than gradients and parameters, such as the loss; and, of a client
    with at most `steps` steps in a round, one that moves nothing before it has taken more: it is
    new in every round, so that it never does.
    """
    hint = "an optimiser of optax, such as optax.sgd(0.1)"
    optimizer = checks.instance(name, value, optax.GradientTransformation, hint)
    # Also where a program is being traced, such as a dry run's.
    with jax.ensure_compile_time_eval():
        _require_usable(name, optimizer, steps)


@functools.lru_cache(256)
def _require_usable(name: str, optimizer: optax.GradientTransformation, steps: int) -> None:
    params = {"w": np.ones(1, np.float32)}

    @jax.jit
    def moved(params: Any, state: Any = None) -> tuple[jax.Array, Any]:
        state = optimizer.init(params) if state is None else state
        updates, state = updated(optimizer, params, state, params)
        return jnp.any(updates["w"] != 0), state

    try:
        jax.eval_shape(moved, params)
    # Another error is that of one for a certain tree, which cannot be tried on this one.
    except Exception as error:
        needed = "any parameters, found optax.lookahead, which needs parameters of its own"
        if "'fast'" not in str(error):
            if "keyword-only" not in str(error):
                return
            what = ", ".join(re.findall(r"'(\w+)'", str(error)))
            needed = f"gradients alone, found one that needs {what}"
        raise InputError(f"{name} must be an optimiser of {needed}") from None
    state = None
    # One that never moves this tree may be made for another.
    for number in range(1, steps + _LATER if steps else 1):
        has_moved, state = moved(params, state)
        if has_moved:
            if number <= steps:
                return
            raise InputError(
                f"{name} must be an optimiser that changes parameters within a round, found one "
                f"that leaves them as they are for its first {number - 1} steps: a client takes at "
                f"most {steps} in a round, where it begins anew"
            )


@functools.cache
def optimizer(
    name: str, learning_rate: float, momentum: float = 0.9
) -> optax.GradientTransformation:
    """Returns the optimiser called `name`, one of `NAMES`; "nesterov" is SGD with that momentum.

    Equal arguments return the same object, so that a sweep compiles once what trains with it.
    "adam" and "yogi" have Reddi et al. 2021's b1 = 0.9, b2 = 0.99, epsilon = 1e-3 (section 5).
    """
    checks.one_of("optimizer", name, NAMES)
    checks.positive("learning_rate", learning_rate)
    if name == "sgd":
        return optax.sgd(learning_rate)
    if name in ("momentum", "nesterov"):
        checks.open_fraction("momentum", momentum)
        return optax.sgd(learning_rate, momentum=momentum, nesterov=name == "nesterov")
    adaptive = optax.adam if name == "adam" else optax.yogi
    return adaptive(learning_rate, b1=0.9, b2=0.99, eps=1e-3)
