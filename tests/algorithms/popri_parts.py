"""A small generator, and the settings of POPri that its tests share."""

from functools import cache

import jax
import numpy as np

from jaxpfl.algorithms import PopriSettings
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.training import fit
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.few_shot import FewShot
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.preference.optimisation import PreferenceSettings
from jaxpfl.text.tokenisers.base import packed
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

NEAR = ["ab ba ab", "ba ab ba", "ab ab ba", "ba ba ab"]
FAR = ["yz zy yz", "zy yz zy", "yz yz zy", "zy zy yz"]
SETTINGS = PopriSettings(
    prompts=16,
    responses=4,
    rejected_rank=3,
    format=FewShot(shots=1, head="", heading="", after="\n", stop="\n"),
    prompt_tokens=12,
    new_tokens=8,
    response_tokens=8,
    preference=PreferenceSettings(
        tau=0.1,
        epochs=3,
        batch_size=8,
        learning_rate=0.005,
        final_learning_rate=0.0025,
        weight_decay=0.01,
        multiple=32,
    ),
    lora=LoRA(rank=4, alpha=8.0),
)


@cache
def trained_generator() -> LanguageModel:
    """Writes lines of both kinds, whatever the line before."""
    model = Decoder(
        DecoderConfig(
            "llama",
            vocab_size=257,
            hidden_size=16,
            layers=2,
            heads=2,
            inner_size=32,
            positions=32,
            tied=True,
        )
    )
    rng = np.random.default_rng(0)
    lines = [(NEAR + FAR)[i] for i in rng.integers(0, 8, 2_000)]
    rows = packed(UTF8Bytes().encode(["\n".join(lines)]), 24, 256)
    params = model.init(jax.random.key(0))
    settings = Training(epochs=4, batch_size=16, learning_rate=0.02)
    found = fit(model, params, {"tokens": rows}, settings, seed=0)
    return LanguageModel(model, found.params, UTF8Bytes())
