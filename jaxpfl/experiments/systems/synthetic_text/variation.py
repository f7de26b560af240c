"""How private evolution varies texts in a study: one of `text.generation.variation`."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax

from jaxpfl.algorithms.private_evolution import Vary
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_models import PublicModels
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.remote import RemoteModel
from jaxpfl.text.generation.variation import Continue, Rephrase, mask_and_fill

# Loaded once in a process.
loaded_fill_model = lru_cache(maxsize=1)(mask_and_fill)


def vary_of(config: SyntheticTextConfig, generator: Any, public: PublicModels) -> Vary:
    """The function that varies texts; the new ones have the same format and length.

    Raises:
      InputError: `evolution.variation` is "rephrase", and the generator follows no instructions.
    """
    evolution, tokens, popri = config.evolution, config.corpus.tokens, config.popri
    clean, stop = popri.format.response, (popri.format.stop,) if popri.format.stop else ()
    if evolution.varied_by == "continue":
        return Continue(generator, 0.5, tokens, Decoding(stop=stop), clean)
    if evolution.varied_by == "rephrase":
        instructed = isinstance(generator, RemoteModel) or generator.tokeniser.chat is not None
        if not instructed:
            raise InputError(
                "evolution.variation must be 'fill' or 'continue', because the generator has no "
                "chat template, found 'rephrase', which asks for a text in other words"
            )
        return Rephrase(generator, tokens, Decoding(stop=stop), clean)
    if evolution.fill_model is None:
        fill = public.fill_model(evolution.masked, tokens)
    else:
        fill = loaded_fill_model(evolution.fill_model, tokens=tokens)

    def vary(texts: Sequence[str], key: jax.Array) -> list[str]:
        filled = [clean(text) for text in fill(texts, key)]
        # The masked language model may have another tokeniser than the generator.
        cut = generator.shortened(filled, tokens)
        return [new or old for new, old in zip(cut, texts, strict=True)]

    return vary
