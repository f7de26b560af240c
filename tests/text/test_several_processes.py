"""Two real processes split a decoder: they write and tune as one process with two devices does."""

import json

import numpy as np
import pytest

from tests.federated.two_processes import ended, free_address, start

SPLIT = """
import json, sys
import jax
if len(sys.argv) > 1:
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from jaxpfl.models import adapter_trees
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.sampling import sample
from jaxpfl.text.microbatches import read
from jaxpfl.text.preference.optimisation import tune
from tests.text.generation.test_sampling import LLAMA, PROMPTS, key, mesh_of, params_of
from tests.text.preference.test_optimisation import SETTINGS, _model, _pairs

assert [len(jax.devices()), len(jax.local_devices())] == [2, 1 if sys.argv[1:] else 2]
plain, (model, adapted), found = params_of(LLAMA), _model(), []
for shape in (1, 2), (2, 1):
    mesh = mesh_of(*shape)
    params, tuned = (
        jax.device_put(jax.device_get(each), of.shardings(mesh, each))
        for of, each in ((LLAMA, plain), (model, adapted))
    )
    split = [x for x in jax.tree.leaves(params) if not x.is_fully_replicated]
    assert len(split) > 5, "the decoder is whole on every device"
    tokens = sample(
        LLAMA, params, PROMPTS, key(), decoding=Decoding(max_new_tokens=6), responses=2, mesh=mesh
    )
    after = tune(model, tuned, _pairs(), SETTINGS, seed=0, mesh=mesh).params
    adapters = jax.tree.leaves(adapter_trees.split(after)[0])
    found.append([tokens.tolist(), [read(each).ravel().tolist() for each in adapters]])
print(json.dumps(found))
"""


@pytest.mark.long
def test_two_processes_split_a_decoder_as_one_does():
    """By its heads and inner features, and by the batch with its weights in shards."""
    address = free_address()
    two = [start(["-c", SPLIT, address, str(index)], devices=1) for index in range(2)]
    (code, alone, errors), *shared = ended([start(["-c", SPLIT]), *two])
    assert code == 0, errors
    for code, said, errors in shared:
        assert code == 0, errors
        both = (json.loads(each.splitlines()[-1]) for each in (said, alone))
        for ours, theirs in zip(*both, strict=True):
            assert ours[0] == theirs[0]
            for here, there in zip(ours[1], theirs[1], strict=True):
                np.testing.assert_allclose(here, there, atol=1e-5)
