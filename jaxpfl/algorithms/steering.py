"""A generator that is steered by ONE release of how clients' hidden states differ from public ones.

    for each client i, of texts x, at each chosen layer l of the generator's L ones
        d_il = clip_1( (mean over x of h_l(x) - m_l) / c_l )      m_l, c_l of public texts alone
    release = sum over all clients of (d_i1, ..., d_iL, w) + N(0, z^2)            scaled to norm 1
    v_l     = c_l * (the mean of d_il)                            the constant w counts the clients
    h_l    <- h_l + strength * v_l                                at every token, while it writes

h_l(x) is the output of layer l, averaged over the tokens of a text (`text.embed.encoder`);
m_l is its mean over public texts, and c_l the median distance of a public text from m_l. What
follows from the release is free: strength, prompts, and texts without limit.

Source: EPSVec (Banayeeanzade et al. 2026, arXiv:2602.21218): mean differences of hidden states
between private and public text by layer, clipped by public bounds and noised, steer a language
model. This form is OURS, of what the abstract and others' summaries say of the paper; none of its
code was read. The client is the unit here, there the example; all layers share one clip and one
noise; there are no classes; the fixed shots of its prompts, which cost it a part of epsilon, are
public texts here. The mean over tokens, the median, the equal parts of the layers, and the
strength and layer by default are our choices; these two were tried on public texts alone
(presidents' sentences after prompts of WikiSplit's, with SmolLM2). Before it: PSA
(arXiv:2501.18532), and PrivSV.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.base import Algorithm, answered_once
from jaxpfl.checked import Checked, NonNegative, PositiveFraction
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.moments import ClientMoment
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import Embedder, embedded
from jaxpfl.text.generation.language_model import LanguageModel

DIFFERENCES = "differences"
"""The column that the query reads, and its label."""

# The constant's share of a contribution's squared norm, as of FreD's count.
_COUNT_SHARE = 0.004


@dataclass(frozen=True)
class SteeringSettings(Checked):
    """Where and how strongly a generator is steered; public.

    Attributes:
      layers: the layers whose outputs are compared and moved, as fractions of the model's depth; 1
        is the last layer.
      strength: how many times the released difference is added; 0 steers nothing.
    """

    layers: tuple[PositiveFraction, ...] = (0.75,)
    strength: NonNegative = 1.0

    def check_fields(self) -> None:
        if not self.layers:
            raise InputError("layers must name at least one layer, found none")

    def numbers(self, depth: int) -> list[int]:
        """The layers of a model of so many, numbered from 0."""
        return sorted({math.ceil(depth * fraction) - 1 for fraction in self.layers})


class PublicStates(NamedTuple):
    """What clients' states are compared with, of public texts alone.

    Attributes:
      mean_LxH: by layer, the mean state.
      bound_L: by layer, the median distance of a text's state from the mean.
    """

    mean_LxH: np.ndarray
    bound_L: np.ndarray

    @classmethod
    def of(cls, states_NxD: np.ndarray, layers: int) -> Self:
        """The states [texts, layers * H] of public texts, at least two of which differ."""
        states_NxLxH = np.asarray(states_NxD, np.float64).reshape(len(states_NxD), layers, -1)
        mean_LxH = states_NxLxH.mean(axis=0)
        bound_L = np.median(np.linalg.norm(states_NxLxH - mean_LxH, axis=2), axis=0)
        if not (np.isfinite(bound_L) & (bound_L > 0)).all():
            what = "hidden states of public texts must be finite and differ in each layer"
            raise InputError(f"{what}, found median distances from the mean {bound_L.tolist()}")
        return cls(mean_LxH, bound_L)

    def rows(self, states_CxD: np.ndarray) -> np.ndarray:
        """Contributions of norm 1 at most, float32 [clients, D + 1], by clients' mean states.

        One that is not finite stays so: the client function leaves it out.
        """
        layers = len(self.bound_L)
        states_CxLxH = np.asarray(states_CxD, np.float64).reshape(len(states_CxD), layers, -1)
        with np.errstate(invalid="ignore"):
            scaled_CxLxH = (states_CxLxH - self.mean_LxH) / self.bound_L[:, None]
            norm_CxLx1 = np.linalg.norm(scaled_CxLxH, axis=2, keepdims=True)
            scaled_CxLxH *= math.sqrt((1 - _COUNT_SHARE) / layers) / np.maximum(norm_CxLx1, 1)
        constant_Cx1 = np.full((len(states_CxD), 1), math.sqrt(_COUNT_SHARE))
        rows_CxD = np.concatenate([scaled_CxLxH.reshape(states_CxD.shape), constant_Cx1], axis=1)
        return rows_CxD.astype(np.float32)

    def vectors(self, sum_D: np.ndarray, noise_std: float) -> dict[str, np.ndarray]:
        """What follows from the released sum, whose numbers have noise of this deviation; public.

        "vectors" [layers, H] are the clients' mean differences, no longer than the "bounds"
        [layers]; "noise" [layers] is the root mean square of the norm of the noise in each.
        """
        layers, sum_D = len(self.bound_L), np.asarray(sum_D, np.float64)
        count = max(sum_D[-1] / math.sqrt(_COUNT_SHARE), 1.0)
        scale = math.sqrt(layers / (1 - _COUNT_SHARE)) / count
        mean_LxH = sum_D[:-1].reshape(layers, -1) * scale
        # Only noise exceeds the bound.
        mean_LxH /= np.maximum(np.linalg.norm(mean_LxH, axis=1, keepdims=True), 1)
        noise_L = noise_std * scale * math.sqrt(mean_LxH.shape[1]) * self.bound_L
        vectors_LxH = mean_LxH * self.bound_L[:, None]
        return {"vectors": vectors_LxH, "bounds": self.bound_L, "noise": noise_L}


def with_differences(
    clients: Population, states: Embedder, public: PublicStates, *, progress: bool = False
) -> Population:
    """The clients with one example each, `PublicStates.rows` of their texts' mean. PRIVATE.

    That of a client without texts is zero.
    """
    sum_CxD = np.zeros((len(clients), states.dimension))
    sizes_C = np.diff(clients.offsets)
    owner_N = np.repeat(np.arange(len(clients)), sizes_C)
    for rows, vectors in embedded(clients, states, progress=progress):
        np.add.at(sum_CxD, owner_N[rows], vectors)
    rows_CxD = public.rows(sum_CxD / np.maximum(sizes_C, 1)[:, None])
    rows_CxD[sizes_C == 0] = 0
    return clients.with_examples({DIFFERENCES: rows_CxD}, np.arange(len(clients) + 1))


def steering(plan: Plan, dimension: int) -> Algorithm:
    """Returns the algorithm of the one release: a round in which all clients take part.

    Its state is the noisy sum of all contributions, float32 [dimension + 1].

    Args:
      plan: its clip norm is 1 and it has one round.
      dimension: of the clients' states; a contribution has one number more.
    """
    client_fn = ClientMoment("sum", plan.clip_norm, average=True)
    origin = jnp.zeros(dimension + 1, jnp.float32)
    reads: Any = {"column": DIFFERENCES, "max_examples": 1, "broadcast": origin}
    return answered_once("steered", DIFFERENCES, client_fn, plan, first=origin, **reads)


def steer(
    writer: LanguageModel, vectors_LxH: np.ndarray, settings: SteeringSettings
) -> LanguageModel:
    """The writer that adds a vector, times the strength, to the output of each chosen layer."""
    config = writer.model.config
    added_LxH = np.zeros((config.layers, config.hidden_size))
    added_LxH[settings.numbers(config.layers)] = settings.strength * vectors_LxH
    return writer.replaced(*writer.model.steer(writer.params, added_LxH))
