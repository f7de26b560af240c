"""This library's side of `benchmarks.macro.smollm2`.

    python smollm2_jaxpfl.py FILE.npz

The file names the folder of the weights and holds the tokens and the settings. One line answers the
start, with the loss of the prompts; each line read makes a turn and is answered with its processor
seconds.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from turns import serve

from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.sampling import sample
from jaxpfl.text.preference.groups import groups_of
from jaxpfl.text.preference.optimisation import PreferenceSettings, tune


def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        data = dict(arrays)
    dtype = str(data["dtype"])
    model, params = pretrained.load(str(data["folder"]), dtype=dtype)
    assert isinstance(model, Decoder)
    prompts_PxL = jnp.asarray(data["prompts"])

    real_P = jnp.ones(len(prompts_PxL), bool)
    loss, _ = jax.jit(model.loss)(params, {"tokens": prompts_PxL}, real_P)
    if data["kind"] != "DPO":
        decoding, responses = Decoding(int(data["new"]), 0.9, 0.95), int(data["responses"])
        key = jax.random.key(1)

        def turn() -> None:
            sample(model, params, data["prompts"], key, decoding=decoding, responses=responses)

    else:
        pairs = int(data["pairs"])
        settings = PreferenceSettings(
            epochs=1, batch_size=pairs, microbatch_size=pairs, multiple=32, dtype=model.compute
        )
        groups = groups_of(list(data["asked"]), [*map(list, data["answered"])])
        adapted, params = lora.attach(model, params, LoRA(rank=8), jax.random.key(1))

        def turn() -> None:
            jax.block_until_ready(tune(adapted, params, groups, settings, seed=0).params)

    serve(turn, loss=float(loss))


if __name__ == "__main__":
    main(sys.argv[1])
