"""Client functions as people write them, right and wrong, in both forms: drawn at random."""

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from jaxpfl.federated import ClientSteps

# What one batch does to a parameter, x [batch] and mask [batch]; some forget the mask.
GRADIENTS = {
    "masked mean": lambda w, x, m: jnp.sum((w - x) * m) / jnp.maximum(jnp.sum(m), 1),
    "forgotten mask": lambda w, x, m: jnp.mean(w - x),
    "sign": lambda w, x, m: jnp.sign(jnp.sum((w - x) * m) + 0.1),
    "normalised": lambda w, x, m: (w - jnp.mean(x)) / (jnp.std(x) + 0.01),
    "number of rows": lambda w, x, m: w * x.shape[0] - jnp.sum(m),
}
# How a step ends: (w, momentum, gradient) -> (w, momentum).
UPDATES = {
    "sgd": lambda w, v, g: (w - 0.3 * g, v),
    "weight decay": lambda w, v, g: (w - 0.3 * (g + 0.5 * w), v),
    "momentum": lambda w, v, g: (w - 0.3 * (0.9 * v + g), 0.9 * v + g),
    "schedule": lambda w, v, g: (w - 0.3 / (1 + v) * g, v + 1),
    "noise": lambda w, v, g: (w * 1.1 - 0.1 * g, v + 0.5),
}
# How the batches of a whole function are gone through: (step, start, xs, masks, steps, max_steps).
LOOPS = {
    "scan over all": lambda step, start, x, m, n: jax.lax.scan(
        lambda carry, row: (step(carry, *row), None), start, (x, m)
    )[0],
    "loop over steps": lambda step, start, x, m, n: jax.lax.fori_loop(
        0, n, lambda i, carry: step(carry, x[i], m[i]), start
    ),
    "while over steps": lambda step, start, x, m, n: jax.lax.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1], x[c[0]], m[c[0]])), (0, start)
    )[1],
    "branch on the shape": lambda step, start, x, m, n: (
        step(start, x[0], m[0]) if x.shape[0] > 3 else step(step(start, x[0], m[0]), x[-1], m[-1])
    ),
    "backwards": lambda step, start, x, m, n: jax.lax.scan(
        lambda carry, row: (step(carry, *row), None), start, (x, m), reverse=True
    )[0],
}
# What is sent: (w, start, number of steps, shape of the mask).
SENT = {
    "change": lambda w, start, n, shape: w - start,
    "times the steps": lambda w, start, n, shape: (w - start) * n,
    "times the shape": lambda w, start, n, shape: 100.0 * w * shape,
    "not clipped": lambda w, start, n, shape: 1e6 * (w + n),
}


def whole(gradient, update, loop, sent):
    """A whole client function."""

    def client_fn(broadcast, examples, key):
        def step(carry, x, m):
            w, v = carry
            m = m.astype(jnp.float32)
            return UPDATES[update](w, v, GRADIENTS[gradient](w, x, m) + noise)

        noise = jax.random.normal(key) if update == "noise" else jnp.float32(0)
        start = broadcast, jnp.float32(0)
        x, n = examples.batches["x"], examples.steps
        w, _ = LOOPS[loop](step, start, x, examples.mask, n)
        return SENT[sent](w, broadcast, n.astype(jnp.float32), float(examples.mask.shape[0]))

    return client_fn


def by_steps(gradient, update, loop, sent):
    """The same as `ClientSteps`; the engine loops."""
    del loop

    def init(broadcast, key):
        return broadcast, jnp.float32(0), jnp.float32(0)

    def step(broadcast, state, batch, mask, key):
        w, v, n = state
        noise = jax.random.normal(key) if update == "noise" else jnp.float32(0)
        found = GRADIENTS[gradient](w, batch["x"], mask.astype(jnp.float32)) + noise
        return *UPDATES[update](w, v, found), n + 1

    def finish(broadcast, state):
        w, _, n = state
        return SENT[sent](w, broadcast, n, 1.0)

    return ClientSteps(init, step, finish)


FUNCTIONS = st.builds(
    lambda form, *parts: form(*parts),
    st.sampled_from([whole, by_steps]),
    *(st.sampled_from(sorted(each)) for each in (GRADIENTS, UPDATES, LOOPS, SENT)),
)


def of_self(client_fn):
    """Sends zero for all clients but the one whose column "self" is true."""

    def alone(found, is_self):
        return jax.tree.map(lambda leaf: jnp.where(is_self, leaf, jnp.zeros_like(leaf)), found)

    def step(broadcast, state, batch, mask, key):
        own = {name: column for name, column in batch.items() if name != "self"}
        found = client_fn.step(broadcast, state[1], own, mask, key)
        return state[0] | jnp.any(batch["self"] & mask), found

    def whole(broadcast, examples, key):
        is_self = jnp.any(examples.batches["self"] & examples.mask)
        return alone(client_fn(broadcast, examples, key), is_self)

    if not hasattr(client_fn, "step"):
        return whole
    return ClientSteps(
        lambda broadcast, key: (jnp.bool_(False), client_fn.init(broadcast, key)),
        step,
        lambda broadcast, state: alone(client_fn.finish(broadcast, state[1]), state[0]),
    )
