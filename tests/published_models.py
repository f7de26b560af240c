"""Tiny random models in Hugging Face's format, each with a tokeniser of its own."""

import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpfl.experiments.registry import from_mapping
from jaxpfl.models import adapter_trees
from jaxpfl.models.checkpoints import adapters, pretrained
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.network import Encoder
from tests.trees import drawn

SIZES: dict[str, Any] = {"hidden_size": 16, "layers": 2, "heads": 2, "inner_size": 32}


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level(size: int, special: Sequence[str], text: str) -> Any:
    """A byte-level BPE learnt from a text, the style of GPT-2 and Llama-3."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


def write_tokeniser(
    folder: Path, size: int = 300, *, start: bool = False, chat: bool = False
) -> None:
    """A byte-level BPE with `size` ids: end-of-text is 0, and a start token is 1."""
    words = [f" {a}{b}{c}" for a in "klmnqxz" for b in "aeiouy" for c in "bdgmtwz"]
    tokenizer = byte_level(size, ["<|end|>", "<|start|>"][: 1 + start], "".join(words))
    assert tokenizer.get_vocab_size() == size
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>"}
    if start:
        settings |= {"bos_token": "<|start|>", "add_bos_token": True}
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_decoder(folder: Path, model_type: str, *, seed: int = 0, vocab_size: int = 300) -> Path:
    """A decoder of 64 positions; a Llama's tokeniser has a start token, as published ones have."""
    model = Decoder(DecoderConfig(model_type, vocab_size=vocab_size, positions=64, **SIZES))
    pretrained.save(folder, model, drawn(model, seed))
    write_tokeniser(folder, start=model_type == "llama")
    return folder


def write_encoder(folder: Path, model_type: str, *, causal: bool = True) -> Path:
    """An encoder with a language-model head."""
    config = EncoderConfig(model_type, vocab_size=300, positions=64, **SIZES)
    model = Encoder(config, causal=causal, head=True)
    pretrained.save(folder, model, drawn(model, 0))
    write_tokeniser(folder)
    return folder


def in_shards(folder: Path, count: int = 4) -> None:
    """Divides the weights in a folder into several files, as those of large models are."""
    from safetensors.numpy import load_file, save_file

    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    places = {tensor: names[i % count] for i, tensor in enumerate(whole)}
    for name in names:
        part = {tensor: whole[tensor] for tensor, place in places.items() if place == name}
        save_file(part, folder / name)
    index = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)


def write_adapters(folder: Path, base: Path) -> Path:
    """Adapters that change what the model in `base` computes."""
    plain, params = pretrained.load(base)
    assert isinstance(plain, Decoder)
    model, params = lora.attach(plain, params, LoRA(rank=2), jax.random.key(5))
    trained, rest = adapter_trees.split(params)
    trained = jax.tree.map(lambda leaf: leaf + 0.3, trained)
    adapters.save(folder, model, adapter_trees.join(trained, rest))
    return folder


def hub_gives(monkeypatch, give: Callable[[str], Path]) -> None:
    """Stands in for the Hugging Face hub: `give` is handed NAME or NAME@REVISION."""
    module: Any = types.ModuleType("huggingface_hub")

    def download(repository, revision=None, **options):
        return give(repository if revision is None else f"{repository}@{revision}")

    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def federated_training(folder: Path, model: dict[str, Any], **changes: dict[str, Any]) -> Any:
    """The config of DP-FedAvg of a published model on `folder`/clients.jsonl; sections changed."""
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "source": str(folder / "clients.jsonl"),
            "split": {"train": 0.6, "valid": 0.2, "test": 0.2},
        },
        "model": {"name": "decoder", "sequence_length": 8} | model,
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 0.5, "accountant": "pld"},
        "training": {
            "rounds": 2,
            "clients_per_round": 8,
            "batch_size": 4,
            "max_examples": 4,
            "clients_per_bucket": 8,
        },
        "evaluation": {"every": 2, "declared_public": True, "sentences": 0},
        "run": {"checkpoint_every": 1, "devices": 1},
    }
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    return from_mapping(sections, "here")
