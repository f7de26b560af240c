"""The hot programs of every system, as shapes on a mesh: nothing is drawn, read or run."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.compile.targets import Target

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program.

    Attributes:
      what: the part of a system's work, such as "accumulate".
      traced: a `jax.stages.Traced`.
      trips: see `reading.products`.
      model: bytes of the model, or of what is summed; 0 where there is none.
      work: what one call does, in words.
      copies: devices that each do all of it.
    """

    what: str
    traced: Any
    trips: tuple[int, ...] = ()
    model: int = 0
    work: str = ""
    copies: int = 1


def _placed(tree: PyTree, sharding: Any) -> PyTree:
    import jax

    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _column(*shape: int, dtype: str) -> Any:
    import numpy as np

    return np.empty((0, *shape), dtype)


def _plan() -> Any:
    import jaxpfl as jp

    return jp.Plan(
        clip=jp.Clip(0.3),
        participation=jp.Poisson(342_477, clients_per_round=5_000),
        rounds=1_600,
        noise=jp.Noise(1.0),
        delta=1e-9,
    )


def _released(
    target: Target,
    client_fn: Any,
    params: PyTree,
    columns: Mapping[str, Any],
    *,
    batch_size: int,
    max_examples: int,
    clients_per_device: int = 32,
    chunk: int | None = None,
    model: int = 1,
) -> Iterator[Program]:
    """The programs of a release, from the clients' training to the noise.

    Args:
      clients_per_device: or per copy of the model, which `model` devices share.
    """
    from benchmarks.compile.release_programs import release_programs
    from jaxpfl.data.cohort import CohortSpec
    from jaxpfl.federated.audits.rehearsal import size_of
    from jaxpfl.federated.release import identity
    from jaxpfl.federated.release.door import Door
    from jaxpfl.federated.release.query import Execution, Query

    mesh = target.mesh(clients=-1) if model == 1 else target.mesh(clients=-1, model=model)
    slots = clients_per_device * target.devices // model
    spec = CohortSpec(batch_size, max_examples, clients_per_bucket=slots)
    query = Query("update", client_fn, _plan(), spec, execution=Execution(mesh, chunk))
    client = identity.traced(query, params, columns)
    contribution = client.contribution
    door = Door(query, contribution, client.client_state)
    steps = spec.rungs[-1]
    trips = (clients_per_device // door.chunk, steps)
    work = (
        f"{clients_per_device} clients of {steps} batches of {batch_size}, {door.chunk} at a time"
    )
    for what, traced in release_programs(door, params, columns).items():
        adds = what == "accumulate"
        yield Program(what, traced, trips if adds else (), size_of(contribution), adds * work)


def _trained(target: Target, model: Any, columns: Mapping[str, Any], **cohort: Any) -> Any:
    """DP-FedAvg of a whole model."""
    import jax
    import optax

    from jaxpfl.federated.clients.local_training import LocalTraining

    params = jax.eval_shape(model.init, jax.random.key(0))
    training = LocalTraining(model, optax.sgd(0.1))
    return _released(target, training, params, columns, **cohort)


def emnist_cnn(target: Target) -> Iterator[Program]:
    import jaxpfl as jp

    columns = {"image": _column(28, 28, 1, dtype="float32"), "label": _column(dtype="int32")}
    model = jp.models.emnist_cnn()
    return _trained(target, model, columns, batch_size=20, max_examples=100)


def scaffold(target: Target) -> Iterator[Program]:
    """A round with client state: control variates of the size of the model, of 32 clients."""
    import jax
    import optax

    import jaxpfl as jp
    from jaxpfl.algorithms.scaffold import CorrectedTraining, Parts
    from jaxpfl.federated.clients.local_training import TwoParts

    columns = {"image": _column(28, 28, 1, dtype="float32"), "label": _column(dtype="int32")}
    model = jp.models.emnist_cnn()
    params = jax.eval_shape(model.init, jax.random.key(0))
    parts = TwoParts.of(_plan(), "variate", 1.0, 0.5)
    client = CorrectedTraining(model, optax.sgd(0.1), learning_rate=0.1, parts=parts)
    sent = Parts(params, params)
    return _released(target, client, sent, columns, batch_size=20, max_examples=100)


def word_model(target: Target) -> Iterator[Program]:
    import jaxpfl as jp

    model = jp.models.CIFGLanguageModel(10_000, embedding=96, hidden=670)
    columns = {"tokens": _column(21, dtype="int32")}
    return _trained(target, model, columns, batch_size=16, max_examples=256)


def gan(target: Target) -> Iterator[Program]:
    import jax
    import optax

    import jaxpfl as jp
    from jaxpfl.algorithms.fed_avg_gan import CriticTraining

    model = jp.models.GAN()
    params = jax.eval_shape(model.init, jax.random.key(0))
    columns = {"image": _column(28, 28, 1, dtype="float32")}
    training = CriticTraining(model, optax.sgd(5e-4))
    return _released(target, training, params, columns, batch_size=32, max_examples=192)


def distilgpt2(target: Target) -> Iterator[Program]:
    from benchmarks.shapes import distilgpt2
    from jaxpfl.models.decoder.network import Decoder

    model = Decoder(distilgpt2(), compute="bfloat16", remat=True)
    columns = {"tokens": _column(64, dtype="int32")}
    return _trained(
        target, model, columns, batch_size=8, max_examples=32, clients_per_device=8, chunk=2
    )


def _decoder(shape: Any, rank: int, int8: bool = False) -> tuple[Any, PyTree]:
    """A decoder of `benchmarks.shapes` in bfloat16 or int8, with adapters of this rank."""
    import jax
    import jax.numpy as jnp

    from jaxpfl.models.decoder import lora
    from jaxpfl.models.decoder.config import LoRA
    from jaxpfl.models.decoder.network import Decoder
    from jaxpfl.models.decoder.quantise import quantise

    model = Decoder(shape, compute="bfloat16", remat=True)
    made = []

    def init() -> PyTree:
        found, params = model, model.init(jax.random.key(0), jnp.bfloat16)
        if int8:
            found, params = quantise(found, params)
        adapters = LoRA(rank=rank, alpha=8.0)
        found, params = lora.attach(found, params, adapters, jax.random.key(1))
        made.append(found)
        return params

    params = jax.eval_shape(init)
    return made[-1], params


def llama3_lora(target: Target, model: int = 1) -> Iterator[Program]:
    """DP-FedAvg of the adapters; the base is int8, because a 16 GB chip holds it whole."""
    from benchmarks.shapes import llama3_8b

    many = {"clients_per_device": 4, "chunk": 1, "model": model}
    return _adapters_trained(target, _decoder(llama3_8b(), rank=4, int8=True), **many)


def smollm2_lora(target: Target) -> Iterator[Program]:
    from benchmarks.shapes import smollm2

    found = _decoder(smollm2(), rank=4)
    return _adapters_trained(target, found, clients_per_device=8, chunk=2)


def _adapters_trained(target: Target, found: tuple[Any, PyTree], **many: int) -> Iterator[Program]:
    import optax

    from jaxpfl.federated.clients.local_training import LocalTraining
    from jaxpfl.models import adapter_trees

    network, params = found
    training = LocalTraining(network, optax.sgd(0.1), adapters=True)
    columns = {"tokens": _column(128, dtype="int32")}
    adapters = adapter_trees.split(params)
    yield from _released(target, training, adapters, columns, batch_size=4, max_examples=16, **many)


def llama3_lora_split(target: Target) -> Iterator[Program]:
    """The same, with each copy of the model split over eight devices, or over all if fewer."""
    if target.devices > 1:
        yield from llama3_lora(target, min(8, target.devices))


def scores(target: Target) -> Iterator[Program]:
    """POPri's scores: 1,000 clients, 18,000 candidates, embeddings of 384."""
    import jax
    import jax.numpy as jnp

    from jaxpfl.federated.clients import scores

    factor = jax.ShapeDtypeStruct((384, 384), jnp.float32)
    yield from _released(
        target,
        scores.LinearScores(),
        factor,
        {"mean_embedding": _column(384, dtype="float32")},
        batch_size=1,
        max_examples=1,
        clients_per_device=max(64, 1_024 // target.devices),
        chunk=64,
    )


def fred(target: Target) -> Iterator[Program]:
    """FreD's covariance, d = 768, each client's examples capped at 32."""
    import jax
    import jax.numpy as jnp

    from jaxpfl.algorithms.fred.query import FredPlan

    centre = jax.ShapeDtypeStruct((768,), jnp.float32)
    plan = FredPlan((1.0, 1.0, 1.0), delta=1e-6)
    yield from _released(
        target,
        plan.client_fn("second"),
        centre,
        {"embedding": _column(768, dtype="float32")},
        batch_size=32,
        max_examples=32,
    )


def _pairs(mesh: Any, batch: int, prompt: int, response: int) -> tuple[Any, Any, Any]:
    """Shapes of a microbatch of pairs: rows, what their loss knows, weights."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpfl.text.preference.groups import Rows
    from jaxpfl.text.preference.losses import Constants

    dealt = NamedSharding(mesh, PartitionSpec("data"))

    def whole(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((batch, *shape), jnp.int32, sharding=dealt)

    row, side = whole(prompt + 2 * response), whole(2, response)
    rows = Rows(row, row, row, side, side)
    reference = jax.ShapeDtypeStruct((batch, 2, response), jnp.float32, sharding=dealt)
    weight = jax.ShapeDtypeStruct((batch,), jnp.float32, sharding=dealt)
    return rows, Constants(reference), weight


def _on(target: Target, name: str) -> tuple[Any, Any, PyTree]:
    """A decoder in bfloat16 with adapters, and the mesh that it tunes and generates on.

    Both share the batch over "data"; the 16 GB chips split Llama 3 8B over 8.
    """
    import jax

    from benchmarks import shapes

    splits = name == "llama3_8b" and target.memory < 20e9
    mesh = target.mesh(data=-1, model=8 if splits else 1)
    model, params = _decoder(getattr(shapes, name)(), rank=4)
    places = model.shardings(mesh, params)
    return mesh, model, jax.tree.map(lambda leaf, place: _placed(leaf, place), params, places)


def dpo(target: Target, name: str = "llama3_8b") -> Iterator[Program]:
    """A step of DPO on the adapters of a decoder: 12 pairs on each replica of the model."""
    from jaxpfl.models import adapter_trees
    from jaxpfl.text.preference import optimisation

    mesh, model, params = _on(target, name)
    adapters, base = adapter_trees.split(params)
    batch = 12 * mesh.shape["data"]
    objective, given = optimisation.PreferenceSettings().objective, _pairs(mesh, batch, 256, 64)
    traced = optimisation._gradients.trace(model, objective, adapters, base, *given)
    work = f"{batch} pairs of 256 + 2 x 64 tokens"
    yield Program("gradients", traced, model=_bytes(params), work=work)


def generation(target: Target, name: str = "llama3_8b") -> Iterator[Program]:
    """Generation by a decoder: 16,384 tokens of prompts, then steps of 512 sequences a device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpfl.text.generation import sampling
    from jaxpfl.text.generation.continuous_batching import Requests
    from jaxpfl.text.microbatches import DATA

    mesh, model, params = _on(target, name)
    data = mesh.shape["data"]
    whole = NamedSharding(mesh, PartitionSpec())
    dealt = NamedSharding(mesh, PartitionSpec(DATA))
    length, new, prompts, responses = 256, 64, 64, 10
    slots = 256 if target.memory < 20e9 else 512
    program = sampling.Program(model, mesh, new, (model.vocab_size - 1,), False, False)
    scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    banned: Any = jax.ShapeDtypeStruct((model.vocab_size,), jnp.bool_, sharding=whole)
    state = jax.eval_shape(lambda: sampling.idle_slots(model, None, slots, length + new, data)())
    places = sampling.slot_shardings(mesh, model, state)
    state = jax.tree.map(_placed, state, places)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((data, *shape), jnp.int32, sharding=dealt)

    words: Any = jax.ShapeDtypeStruct((data, prompts * responses, 2), jnp.uint32, sharding=dealt)
    batch = sampling.PrefillBatch(
        ints(prompts, length),
        ints(prompts * responses),
        Requests(ints(prompts * responses), words, ints(prompts * responses), ints()),
    )
    last = jax.ShapeDtypeStruct((), jnp.bool_, sharding=whole)
    traced = sampling.run_prefill_batch.trace(
        program, params, sampling.Controls(scalar, scalar, banned, None), state, batch, last
    )
    work = f"{prompts} prompts of {length} tokens a replica, and one step of {slots} sequences"
    yield Program("prefill and step", traced, model=_bytes(params), work=work)


def one_look(target: Target) -> Iterator[Program]:
    """What a one-look reward asks of a device: MiniLM's vectors of a batch of candidates.

    The distances that follow are of 384 features, and computed on the host.
    """
    from functools import partial

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpfl.models.encoder.config import EncoderConfig
    from jaxpfl.models.encoder.network import Encoder
    from jaxpfl.text.embed import encoder

    config = EncoderConfig("bert", 30_522, 384, layers=6, heads=12, inner_size=1_536)
    model, batch, length = Encoder(config), encoder._TOKENS_ELSEWHERE // 64, 64
    # Embedders use one device; compiled for all, each does the same.
    mesh = target.mesh(data=-1)
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    given = _placed((params, tokens, jax.ShapeDtypeStruct((batch,), jnp.int32)), whole)
    vectors = partial(encoder._vectors, model, pooling="mean", normalise=True)
    work = f"{batch} texts of {length} tokens, on one device"
    traced = jax.jit(vectors).trace(*given)
    yield Program("embed", traced, model=_bytes(params), work=work, copies=mesh.size)


def _bytes(tree: PyTree) -> int:
    from jaxpfl.federated.audits.rehearsal import size_of

    return size_of(tree)


PROGRAMS: dict[str, Callable[[Target], Iterator[Program]]] = {
    "EMNIST CNN": emnist_cnn,
    "EMNIST CNN, SCAFFOLD": scaffold,
    "word model": word_model,
    "GAN": gan,
    "DistilGPT2": distilgpt2,
    "SmolLM2 LoRA": smollm2_lora,
    "Llama 3 8B LoRA": llama3_lora,
    "Llama 3 8B LoRA, split": llama3_lora_split,
    "POPri scores": scores,
    "FreD covariance": fred,
    "DPO of SmolLM2": lambda target: dpo(target, "smollm2"),
    "DPO of Llama 3 8B": dpo,
    "generation by SmolLM2": lambda target: generation(target, "smollm2"),
    "generation by Llama 3 8B": generation,
    "one-look reward": one_look,
}
