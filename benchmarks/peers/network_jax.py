"""The EMNIST CNN in plain JAX, for the programs that use it, and a client's training with it.

Convolutions are patches times a matrix, because XLA runs an ordinary convolution inside a scan 20
to 40 times slower on a CPU.
"""

import jax
import jax.numpy as jnp

from benchmarks.peers import work


def _convolve(x_BxHxWxC, kernel_3x3xCxO):
    batch, height, width, _ = x_BxHxWxC.shape
    windows = [
        x_BxHxWxC[:, i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)
    ]
    patches = jnp.concatenate(windows, axis=-1).reshape(batch * (height - 2) * (width - 2), -1)
    out = patches @ kernel_3x3xCxO.reshape(-1, kernel_3x3xCxO.shape[-1])
    return out.reshape(batch, height - 2, width - 2, -1)


def loss(params, image_BxHxWxC, label_B, mask_B):
    """Mean cross-entropy over the examples of the mask."""
    x = _convolve(image_BxHxWxC, params["convolution_0.kernel"])
    x = _convolve(jax.nn.relu(x + params["convolution_0.bias"]), params["convolution_1.kernel"])
    x = x.reshape(x.shape[0], 12, 2, 12, 2, -1).max((2, 4))
    x = jax.nn.relu(x + params["convolution_1.bias"]).reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["hidden.kernel"] + params["hidden.bias"])
    logits = x @ params["output.kernel"] + params["output.bias"]
    picked = jnp.sum(jax.nn.one_hot(label_B, work.CLASSES) * logits, -1)
    losses = jax.nn.logsumexp(logits, -1) - picked
    return jnp.sum(jnp.where(mask_B, losses, 0)) / jnp.maximum(mask_B.sum(), 1)


def changed(params, image_SxB, label_SxB, mask_SxB):
    """One client's change after one epoch of SGD. Steps of padding alone are not run."""

    def step(index, local):
        gradients = jax.grad(loss)(local, image_SxB[index], label_SxB[index], mask_SxB[index])
        return jax.tree.map(lambda p, g: p - work.LEARNING_RATE * g, local, gradients)

    trained = jax.lax.fori_loop(0, mask_SxB.any(1).sum(), step, params)
    return jax.tree.map(jnp.subtract, trained, params)


def clipped_change(params, *batches_SxB):
    """The same, clipped."""
    change = changed(params, *batches_SxB)
    factor = jnp.minimum(1.0, work.CLIP_NORM / norm(change))
    return jax.tree.map(lambda leaf: leaf * factor, change)


def released(params, total, clients, key, deviation=work.NOISE * work.CLIP_NORM):
    """The parameters after a noisy mean, and the norm of the mean before noise."""
    leaves, structure = jax.tree.flatten(total)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        leaf + deviation * jax.random.normal(k, leaf.shape)
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    new = jax.tree.map(lambda p, leaf: p + leaf / clients, params, structure.unflatten(noisy))
    return new, norm(total) / clients


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))
