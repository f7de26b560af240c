"""The generator of a run that several processes share: all of them write and tune with it.

Process 0 decides what is written and tuned. It sends prompts or pairs, and the adapters, which are
small; then all make the same call on the devices of all, each with its part of the base.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpfl.federated.hosts.shared_rounds import SharedRounds
from jaxpfl.federated.mesh import shardings, splits_model
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.microbatches import read
from jaxpfl.text.preference.groups import Groups
from jaxpfl.text.preference.optimisation import Carried, PreferenceSettings, Tuned, tune

PyTree = Any
LOAD, DIGEST, WRITE, TUNE = "load", "digest", "write", "tune"


@dataclass(frozen=True)
class SharedModel(LanguageModel):
    """A language model in process 0, whose mesh has the devices of all processes.

    Each call here is made by all; the parameters of the base cannot be read otherwise.
    """

    others: Any = field(default=None, repr=False)

    def digest(self) -> str:
        return self.others.together(DIGEST, (), {}, self._plain.digest)

    def sampled(
        self,
        prompts_PxL: np.ndarray,
        key: Array,
        decoding: Decoding,
        responses: int,
        progress: bool,
    ) -> np.ndarray:
        known = (_adapters(self.params), prompts_PxL, np.asarray(jax.random.key_data(key)))
        about = {"decoding": dataclasses.asdict(decoding), "responses": responses}

        def compute() -> np.ndarray:
            return _write(self._plain, known, about, progress)

        return self.others.together(WRITE, known, about, compute)

    def tune(
        self,
        model: Decoder,
        params: Params,
        groups: Groups,
        settings: PreferenceSettings,
        *,
        seed: int,
        carried: Carried | None = None,
        mesh: Mesh | None = None,
        progress: bool = False,
    ) -> Tuned:
        """As `text.preference.optimisation.tune`; what it returns are arrays of NumPy."""
        given = (groups.prompt_NxP, groups.responses_NxGxT)
        if groups.advantage_NxG is not None:
            given += (groups.advantage_NxG,)
        state, steps = ((), None) if carried is None else carried
        known = jax.tree.map(np.asarray, (_adapters(params), given, state))
        about = {"settings": dataclasses.asdict(settings), "seed": seed, "steps": steps}

        def compute() -> Tuned:
            found = LanguageModel(model, params, self.tokeniser, mesh)
            return _tune(found, known, about, progress)

        return self.others.together(TUNE, known, about, compute)

    @property
    def _plain(self) -> LanguageModel:
        return LanguageModel(self.model, self.params, self.tokeniser, self.mesh)


def load(others: SharedRounds, loaded: Callable[[], LanguageModel]) -> SharedModel:
    """The model that all processes load, in process 0."""
    found = others.together(LOAD, (), {}, loaded)
    return SharedModel(**vars(found), others=others)


def spread(found: LanguageModel, mesh: Mesh) -> LanguageModel:
    """The model on a mesh, in parts where several devices share a copy of it.

    This process has the parameters whole, or in parts that are in their place.
    """

    def placed(leaf: Array, place: Any) -> Array:
        if leaf.sharding == place:
            return leaf
        return jax.make_array_from_callback(leaf.shape, place, np.asarray(leaf).__getitem__)

    places = shardings(found.model if splits_model(mesh) else None, mesh, found.params)
    return dataclasses.replace(found, params=jax.tree.map(placed, found.params, places), mesh=mesh)


def take_part(base: LanguageModel, lora: LoRA, task: str, known: PyTree, about: Any) -> None:
    """Another process's part in what process 0 computes; `lora` is of the adapters it sends."""
    if task == DIGEST:
        base.digest()
    elif task != LOAD:
        if known[0]:
            base = base.replaced(dataclasses.replace(base.model, lora=lora), base.params)
        (_write if task == WRITE else _tune)(base, known, about)


def _write(found: LanguageModel, known: PyTree, about: Any, progress: bool = False) -> np.ndarray:
    adapters, prompts_PxL, key = known
    return _with(found, adapters).sampled(
        prompts_PxL,
        jax.random.wrap_key_data(key),
        Decoding(**about["decoding"]),
        about["responses"],
        progress,
    )


def _tune(found: LanguageModel, known: PyTree, about: Any, progress: bool = False) -> Tuned:
    adapters, groups, state = known
    found = _with(found, adapters)
    tuned = tune(
        found.model,
        found.params,
        Groups(*groups),
        PreferenceSettings(**about["settings"]),
        seed=about["seed"],
        carried=None if about["steps"] is None else Carried(state, about["steps"]),
        mesh=found.mesh,
        progress=progress,
    )
    after, base = adapter_trees.split(tuned.params)
    after, state = jax.tree.map(read, (after, tuned.optimizer))
    return Tuned(adapter_trees.join(after, base), tuned.record, state)


def _adapters(params: Params) -> PyTree:
    return jax.tree.map(np.asarray, adapter_trees.split(params)[0])


def _with(found: LanguageModel, adapters: PyTree) -> LanguageModel:
    """The model with adapters of NumPy, which are the same in all processes."""
    base = adapter_trees.split(found.params)[1]
    return found.replaced(found.model, adapter_trees.join(adapters, base))
