"""Prefinetuning: central training on a public corpus, before the first private round.

Source: the second stage of Hou, Zhan, Shrivastava, Wang, Livshits, Fanti, Lazar 2023, "Privately
Customizing Prefinetuning to Better Match User Data in Federated Learning", section 4: SGD with
momentum, the learning rate from a sweep, selection by validation data of the PUBLIC set.

    for each of a few learning rates, drawn log-uniformly:   one epoch from the same start
    for the one of least validation loss:                    the other epochs
    return the parameters of least validation loss

Nothing here reads a client's data, so it costs no privacy, and everything may be published.
"""

import math
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
from jaxpfl.experiments.central import training
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.scoring import in_batches, score
from jaxpfl.experiments.central.training import Columns, Fitted, TrainState
from jaxpfl.experiments.config.sections import PrefinetuneConfig
from jaxpfl.federated.clients.client import Static
from jaxpfl.models.base import Model
from jaxpfl.progress import Progress


@dataclass(frozen=True)
class _Momentum(Training):
    """SGD with momentum; the optimiser's state has the rate, so that one program serves all."""

    clip_norm: None = None
    momentum: float = 0.9

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        del steps
        return optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=self.momentum)


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
    progress: bool = False,
) -> Fitted:
    """Trains `model` from the parameters `start` on a public corpus; deterministic in `seed`.

    Returns:
      Parameters, and a record with "learning_rate", "best_epoch", "valid_loss", "trials" (learning
      rate and validation loss of each) and "epochs" (training and validation loss of each epoch of
      the chosen trial). Losses are means over all targets of an epoch, in nats.
    """
    device = jax.local_devices()[0]
    place = partial(jax.device_put, device=device)
    train, examples = place(dict(corpus.train)), len(next(iter(corpus.train.values())))
    scored, held_out = Static(model), in_batches(corpus.valid, 128)
    descent = _Momentum(momentum=settings.momentum)
    best, best_loss, best_epoch, done = start, math.inf, 0, 0

    def epoch(state: TrainState, number: int) -> tuple[TrainState, dict[str, float], bool]:
        """The state and losses after an epoch, and whether its parameters are the best so far."""
        nonlocal best, best_loss, best_epoch, done
        rows = generator_of(f"prefinetune {seed} epoch {number}").permutation(examples)
        order = place(batches(rows, settings.batch_size))
        ends = place((np.int32(0), np.int32(len(order[0]))))
        state, _ = training.run(model, descent, 1, state, None, train, order, *ends)
        state, mean = training.epoch_ended(state)
        valid_loss = score(scored, state.params, held_out).result()["loss"]
        # The loss of a diverged trial is NaN, for which this is false.
        better = valid_loss < best_loss
        if better:
            best, best_loss, best_epoch = jax.tree.map(jnp.copy, state.params), valid_loss, number
        done += 1
        bar.update(done, {"public loss": f"{best_loss:.4g}"})
        return state, {"train_loss": float(mean), "valid_loss": valid_loss}, better

    trials, chosen = [], None
    # An epoch of each trial, and the others of the chosen one.
    total, title = settings.trials + settings.epochs - 1, f"prefinetune on {corpus.name}"
    with Progress(title, total=total, progress=progress, step="epoch") as bar:
        for rate in learning_rates(settings, seed):
            first = training.start(start, descent, 1, device)
            first.moments.hyperparams["learning_rate"] = place(np.float32(rate))
            state, losses, better = epoch(first, 1)
            trials.append({"learning_rate": rate, "valid_loss": losses["valid_loss"]})
            if better:
                chosen = state, rate, [losses]
        if chosen is None:
            low, high = settings.learning_rates
            rates = f"no learning rate in [{low:g}, {high:g}] gave a finite loss on"
            raise InputError(f"prefinetune: {rates} candidate {corpus.name!r}; choose lower ones")
        state, rate, epochs = chosen
        for number in range(2, settings.epochs + 1):
            state, losses, _ = epoch(state, number)
            epochs.append(losses)
    record: dict[str, Any] = {"learning_rate": rate, "trials": trials, "epochs": epochs}
    record |= {"best_epoch": best_epoch, "valid_loss": best_loss}
    return Fitted(jax.device_get(best), record)
