"""Prefinetuning: central training on a public corpus, before the first private round.

Source: the second stage of Hou, Zhan, Shrivastava, Wang, Livshits, Fanti, Lazar 2023, "Privately
Customizing Prefinetuning to Better Match User Data in Federated Learning", section 4: SGD with
momentum, the learning rate from a sweep, selection by validation data of the PUBLIC set.

    for each of a few learning rates, drawn log-uniformly:   one epoch from the same start
    for the one of least validation loss:                    the other epochs
    return the parameters of least validation loss

Nothing here reads a client's data, so it costs no privacy, and everything may be published. One
epoch is one dispatch: the corpus is on the device, and a scan goes over its minibatches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.data.cohort import batches
from jaxpfl.data.draws import generator_of
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.training import Columns, Fitted, validate
from jaxpfl.experiments.config.sections import PrefinetuneConfig
from jaxpfl.federated.clients.optimizers import updated
from jaxpfl.models.base import Model, summarise


@dataclass(frozen=True)
class Corpus:
    """The public training and validation columns, [examples, ...], of one candidate."""

    name: str
    train: Columns
    valid: Columns


def learning_rates(settings: PrefinetuneConfig, seed: int) -> list[float]:
    """Log-uniform draws that depend on the seed alone, so that all candidates have the same."""
    low, high = settings.learning_rates
    draws = generator_of(f"prefinetune {seed} learning rates").uniform(size=settings.trials)
    return [low * (high / low) ** float(draw) for draw in draws]


def prefinetune(
    model: Model,
    start: Any,
    corpus: Corpus,
    settings: PrefinetuneConfig,
    *,
    seed: int,
    callback: Callable[[int, float], None] = lambda done, loss: None,
) -> Fitted:
    """Trains `model` from the parameters `start` on a public corpus; deterministic in `seed`.

    After each epoch, `callback` is called with the number of epochs so far, of
    `trials` + `epochs` - 1, and the least validation loss so far.

    Returns:
      Parameters, and a record with "learning_rate", "best_epoch", "valid_loss", "trials" (learning
      rate and validation loss of each) and "epochs" (training and validation loss of each epoch of
      the chosen trial). Losses are in nats per target.
    """
    place = partial(jax.device_put, device=jax.local_devices()[0])
    train, valid = (place(dict(columns)) for columns in (corpus.train, corpus.valid))
    examples = len(next(iter(corpus.train.values())))
    held_out = place(batches(np.arange(len(next(iter(corpus.valid.values())))), 128))

    best, best_loss, best_epoch, done = start, math.inf, 0, 0

    def epoch(params: Any, trace: Any, rate: float, number: int) -> tuple[Any, Any, dict, bool]:
        """Parameters, momentum and losses after an epoch, and whether they are the best so far."""
        nonlocal best, best_loss, best_epoch, done
        rows = generator_of(f"prefinetune {seed} epoch {number}").permutation(examples)
        order = place(batches(rows, settings.batch_size))
        params, trace, loss = _epoch(
            model, settings.momentum, params, trace, train, order, place(np.float32(rate))
        )
        valid_loss = summarise(jax.device_get(validate(model, params, valid, held_out)))["loss"]
        # The loss of a diverged trial is NaN, for which this is false.
        better = valid_loss < best_loss
        if better:
            best, best_loss, best_epoch = params, valid_loss, number
        done += 1
        callback(done, best_loss)
        return params, trace, {"train_loss": float(loss), "valid_loss": valid_loss}, better

    start = place(start)
    no_momentum = place(optax.sgd(1.0, settings.momentum).init(start))
    trials, chosen = [], None
    for rate in learning_rates(settings, seed):
        params, trace, losses, better = epoch(start, no_momentum, rate, 1)
        trials.append({"learning_rate": rate, "valid_loss": losses["valid_loss"]})
        if better:
            chosen = params, trace, rate, [losses]
    if chosen is None:
        low, high = settings.learning_rates
        raise InputError(
            f"prefinetune: no learning rate in [{low:g}, {high:g}] gave a finite loss on "
            f"candidate {corpus.name!r}; choose lower ones"
        )
    params, trace, rate, epochs = chosen
    for number in range(2, settings.epochs + 1):
        params, trace, losses, _ = epoch(params, trace, rate, number)
        epochs.append(losses)
    record = {
        "learning_rate": rate,
        "best_epoch": best_epoch,
        "valid_loss": best_loss,
        "trials": trials,
        "epochs": epochs,
    }
    return Fitted(jax.device_get(best), record)


@partial(jax.jit, static_argnames=("model", "momentum"))
def _epoch(
    model: Model, momentum: float, params: Any, trace: Any, columns: Any, order: Any, rate: Any
) -> tuple[Any, Any, jax.Array]:
    """One epoch of SGD: parameters, momentum, mean training loss. One program serves all rates."""
    rows_SxB, mask_SxB = order
    optimizer = optax.sgd(rate, momentum)

    def step(carry, batch):
        (params, trace), (rows_B, mask_B) = carry, batch
        examples = {name: column[rows_B] for name, column in columns.items()}

        def loss(params):
            return model.loss(params, examples, mask_B)[0]

        value, gradients = jax.value_and_grad(loss)(params)
        updates, trace = updated(optimizer, gradients, trace, params)
        return (optax.apply_updates(params, updates), trace), value

    (params, trace), losses = jax.lax.scan(step, (params, trace), (rows_SxB, mask_SxB))
    return params, trace, jnp.mean(losses)
