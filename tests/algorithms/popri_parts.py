"""A small generator, clients who write like half of its lines, and settings of POPri."""

from functools import cache

import numpy as np

from jaxpfl.algorithms import PopriSettings, Scorer
from jaxpfl.data import Population, from_clients
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.training import fit
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.embed import embed, embedder
from jaxpfl.text.generation.few_shot import FewShot
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.preference.optimisation import PreferenceSettings
from jaxpfl.text.tokenisers.base import packed
from tests.published_models import SIZES
from tests.text.tokenisers.utf8_bytes import UTF8Bytes
from tests.trees import drawn

# Of bytes, whose ends of texts are 256.
WRITER = Decoder(DecoderConfig("llama", vocab_size=257, positions=32, tied=True, **SIZES))
HASHED = embedder("hashed:32")
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
    rng = np.random.default_rng(0)
    lines = [(NEAR + FAR)[i] for i in rng.integers(0, 8, 2_000)]
    rows = packed(UTF8Bytes().encode(["\n".join(lines)]), 24, 256)
    settings = Training(epochs=4, batch_size=16, learning_rate=0.02)
    found = fit(WRITER, drawn(WRITER, 0), {"tokens": rows}, settings, seed=0)
    return LanguageModel(WRITER, found.params, UTF8Bytes())


def near_clients(count: int = 40) -> Population:
    """Clients who write "ab" and "ba" alone."""
    held = {f"client {k}": {"text": [NEAR[k % 4], NEAR[(k + 1) % 4]]} for k in range(count)}
    return embed(from_clients(held), HASHED, progress=False)


class Flipped(Scorer):
    """Releases the opposite of what it should."""

    def release(self, release, candidates_KxJxD, round):
        return -super().release(release, candidates_KxJxD, round)
