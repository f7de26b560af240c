"""Models that no machine holds: refused by a run, told by what only traces."""

import jax
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models import CIFGLanguageModel, classifier_cnn, count_parameters
from jaxpfl.models.base import initialised
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.network import Decoder
from tests.models.decoder.test_network import LLAMA, drawn

HUGE = CIFGLanguageModel(vocab_size=10**9, embedding=1_000, hidden=8, projection=1_000)


def test_a_model_larger_than_memory_is_refused_before_it_is_drawn():
    """TRUST 39: 4 TB of parameters."""
    with pytest.raises(InputError, match=r"^a model of 1,00\d,\d{3},\d{3},\d{3} parameters would"):
        initialised(HUGE, jax.random.key(0))


def test_any_model_can_be_traced():
    """A dry run is for a run of another machine, perhaps."""
    shapes = jax.eval_shape(lambda key: initialised(HUGE, key), jax.random.key(0))
    assert count_parameters(shapes) > 10**12


def test_a_model_that_fits_is_drawn_as_ever():
    model = classifier_cnn((8, 8, 1), 10)
    key = jax.random.key(1)
    found, expected = initialised(model, key), model.init(key)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))


def test_adapters_of_a_rank_that_no_machine_holds_are_refused():
    model = Decoder(LLAMA)
    params = drawn(model)
    with pytest.raises(InputError, match=r"^adapters of rank 1,000,000,000 would take .* GiB"):
        lora.attach(model, params, LoRA(rank=10**9), jax.random.key(0))
    shapes = jax.eval_shape(
        lambda params: lora.attach(model, params, LoRA(rank=10**9), jax.random.key(0))[1], params
    )
    assert count_parameters(shapes) > 10**9
