"""Published weights: layouts, precisions, meshes, what a save leaves behind, and refusals."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.checkpoints.model_files import INDEX, WEIGHTS
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.decoder.quantise import quantise
from tests.refusals import refusal
from tests.trees import assert_same, drawn

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs jaxpfl[text]")

TINY = Path(__file__).parents[2] / "golden"
GOLDEN = TINY / "transformers"
FC = "transformer.h.1.mlp.c_fc.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
QUERY = "encoder.layer.1.attention.self.query.weight"
OUTSIDE = ("../model.safetensors", "/tmp/model.safetensors", "a/b.safetensors", "..", 3, "x.bin")
NO_MAP = ("[]", "{}", '{"weight_map": {}}', '{"weight_map": [0]}')


def copied(tmp_path: Path, kind: str) -> Path:
    """A golden model; "llama_untied" is in two files and an index."""
    return Path(shutil.copytree(GOLDEN / kind, tmp_path / Path(kind).name))


@pytest.fixture
def bert(tmp_path) -> Path:
    return copied(tmp_path, "../tiny_bert")


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return copied(tmp_path, "gpt2")


@pytest.fixture
def llama(tmp_path) -> Path:
    return copied(tmp_path, "llama_untied")


def _change(folder: Path, change) -> None:
    tensors = safetensors_numpy.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors_numpy.save_file(tensors, folder / WEIGHTS)


def _bits(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf).view(np.uint16), params)


def test_one_matrix_becomes_three_and_three_become_one():
    tensors = safetensors_numpy.load_file(GOLDEN / "gpt2" / WEIGHTS)
    layers = pretrained.load(GOLDEN / "gpt2")[1]["layers"]
    for i, part in enumerate("qkv"):
        columns = slice(32 * i, 32 * (i + 1))
        for leaf, kind in (("kernel", "weight"), ("bias", "bias")):
            stored = tensors[f"transformer.h.1.attn.c_attn.{kind}"][..., columns]
            np.testing.assert_array_equal(layers[part][leaf][1], stored)
    tensors = safetensors_numpy.load_file(TINY / "tiny_bert" / WEIGHTS)
    kernel = pretrained.load(TINY / "tiny_bert")[1]["layer_1"]["qkv"]["kernel"]
    for i, part in enumerate(("query", "key", "value")):
        name = QUERY.replace("query", part)
        np.testing.assert_array_equal(kernel[:, 32 * i : 32 * (i + 1)], tensors[name].T)


def test_prefixes_heads_and_old_names_of_encoders_are_understood(bert):
    expected = pretrained.load(bert)[1]

    def rename(tensors):
        for name in list(tensors):
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            new = new.replace("LayerNorm.bias", "LayerNorm.beta")
            tensors["bert." + new] = tensors.pop(name)
        tensors["cls.seq_relationship.bias"] = np.zeros(3, np.float32)
        tensors["bert.embeddings.position_ids"] = np.arange(64)[None]

    _change(bert, rename)
    assert_same(pretrained.load(bert)[1], expected)


def test_the_forms_that_checkpoints_come_in_are_understood(gpt2):
    expected = pretrained.load(gpt2)[1]

    def plain(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 22, 22), np.uint8)
        tensors["h.1.attn.masked_bias"] = np.float32(-1e4).reshape(1)
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()

    _change(gpt2, plain)
    assert_same(pretrained.load(gpt2)[1], expected)
    _change(gpt2, lambda tensors: tensors.update({"lm_head.weight": -tensors["wte.weight"]}))
    refusal(lambda: pretrained.load(gpt2), "'lm_head.weight' must be equal to 'wte.weight'")
    _change(gpt2, lambda tensors: tensors.pop("lm_head.weight"))
    _change(gpt2, lambda tensors: tensors.update({FC: tensors["h.1.mlp.c_fc.weight"]}))
    refusal(lambda: pretrained.load(gpt2), "'h.1.mlp.c_fc.weight' are the same parameter")


def tensor(make, name=FC):
    """Puts what is made of a tensor in its place, or under another name; None takes it away."""

    def change(folder):
        tensors = safetensors_numpy.load_file(folder / WEIGHTS)
        made = make(tensors.pop(FC) if name == FC else tensors[FC])
        safetensors_numpy.save_file(
            tensors if made is None else tensors | {name: made}, folder / WEIGHTS
        )

    return change


def settings(**changed):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def text(content, name="config.json"):
    return lambda folder: (folder / name).write_text(content)


def index(file, name=GATE):
    """The index says that a tensor is in this file; a function is given the one where it is."""

    def change(folder):
        values = json.loads((folder / INDEX).read_text())
        known = values["weight_map"]
        known[name] = file(known) if callable(file) else file
        (folder / INDEX).write_text(json.dumps(values))

    return change


OUT = f"weight_map['{GATE}'] must be the name of a safetensors file of this folder"
SECOND = "model-00002-of-00002.safetensors"
CUT = "is not a whole safetensors file"
# By kind of model: what happens to its folder, and what is said.
REFUSED: dict[str, list[tuple[Callable[[Path], object], str]]] = {
    "gpt2": [
        (tensor(lambda t: None), f"{WEIGHTS} tensor 'h.1.mlp.c_fc.weight' is missing"),
        (tensor(lambda t: t.T.copy()), f"{WEIGHTS} '{FC}' shape [32, 128], found [128, 32]"),
        (tensor(lambda t: np.full_like(t, np.inf)), f"{WEIGHTS} '{FC}' values not finite"),
        (tensor(np.copy, FC.replace(".1.", ".2.")), f"{WEIGHTS} h.2.mlp.c_fc.weight not part"),
        (tensor(np.float64), f"{WEIGHTS} must be floating point, found F64"),
        (tensor(np.int32), f"{WEIGHTS} must be floating point, found I32"),
        (settings(n_layer=3), "/gpt2 tensor 'h.2.ln_1.weight' is missing"),
        (settings(n_layer=1), "/gpt2 'transformer.h.1.attn.c_attn.bias' is not part"),
        (settings(n_embd=36), "/gpt2 shape [61, 36], found [61, 32]"),
    ],
    "bert_masked": [
        *((lambda folder, n=n: os.truncate(folder / WEIGHTS, n), CUT) for n in (0, 4, 500, 6_000)),
        (lambda folder: (folder / WEIGHTS).rename(folder / "model.bin"), f"no file {WEIGHTS} only"),
        (settings(model_type="t5"), "config.json model_type one of found 't5'"),
        (settings(model_type=["bert"]), "config.json model_type must be one of"),
        (settings(hidden_size=[768]), "config.json hidden_size must be a whole"),
        (settings(num_hidden_layers=10**9), "config.json layers must be at most 1000"),
        (settings(vocab_size=10**9), "config.json vocab_size must be at most"),
        *((text(wrong), "config.json JSON") for wrong in ("[]", "{", "[" * 100_000)),
    ],
    "mistral": [
        (settings(rope_scaling="x", rope_parameters=None), "config.json object, found 'x'"),
        (settings(rope_parameters=None, rope_theta=10**400), "config.json rope_theta finite"),
        (settings(rms_norm_eps=None, head_dim=2**23), "config.json heads times head_size"),
        (settings(num_hidden_layers=10**9, head_dim=2), "config.json layers at most 1000"),
    ],
    "llama_untied": [
        *((index(name), OUT) for name in OUTSIDE),
        *((text(wrong, INDEX), f"{INDEX} must have a weight_map") for wrong in NO_MAP),
        (index(lambda of: (set(of.values()) - {of[GATE]}).pop()), f"'{GATE}' missing {INDEX} says"),
        (lambda folder: os.truncate(folder / SECOND, 10_000), f"{SECOND} {CUT}"),
        (lambda folder: (folder / SECOND).unlink(), f"there is no file {SECOND}"),
        (lambda folder: (folder / INDEX).unlink(), f"there is no file {WEIGHTS} (or {INDEX})"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "change", "words"), [(kind, *each) for kind in REFUSED for each in REFUSED[kind]]
)
def test_what_does_not_fit_is_refused_naming_the_file(kind, change, words, tmp_path):
    """TRUST 39: an index names files of its folder alone, and sizes are bounded."""
    folder = copied(tmp_path, kind)
    shutil.copy(GOLDEN / "gpt2" / WEIGHTS, tmp_path / WEIGHTS)
    change(folder)
    corrupt = CUT in words or words.endswith("JSON")
    refusal(lambda: pretrained.load(folder), words, CorruptFile if corrupt else InputError)


def test_a_tensor_that_an_index_does_not_name_is_refused(llama):
    values = json.loads((llama / INDEX).read_text())
    file = values["weight_map"].pop(GATE)
    (llama / INDEX).write_text(json.dumps(values))
    refusal(lambda: pretrained.load(llama), f"{file} tensor '{GATE}' is not in {INDEX}")


def test_bfloat16_stays_and_other_precisions_widen_exactly_or_round_once(gpt2):
    narrow = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
    wide = safetensors_numpy.load_file(gpt2 / WEIGHTS)
    expected = pretrained.load(gpt2)[1]
    model, params = pretrained.load(gpt2, dtype="bfloat16")
    assert model.compute == "bfloat16"
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected)
    assert_same(_bits(params), _bits(rounded))
    for kind in narrow.values():
        stored = {name: tensor.astype(kind) for name, tensor in wide.items()}
        safetensors_numpy.save_file(stored, gpt2 / WEIGHTS)
        found = pretrained.load(gpt2)[1]
        assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
        rounded_once = [np.asarray(x).astype(kind).astype("f4") for x in jax.tree.leaves(expected)]
        assert_same(jax.tree.leaves(found), rounded_once)
    again = pretrained.load(gpt2, dtype="bfloat16")
    assert_same(_bits(again[1]), _bits(rounded))
    pretrained.save(gpt2, *again)
    stored = safetensors_numpy.load_file(gpt2 / WEIGHTS)
    assert {tensor.dtype.name for tensor in stored.values()} == {"bfloat16"}
    assert_same(_bits(pretrained.load(gpt2, dtype="bfloat16")[1]), _bits(rounded))
    for kind, dtype, words in (
        ("gpt2", "int8", "dtype must be one of 'float32', 'bfloat16'"),
        ("bert_causal", "bfloat16", "dtype must be 'float32' for a bert encoder"),
    ):
        refusal(lambda kind=kind, dtype=dtype: pretrained.load(GOLDEN / kind, dtype=dtype), words)


@pytest.mark.parametrize("kind", ["gpt2", "llama_scaled", "bert_masked"])
def test_parameters_are_placed_on_the_devices_of_a_mesh(kind):
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model, params = pretrained.load(GOLDEN / kind, mesh=mesh)
    assert_same(params, pretrained.load(GOLDEN / kind)[1])
    shardings = model.shardings(mesh, params)
    jax.tree.map(lambda leaf, wanted: leaf.sharding == wanted or pytest.fail(), params, shardings)
    if kind != "bert_masked":
        specs = {leaf.sharding.spec for leaf in jax.tree.leaves(params["layers"])}
        assert len(specs - {PartitionSpec(None), PartitionSpec(None, None)}) >= 2


def test_no_second_model_is_held_while_one_is_loaded(tmp_path):
    config = DecoderConfig("gpt2", vocab_size=5_000, hidden_size=160, layers=12, heads=4)
    model = Decoder(config)
    pretrained.save(tmp_path, model, drawn(model, 0))
    total = (tmp_path / WEIGHTS).stat().st_size
    largest = 12 * 160 * 640 * 4
    tracemalloc.start()
    params = pretrained.load(tmp_path)[1]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < total + 1.2 * largest
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) < total


def test_a_model_in_several_files_is_read_and_replaced(llama):
    model, params = pretrained.load(llama)
    (llama / "tokenizer.json").write_text("{}")
    again, found = pretrained.load(llama)
    assert again == model
    assert_same(found, params)
    pretrained.save(llama, model, params)
    names = sorted(path.name for path in llama.iterdir())
    assert names == ["config.json", "expected.npz", WEIGHTS, "tokenizer.json"]
    assert_same(pretrained.load(llama)[1], params)


def test_a_crash_leaves_the_old_model_the_new_one_or_none(llama, monkeypatch):
    model, old = pretrained.load(llama)
    outcomes = []
    for step in range(100):
        here = llama.parent / str(step)
        shutil.copytree(llama, here)
        outcomes.append(_crash(here, model, old, step, monkeypatch))
        if outcomes[-1] == "saved":
            break
    # The old model up to the first removal, none until all is in place.
    assert list(dict.fromkeys(outcomes)) == ["old", "none", "new", "saved"]
    assert outcomes.count("none") > 4


def _crash(folder: Path, model, old, step: int, monkeypatch) -> str:
    """What is left when a save ends at its `step`th change to the folder."""
    new = jax.tree.map(lambda leaf: leaf + 1, old)
    calls = iter(range(1_000))

    def crashing(original):
        def call(self, *args, **options):
            if next(calls) >= step:
                raise SystemExit
            return original(self, *args, **options)

        return call

    with monkeypatch.context() as patched:
        for name in ("rename", "unlink", "open"):
            patched.setattr(Path, name, crashing(getattr(Path, name)))
        try:
            pretrained.save(folder, model, new)
            crashed = False
        except SystemExit:
            crashed = True
    try:
        found = pretrained.load(folder)[1]
    except InputError as error:
        assert "there is no file" in str(error) and "config.json" in str(error)
        return "none"
    is_new = bool(found["norm"]["scale"][0] == new["norm"]["scale"][0])
    assert_same(found, new if is_new else old)
    if crashed:
        # What a crash left in the way is no obstacle, and goes.
        pretrained.save(folder, model, new)
        assert not list(folder.glob(".*"))
    return "saved" if not crashed else "new" if is_new else "old"


def test_what_cannot_be_saved_is_refused_and_the_old_model_stays(gpt2):
    model, params = pretrained.load(gpt2)
    adapted = lora.attach(model, params, lora.LoRA(), jax.random.key(0))
    missing = {name: part for name, part in params.items() if name != "norm"}
    extra = params | {"head": {"kernel": jnp.zeros((32, 61))}}
    wrong = params | {"norm": {"scale": jnp.ones(31), "bias": jnp.ones(32)}}
    whole = params | {"norm": {"scale": jnp.ones(32, jnp.int32), "bias": jnp.ones(32)}}
    nan = params | {"norm": {"scale": jnp.full(32, jnp.nan), "bias": jnp.ones(32)}}
    for what, words in [
        (adapted, "a model with adapters cannot be saved"),
        (quantise(model, params), "int8 weights cannot be saved"),
        ((model, missing), "parameter norm.bias is missing"),
        ((model, extra), "parameter head.kernel is not part of the model"),
        ((model, wrong), "parameter norm.scale must be [32], found float32 [31]"),
        ((model, whole), "parameter norm.scale must be [32], found int32 [32]"),
        ((model, nan), "parameter norm.scale holds values that are not finite"),
    ]:
        refusal(lambda what=what: pretrained.save(gpt2, *what), words)
        assert_same(pretrained.load(gpt2)[1], params)
    assert {path.name for path in gpt2.iterdir()} == {"config.json", "expected.npz", WEIGHTS}


def _decoder(**changed) -> str:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 8}
    return json.dumps({"model_type": "mistral", **sizes, **changed})


def test_real_numbers_may_be_written_as_whole_ones(bert, tmp_path):
    """Those of sizes are bounded, those of settings are not."""
    large, path = 10**8, copied(tmp_path, "llama_scaled") / "config.json"
    scaling = json.loads(path.read_text())["rope_parameters"]
    scaling |= {"factor": large, "rope_theta": large}
    settings(rms_norm_eps=large, rope_parameters=scaling)(path.parent)
    config = pretrained.read_config(path).config
    assert (config.rope_theta, config.norm_epsilon, config.rope_scaling.factor) == (1e8,) * 3
    settings(layer_norm_eps=large)(bert)
    assert pretrained.read_config(bert / "config.json").config.norm_epsilon == 1e8
