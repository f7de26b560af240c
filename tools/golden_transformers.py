"""Makes the golden files of the language-model tests with transformers and PyTorch.

    python tools/golden_transformers.py [FOLDER]

Needs an interpreter with torch and transformers; jaxpfl itself needs neither. Writes to FOLDER
(tests/golden/transformers) one folder an architecture: config.json and safetensors as transformers
saves them, random weights, and expected.npz with token ids, which of them are real, the logits,
and the versions of the two libraries.
"""

import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "golden" / "transformers"
VOCABULARY, LENGTH, WINDOW = 61, 20, 6

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=LENGTH + 2,
)
GPT2 = dict(
    vocab_size=VOCABULARY,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=LENGTH + 2,
    bos_token_id=None,
    eos_token_id=None,
)
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
# So short that every regime of the scaling occurs among the frequencies of a head.
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def models() -> dict[str, torch.nn.Module]:
    """One tiny model of every kind."""
    t, llama = transformers, SIZES | dict(num_key_value_heads=2)
    plain, scaled = (llama | dict(rope_parameters=rope) for rope in (PLAIN, SCALED))
    gemma = llama | dict(
        num_hidden_layers=3,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": LINEAR, "sliding_attention": LOCAL},
    )
    tied, untied = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
    roberta = SIZES | dict(pad_token_id=1)
    albert = SIZES | dict(embedding_size=16, num_hidden_groups=1)
    kinds = {
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(**GPT2)),
        "llama_untied": (t.LlamaForCausalLM, t.LlamaConfig(**plain, **untied)),
        "llama_scaled": (t.LlamaForCausalLM, t.LlamaConfig(**scaled, **tied, head_dim=16)),
        "bert_masked": (t.BertForMaskedLM, t.BertConfig(**SIZES)),
        "bert_causal": (t.BertLMHeadModel, t.BertConfig(**SIZES, is_decoder=True)),
        "roberta_masked": (t.RobertaForMaskedLM, t.RobertaConfig(**roberta, hidden_act="gelu_new")),
        "albert_masked": (t.AlbertForMaskedLM, t.AlbertConfig(**albert)),
        "mistral": (t.MistralForCausalLM, t.MistralConfig(**plain, sliding_window=WINDOW)),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**plain, **tied)),
        "roberta_causal": (t.RobertaForCausalLM, t.RobertaConfig(**roberta, is_decoder=True)),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**plain, head_dim=16)),
        "gemma3": (
            t.Gemma3ForCausalLM,
            t.Gemma3TextConfig(**gemma, head_dim=16, sliding_window=WINDOW),
        ),
    }
    return {name: kind(config) for name, (kind, config) in kinds.items()}


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Ids [4, L] without the padding ids 0 and 1 among the real ones, and which are real."""
    rng = np.random.default_rng(5)
    tokens_BxL = rng.integers(2, VOCABULARY, (4, LENGTH), np.int64)
    real_BxL = np.arange(LENGTH)[None] < np.array([LENGTH, 13, 1, 7])[:, None]
    return tokens_BxL, real_BxL


def logits(model: torch.nn.Module, tokens_BxL: np.ndarray, real_BxL: np.ndarray) -> np.ndarray:
    """Logits float32 [B, L, V] of a model of transformers."""
    pad = model.config.pad_token_id
    padded_BxL = np.where(real_BxL, tokens_BxL, 0 if pad is None else pad)
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor(padded_BxL), attention_mask=torch.tensor(real_BxL.astype(int))
        )
    return found.logits.float().numpy()


def main(folder: pathlib.Path) -> None:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(7)
    tokens_BxL, real_BxL = tokens()
    versions = [
        f"torch {torch.__version__}, numpy {np.__version__}",
        f"transformers {transformers.__version__}",
    ]
    for name, model in models().items():
        model.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Far from the initial zeros and ones: a wrongly mapped tensor must show.
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        # One of them in several files with an index.
        size = "40KB" if name == "llama_untied" else "1GB"
        model.save_pretrained(place, max_shard_size=size)
        (place / "generation_config.json").unlink(missing_ok=True)
        expected_BxLxV = logits(model, tokens_BxL, real_BxL)
        np.savez_compressed(
            place / "expected.npz",
            tokens=tokens_BxL.astype(np.int32),
            real=real_BxL,
            logits=expected_BxLxV.astype(np.float32),
            versions=np.array(versions),
        )
        print(f"{name}: largest logit {np.abs(expected_BxLxV).max():.1f}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
