import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpfl.models import PAD
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.decoder.quantise import quantise
from jaxpfl.text.generation import sampling
from jaxpfl.text.generation.decoding import Decoding, draw, keep_top_p, probabilities
from jaxpfl.text.generation.sampling import sample
from jaxpfl.text.tokenisers.base import Tokeniser, pad

SIZES = dict(vocab_size=37, hidden_size=16, layers=2, heads=4, positions=64)
GPT2 = Decoder(DecoderConfig("gpt2", **SIZES, initializer_range=0.3))
LLAMA = Decoder(
    DecoderConfig("llama", **SIZES, kv_heads=2, inner_size=24, tied=True, initializer_range=0.3)
)
GEMMA3 = Decoder(
    DecoderConfig("gemma3_text", **SIZES, window=4, window_period=2, initializer_range=0.3)
)
BOTH = pytest.mark.parametrize(
    "model",
    [pytest.param(GPT2, id="gpt2", marks=pytest.mark.long), pytest.param(LLAMA, id="llama")],
)
PROMPTS = pad(
    [np.random.default_rng(n).integers(0, 37, n).astype(np.int32) for n in (1, 3, 17, 8, 5, 1)], 20
)


class Ids(Tokeniser):
    """The tokeniser of a vocabulary in which every id stands for some byte."""

    name = "ids"

    def __init__(self, vocab_size, ends=()):
        self.vocab_size, self.ends = vocab_size, ends

    def token_bytes(self):
        return (b"x",) * self.vocab_size


@lru_cache
def params_of(model):
    return jax.jit(model.init)(jax.random.key(0))


ENDS = Ids(37, (3, 5))


def key():
    return jax.random.key(7)


def mesh_of(*shape):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


@partial(jax.jit, static_argnums=(0, 1))
def _next(model, decoding, params, row, held, request, t):
    """The token after `held` tokens, from the whole row."""
    logits = model.logits(params, model.hidden(params, row)[:, held - 1])
    if decoding.temperature == 0:
        return jnp.argmax(logits[0]).astype(jnp.int32)
    weights = probabilities(logits, jnp.float32(decoding.temperature))
    if decoding.top_p < 1:
        weights = keep_top_p(weights, jnp.float32(decoding.top_p))
    return draw(jax.random.fold_in(request, t)[None], weights)[0]


def without_cache(model, params, prompt, p, j, decoding, ends=()):
    """One request, by reading everything again for every token."""
    request = jax.random.fold_in(jax.random.fold_in(key(), p), j)
    held = int((prompt != PAD).sum())
    row = np.full((1, 64), PAD, np.int32)
    row[0, :held] = prompt[:held]
    drawn = []
    for t in range(decoding.max_new_tokens):
        token = int(_next(model, decoding, params, row, held, jax.random.clone(request), t))
        drawn.append(token)
        if token in ends or t + 1 == decoding.max_new_tokens:
            break
        # A new array: JAX may still be reading the old one.
        row = row.copy()
        row[0, held] = token
        held += 1
    return drawn + [PAD] * (decoding.max_new_tokens - len(drawn))


def drawn_by(model, prompts, key=None, params=None, **changed):
    """Draws in few slots, with settings that share their programs among the tests."""
    arguments = dict(decoding=Decoding(7), responses=3, slots=4, tokeniser=ENDS) | changed
    key = jax.random.key(7) if key is None else key
    params = params_of(model) if params is None else params
    return sample(model, params, prompts, key, **arguments)


@BOTH
@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(max_new_tokens=7, temperature=0),
        pytest.param(Decoding(max_new_tokens=7), marks=pytest.mark.long),
        Decoding(max_new_tokens=7, top_p=0.6),
    ],
    ids=["greedy", "sampled", "nucleus"],
)
def test_cached_is_uncached(model, decoding):
    """Of prompts of several lengths, more requests than slots, and an end among the tokens."""
    params = params_of(model)
    drawn = drawn_by(model, PROMPTS, decoding=decoding)
    for p, prompt in enumerate(PROMPTS):
        for j in range(2):
            expected = without_cache(model, params, prompt, p, j, decoding, (3, 5))
            assert drawn[p, j].tolist() == expected
    assert len({row.tobytes() for row in drawn.reshape(-1, 7)}) > (4 if decoding.temperature else 3)


@BOTH
def test_a_request_gives_the_same_tokens_in_any_company(model):
    many = drawn_by(model, PROMPTS)
    np.testing.assert_array_equal(drawn_by(model, PROMPTS[:2]), many[:2])
    others = PROMPTS.copy()
    others[[0, 2, 3]] = PROMPTS[[3, 0, 2]]
    changed = drawn_by(model, others)
    np.testing.assert_array_equal(changed[[1, 4, 5]], many[[1, 4, 5]])
    assert (changed[0] != many[0]).any()


def test_neither_responses_nor_slots_change_a_request():
    many = drawn_by(LLAMA, PROMPTS)
    np.testing.assert_array_equal(drawn_by(LLAMA, PROMPTS[:2], responses=1), many[:2, :1])
    np.testing.assert_array_equal(drawn_by(LLAMA, PROMPTS, slots=16), many)


def test_prompts_of_many_prefill_batches_go_through_the_same_slots(monkeypatch):
    """Requests begin in one batch and end in another; the ends make them of unequal length."""
    prompts = np.random.default_rng(1).integers(0, 37, (23, 6), np.int32)
    whole = drawn_by(LLAMA, prompts)
    for tokens in ("_CPU_PREFILL_TOKENS", "_PREFILL_TOKENS"):
        monkeypatch.setattr(sampling, tokens, 32)
    np.testing.assert_array_equal(drawn_by(LLAMA, prompts), whole)
    assert len(np.unique((whole != PAD).sum(-1))) > 3


def test_devices_share_the_requests():
    """Two devices draw what one draws; one prompt's responses too are shared."""
    for prompts, responses in ((PROMPTS, 3), (PROMPTS[:1], 3), (PROMPTS[:1], 1)):
        alone = drawn_by(LLAMA, prompts, responses=responses)
        shared = drawn_by(LLAMA, prompts, responses=responses, mesh=mesh_of(2))
        np.testing.assert_array_equal(shared, alone)


@pytest.mark.parametrize("shape", [pytest.param((2, 1), marks=pytest.mark.long), (1, 2)])
def test_sharded_parameters(shape):
    """Heads dealt out over "model", or matrices over "data" too: the same tokens."""
    mesh = mesh_of(*shape)
    params = params_of(LLAMA)
    sharded = jax.device_put(params, LLAMA.shardings(mesh, params))
    shared = drawn_by(LLAMA, PROMPTS, params=sharded, mesh=mesh)
    np.testing.assert_array_equal(shared, drawn_by(LLAMA, PROMPTS))


def test_a_device_holds_its_own_heads_of_the_cache():
    """Also where the whole model lies on each of them: the cache may be larger than the model."""
    cache = sampling.idle_slots(LLAMA, mesh_of(1, 2), slots=3, room=8, devices=1)().carry
    for whole in (cache.keys, cache.values):
        held = whole.sharding.shard_shape(whole.shape)
        assert np.prod(held) == whole.size / 2 and held[3] == 1


@pytest.mark.long
def test_adapters_and_int8_weights_and_windows_and_bfloat16():
    """Each draws what its own uncached network draws; bfloat16 rounds otherwise and is only run."""
    params = params_of(LLAMA)
    with_adapters, adapted = lora.attach(LLAMA, params, LoRA(rank=2, alpha=8.0), jax.random.key(1))
    adapted = jax.tree.map(lambda leaf: leaf + jnp.float32(0.05), adapted)
    decoding = Decoding(max_new_tokens=5)
    gemma = (GEMMA3, params_of(GEMMA3))
    for model, own in ((with_adapters, adapted), quantise(LLAMA, params), gemma):
        drawn = sample(model, own, PROMPTS[:3], key(), decoding=decoding)
        for p in range(3):
            assert drawn[p, 0].tolist() == without_cache(model, own, PROMPTS[p], p, 0, decoding)
    small = Decoder(LLAMA.config, compute="bfloat16")
    drawn = sample(small, params, PROMPTS, key(), decoding=decoding)
    assert ((drawn >= 0) & (drawn < 37)).all()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_cache_is_never_copied(compute):
    """What a step or a new request costs must not grow with the room of all slots."""
    slots, new = 5, 11
    model = Decoder(LLAMA.config, compute=compute)
    program = sampling.Program(model, None, new, (3,), False, False)
    state = sampling.idle_slots(model, None, slots, 16 + new, 1)()
    words = np.zeros((12, 2), np.uint32)
    batch, _ = next(sampling.prefill_batches(PROMPTS[:2, :4], np.arange(2), words, 6, 1, 16, 2))
    controls = sampling._controls(LLAMA, Decoding(new), None)
    last = jnp.bool(True)
    lowered = sampling.run_prefill_batch.lower(
        program, params_of(LLAMA), controls, state, batch, last
    )
    shapes = {
        re.escape(f"[{str(part.shape[1:])[1:-1].replace(' ', '')}]") for part in state.carry[:2]
    }
    text = lowered.compile().as_text()
    defined = [line for line in text.splitlines() if re.search(f"= \\w+({'|'.join(shapes)})", line)]
    assert any("scatter" in line for line in defined)
    assert all({"float32": "= f32", "bfloat16": "= u16"}[compute] in line for line in defined)
    bad = r"\b(copy|select|concatenate|pad|broadcast|transpose)\("
    assert not [line for line in defined if re.search(bad, line)]


def test_ids_without_meaning_are_never_drawn():
    """A model may have more rows than its tokeniser has ids."""
    hot = Decoding(7, temperature=3.0)
    assert drawn_by(LLAMA, PROMPTS, decoding=hot).max() >= 30
    assert drawn_by(LLAMA, PROMPTS, decoding=hot, tokeniser=Ids(30, (3, 5))).max() < 30


def test_a_key_of_another_kind():
    """Noise keys have 128 bits; inside a loop they would take minutes to compile."""
    other = jax.random.key(7, impl="threefry4x32")
    drawn = drawn_by(LLAMA, PROMPTS, key=other)
    assert drawn.shape == (6, 3, 7)
    assert (drawn != drawn_by(LLAMA, PROMPTS)).any()


def test_the_longest_prompt_that_fits_is_read():
    decoding, fits, params = Decoding(5), np.ones((1, 60), np.int32), params_of(GPT2)
    drawn = sample(GPT2, params, fits, key(), decoding=decoding)
    assert drawn[0, 0].tolist() == without_cache(GPT2, params, fits[0], 0, 0, decoding)
