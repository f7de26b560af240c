"""Published weights: layouts, precisions, meshes, what a save leaves behind, and refusals."""

import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.checkpoints.safetensors_files import INDEX, WEIGHTS
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.decoder.quantise import quantise

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs jaxpfl[text]")

TINY = Path(__file__).parents[2] / "golden"
GOLDEN = TINY / "transformers"
FC = "transformer.h.1.mlp.c_fc.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.fixture
def bert(tmp_path) -> Path:
    return Path(shutil.copytree(TINY / "tiny_bert", tmp_path / "bert"))


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2"))


@pytest.fixture
def llama(tmp_path) -> Path:
    """In two files and an index."""
    return Path(shutil.copytree(GOLDEN / "llama_untied", tmp_path / "llama"))


def _change(folder: Path, change) -> None:
    tensors = safetensors_numpy.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors_numpy.save_file(tensors, folder / WEIGHTS)


def _equal(found, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


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
    _equal(pretrained.load(bert)[1], expected)


def test_the_forms_that_checkpoints_come_in_are_understood(gpt2):
    expected = pretrained.load(gpt2)[1]

    def plain(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 22, 22), np.uint8)
        tensors["h.1.attn.masked_bias"] = np.float32(-1e4).reshape(1)
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()

    _change(gpt2, plain)
    _equal(pretrained.load(gpt2)[1], expected)
    _change(gpt2, lambda tensors: tensors.update({FC: tensors["h.1.mlp.c_fc.weight"]}))
    with pytest.raises(InputError, match=r"'h.1.mlp.c_fc.weight' and .* are the same parameter"):
        pretrained.load(gpt2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FC), "tensor 'h.1.mlp.c_fc.weight' is missing"),
        (
            lambda t: t.update({FC: t[FC].T.copy()}),
            rf"tensor '{FC}' must have shape \[32, 128\], found \[128, 32\]",
        ),
        (lambda t: t[FC].__setitem__((3, 5), np.inf), f"tensor '{FC}' holds values that are not"),
        (
            lambda t: t.update({FC.replace(".1.", ".2."): t[FC]}),
            "tensor 'transformer.h.2.mlp.c_fc.weight' is not part of the described model",
        ),
        (lambda t: t.update({FC: t[FC].astype(np.float64)}), "must be floating point, found F64"),
        (lambda t: t.update({FC: t[FC].astype(np.int32)}), "must be floating point, found I32"),
    ],
)
def test_wrong_tensors_are_refused_naming_file_and_tensor(gpt2, change, message):
    _change(gpt2, change)
    with pytest.raises(InputError, match=message) as caught:
        pretrained.load(gpt2)
    assert str(gpt2 / WEIGHTS) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 500, 60_000])
def test_a_truncated_file_and_pickled_weights_are_refused(bert, keep):
    path = bert / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFile, match="is not a whole safetensors file"):
        pretrained.load(bert)
    path.rename(bert / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no file .*model\.safetensors .*; .* files only"):
        pretrained.load(bert)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/tmp/model.safetensors", "a/b.safetensors", "..", 3]
)
def test_an_index_names_files_of_its_folder_alone(llama, name):
    shutil.copy(GOLDEN / "gpt2" / WEIGHTS, llama.parent / WEIGHTS)
    index = json.loads((llama / INDEX).read_text())
    index["weight_map"][GATE] = name
    (llama / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=rf"weight_map\['{GATE}'\] must be the name of a"):
        pretrained.load(llama)


def test_an_index_must_be_one_and_agree_with_its_files(llama):
    index = json.loads((llama / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))

    def changed(values):
        (llama / INDEX).write_text(json.dumps(values))
        return pytest.raises(InputError, match=message)

    message = r"index\.json must have a weight_map"
    for values in ([], {}, {"weight_map": {}}, {"weight_map": [GATE]}):
        with changed(values):
            pretrained.load(llama)
    message = "must be the name of a safetensors file of this folder, found 'pytorch_model.bin'"
    with changed({"weight_map": index["weight_map"] | {GATE: "pytorch_model.bin"}}):
        pretrained.load(llama)
    other = {first: second, second: first}[index["weight_map"][GATE]]
    message = rf"{other}: tensor '{GATE}' is missing, which model.* says is there"
    with changed({"weight_map": index["weight_map"] | {GATE: other}}):
        pretrained.load(llama)
    left = {name: file for name, file in index["weight_map"].items() if name != GATE}
    message = rf"{index['weight_map'][GATE]}: tensor '{GATE}' is not in model"
    with changed({"weight_map": left}):
        pretrained.load(llama)
    (llama / INDEX).write_text(json.dumps(index))
    content = (llama / second).read_bytes()
    (llama / second).write_bytes(content[:-10])
    with pytest.raises(CorruptFile, match=f"{second} is not a whole safetensors file"):
        pretrained.load(llama)
    (llama / second).unlink()
    with pytest.raises(InputError, match=f"there is no file .*{second}"):
        pretrained.load(llama)
    (llama / INDEX).unlink()
    with pytest.raises(InputError, match=rf"there is no file .*{WEIGHTS} \(or {INDEX}\)"):
        pretrained.load(llama)


def test_bfloat16_stays_and_other_precisions_widen_exactly_or_round_once(gpt2):
    narrow = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
    wide = safetensors_numpy.load_file(gpt2 / WEIGHTS)
    expected = pretrained.load(gpt2)[1]
    model, params = pretrained.load(gpt2, dtype="bfloat16")
    assert model.compute == "bfloat16"
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected)
    _equal(_bits(params), _bits(rounded))
    for kind in narrow.values():
        safetensors_numpy.save_file(
            {name: tensor.astype(kind) for name, tensor in wide.items()}, gpt2 / WEIGHTS
        )
        found = pretrained.load(gpt2)[1]
        assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
        _equal(
            found, jax.tree.map(lambda x, k=kind: np.asarray(x).astype(k).astype("f4"), expected)
        )
    again = pretrained.load(gpt2, dtype="bfloat16")
    _equal(_bits(again[1]), _bits(rounded))
    pretrained.save(gpt2, *again)
    stored = safetensors_numpy.load_file(gpt2 / WEIGHTS)
    assert {tensor.dtype.name for tensor in stored.values()} == {"bfloat16"}
    _equal(_bits(pretrained.load(gpt2, dtype="bfloat16")[1]), _bits(rounded))
    with pytest.raises(InputError, match="dtype must be one of 'float32', 'bfloat16'"):
        pretrained.load(gpt2, dtype="int8")
    with pytest.raises(InputError, match="dtype must be 'float32' for a bert encoder"):
        pretrained.load(GOLDEN / "bert_causal", dtype="bfloat16")


@pytest.mark.parametrize("kind", ["gpt2", "llama_scaled", "bert_masked"])
def test_parameters_are_placed_on_the_devices_of_a_mesh(kind):
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model, params = pretrained.load(GOLDEN / kind, mesh=mesh)
    _equal(params, pretrained.load(GOLDEN / kind)[1])
    shardings = model.shardings(mesh, params)
    jax.tree.map(lambda leaf, wanted: leaf.sharding == wanted or pytest.fail(), params, shardings)
    if kind != "bert_masked":
        specs = {leaf.sharding.spec for leaf in jax.tree.leaves(params["layers"])}
        assert len(specs - {PartitionSpec(None), PartitionSpec(None, None)}) >= 2


def test_no_second_model_is_held_while_one_is_loaded(tmp_path):
    config = DecoderConfig("gpt2", vocab_size=5_000, hidden_size=160, layers=12, heads=4)
    model = Decoder(config)
    pretrained.save(tmp_path, model, model.init(jax.random.key(0)))
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
    _equal(found, params)
    pretrained.save(llama, model, params)
    names = sorted(path.name for path in llama.iterdir())
    assert names == ["config.json", "expected.npz", WEIGHTS, "tokenizer.json"]
    _equal(pretrained.load(llama)[1], params)


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
    _equal(found, new if is_new else old)
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
    for what, message in [
        (adapted, "a model with adapters cannot be saved"),
        (quantise(model, params), "int8 weights cannot be saved"),
        ((model, missing), "parameter norm.bias is missing"),
        ((model, extra), "parameter head.kernel is not part of the model"),
        ((model, wrong), r"parameter norm.scale must be .* \[32\], found float32 \[31\]"),
        ((model, whole), r"parameter norm.scale must be .* \[32\], found int32 \[32\]"),
        ((model, nan), "parameter norm.scale holds values that are not finite"),
    ]:
        with pytest.raises(InputError, match=message):
            pretrained.save(gpt2, *what)
        _equal(pretrained.load(gpt2)[1], params)
    assert sorted(path.name for path in gpt2.iterdir()) == [
        "config.json",
        "expected.npz",
        WEIGHTS,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 3}, "tensor 'h.2.ln_1.weight' is missing"),
        ({"n_layer": 1}, "tensor 'transformer.h.1.attn.c_attn.bias' is not part"),
        ({"n_embd": 36}, r"shape \[61, 36\], found \[61, 32\]"),
    ],
)
def test_sizes_that_do_not_fit_the_weights_are_refused(gpt2, change, message):
    path = gpt2 / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message) as caught:
        pretrained.load(gpt2)
    assert str(gpt2) in str(caught.value)


def _decoder(**changed) -> str:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 8}
    return json.dumps({"model_type": "mistral", **sizes, **changed})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"model_type": "t5"}', InputError, "model_type must be one of .*, found 't5'"),
        ('{"model_type": "bert", "hidden_act": "swish"}', InputError, "activation must be one of"),
        ('{"model_type": ["bert"]}', InputError, "model_type must be one of"),
        ('{"model_type": "bert", "num_hidden_layers": "12"}', InputError, "layers must be a whole"),
        ('{"model_type": "bert", "hidden_size": [768]}', InputError, "hidden_size must be a whole"),
        ('{"model_type": "bert", "num_hidden_layers": 1000000000}', InputError, "at most 1000"),
        (
            '{"model_type": "bert", "vocab_size": 1000000000}',
            InputError,
            "vocab_size must be at most",
        ),
        (_decoder(rope_scaling="x"), InputError, "rope_scaling must be an object, found 'x'"),
        (_decoder(rope_parameters=[1]), InputError, "rope_parameters must be an object"),
        (_decoder(rope_theta="x"), InputError, "rope_theta must be a finite number"),
        (_decoder(rope_theta=10**400), InputError, "rope_theta must be a finite number"),
        (_decoder(rms_norm_eps=None, head_dim=2**23), InputError, "heads times head_size must be"),
        (_decoder(num_hidden_layers=10**9, head_dim=2), InputError, "layers must be at most 1000"),
        ("[]", CorruptFile, "must hold a JSON object"),
        ("{", CorruptFile, "is not a JSON file"),
        ("[" * 100_000, CorruptFile, "is not a JSON file"),
    ],
)
def test_a_configuration_is_refused_naming_its_file(bert, text, error, message):
    (bert / "config.json").write_text(text)
    with pytest.raises(error, match=message) as caught:
        pretrained.load(bert)
    assert "config.json" in str(caught.value)


def test_real_numbers_may_be_written_as_whole_ones(bert):
    """Those of sizes are bounded, those of settings are not."""
    scaling = {"rope_type": "llama3", "factor": 10**8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 64
    path, large = bert / "config.json", 10**8
    decoder = _decoder(head_dim=2, rope_theta=large, rms_norm_eps=large, rope_scaling=scaling)
    path.write_text(decoder.replace("mistral", "llama"))
    config = pretrained.read_config(path).config
    assert (config.rope_theta, config.norm_epsilon, config.rope_scaling.factor) == (1e8,) * 3
    path.write_text(json.dumps({"model_type": "bert", "layer_norm_eps": large}))
    assert pretrained.read_config(path).config.norm_epsilon == 1e8
