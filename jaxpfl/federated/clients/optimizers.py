"""Optimisers by name, for configs and the command line.

An algorithm takes any optax optimiser. These are the ones of McMahan et al. 2017 and Reddi et al.
2021 ("Adaptive Federated Optimization"), with the latter's defaults.
"""

import functools

import optax

from jaxpfl import checks

NAMES = ("sgd", "momentum", "nesterov", "adam", "yogi")


def require_optimizer(name: str, value: object) -> None:
    """Raises `InputError`, before anything is compiled, if `value` is no optimiser of optax."""
    hint = "an optimiser of optax, such as optax.sgd(0.1)"
    checks.instance(name, value, optax.GradientTransformation, hint)


@functools.cache
def optimizer(
    name: str, learning_rate: float, momentum: float = 0.9
) -> optax.GradientTransformation:
    """Returns the optimiser called `name`; equal arguments return the same object.

    Functions that train with the same object are only compiled once, even in a sweep that builds
    its algorithm anew for every point.

    Args:
      name: "sgd", "momentum", "nesterov" (SGD with Nesterov momentum), "adam" or "yogi"
        (b1 = 0.9, b2 = 0.99, epsilon = 1e-3: Reddi et al. 2021, section 5).
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
