"""llama.cpp's side of `benchmarks.macro.smollm2`.

    python smollm2_llama.py FILE.npz

As `smollm2_jaxpfl`. Written as one would for speed: each prompt is read once, its last logits draw
the first tokens of all its responses, and its cache is copied to the slots. All responses are as
long, so no slot is idle. Each thread draws for a part of the slots.
"""

import ctypes
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

# On busy cores, threads that wait for each other in a loop would take most of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import llama_cpp as lib  # pyright: ignore[reportMissingImports]
import numpy as np
from turns import serve

silent = lib.llama_log_callback(lambda *_: None)


class Batch:
    """A token of each sequence in `sequence_N`, which may repeat."""

    def __init__(self, sequence_N: np.ndarray):
        self.held = lib.llama_batch_init(len(sequence_N), 0, 1)
        self.held.n_tokens = len(sequence_N)
        for i, sequence in enumerate(sequence_N.tolist()):
            self.held.n_seq_id[i], self.held.seq_id[i][0] = 1, sequence

    def read(self, context, *token_place_wanted) -> None:
        for name, values in zip(("token", "pos", "logits"), token_place_wanted, strict=True):
            np.ctypeslib.as_array(getattr(self.held, name), (self.held.n_tokens,))[:] = values
        assert lib.llama_decode(context, self.held) == 0


def loaded(file: str, form: str):
    with tempfile.NamedTemporaryFile() as made:
        if f".{form}." not in file:
            wanted = lib.llama_model_quantize_default_params()
            wanted.ftype, wanted.allow_requantize = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{form}"), True
            lib.llama_model_quantize(file.encode(), made.name.encode(), ctypes.byref(wanted))
            file = made.name
        return lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())


def sampler(seed: int):
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(0.9))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(0.95, 1))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
    return chain


def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        data = dict(arrays)
    prompts_PxL, new, share = data["prompts"], int(data["new"]), int(data["responses"])
    slots, threads, (number, length) = int(data["slots"]), int(data["threads"]), prompts_PxL.shape
    lib.llama_log_set(silent, None)
    model = loaded(str(data["gguf"]), str(data["form"]))
    settings = lib.llama_context_default_params()
    # The prompts' sequences follow those of the slots; each has a cache of its own.
    settings.n_seq_max, settings.n_ctx = slots + number, (slots + number) * (length + new)
    settings.n_batch, settings.n_outputs_max = prompts_PxL.size, max(slots + number, length)
    settings.n_threads = settings.n_threads_batch = threads
    context = lib.llama_init_from_model(model, settings)
    memory = lib.llama_get_memory(context)

    one, loss = Batch(np.zeros(length, int)), 0.0
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    for prompt_L in prompts_PxL:
        lib.llama_memory_clear(memory, False)
        one.read(context, prompt_L, np.arange(length), 1)
        for i, target in enumerate(prompt_L[1:]):
            logits_V = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (size,))
            loss += float(np.log(np.sum(np.exp(logits_V - logits_V[target]))))

    samplers, pool = [sampler(seed) for seed in range(number * share)], ThreadPoolExecutor(threads)
    prompts, step = Batch(np.repeat(slots + np.arange(number), length)), Batch(np.arange(slots))
    place_N = np.tile(np.arange(length), number)

    def drawn(first: int, rows: list[int]) -> list[int]:
        """A token of each of the requests from `first` on, by rows of the last batch's logits."""

        def part(of: range) -> list[int]:
            return [lib.llama_sampler_sample(samplers[first + i], context, rows[i]) for i in of]

        parts = pool.map(part, np.array_split(range(len(rows)), threads))
        return [token for tokens in parts for token in tokens]

    def turn() -> None:
        lib.llama_memory_clear(memory, False)
        prompts.read(context, prompts_PxL.ravel(), place_N, place_N == length - 1)
        begun = drawn(0, np.repeat(np.flatnonzero(place_N == length - 1), share).tolist())
        for first in range(0, len(samplers), slots):
            for slot in range(slots):
                lib.llama_memory_seq_rm(memory, slot, -1, -1)
                lib.llama_memory_seq_cp(memory, slots + (first + slot) // share, slot, -1, -1)
            tokens = begun[first : first + slots]
            for place in range(length, length + new - 1):
                step.read(context, tokens, place, 1)
                tokens = drawn(first, list(range(slots)))

    serve(turn, version=lib.__version__, loss=loss / number / (length - 1))


if __name__ == "__main__":
    main(sys.argv[1])
