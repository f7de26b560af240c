"""The other side of `benchmarks.macro.finetune`: GPT-2 of transformers, trained in PyTorch.

    python finetune_against.py FILE.npz

The file holds the parameters in jaxpfl's layout, the batches [steps, B, L] and the settings. One
line answers the start: versions, device and the first batch's loss; then each line read makes the
steps once and is answered with the last one's loss. Written as one would for speed: the fused loss
of transformers, clipping over lists of tensors, the fused AdamW. On the GPU, if there is one.
"""

import json
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def build(arrays: dict[str, np.ndarray]) -> torch.nn.Module:
    """GPT-2 with these parameters and without dropout."""
    layers, hidden, inner = arrays["layers.up.kernel"].shape
    vocabulary, positions = len(arrays["embed.token"]), len(arrays["embed.position"])
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=hidden,
        n_layer=layers,
        n_head=int(arrays["heads"]),
        n_inner=inner,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    given = {
        "wte.weight": arrays["embed.token"],
        "wpe.weight": arrays["embed.position"],
        "ln_f.weight": arrays["norm.scale"],
        "ln_f.bias": arrays["norm.bias"],
    }
    for layer in range(layers):
        part = {name[7:]: leaf[layer] for name, leaf in arrays.items() if name[:7] == "layers."}
        for leaf in ("kernel", "bias"):
            three = [part[f"{name}.{leaf}"] for name in "qkv"]
            weight = "weight" if leaf == "kernel" else "bias"
            at = f"h.{layer}"
            given[f"{at}.attn.c_attn.{weight}"] = np.concatenate(three, axis=-1)
            given[f"{at}.attn.c_proj.{weight}"] = part[f"o.{leaf}"]
            given[f"{at}.mlp.c_fc.{weight}"] = part[f"up.{leaf}"]
            given[f"{at}.mlp.c_proj.{weight}"] = part[f"down.{leaf}"]
        for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            given[f"h.{layer}.{theirs}.weight"] = part[f"{ours}.scale"]
            given[f"h.{layer}.{theirs}.bias"] = part[f"{ours}.bias"]
    tensors = {name: torch.from_numpy(leaf.copy()) for name, leaf in given.items()}
    model.transformer.load_state_dict(tensors)
    return model


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def version() -> str:
    """The libraries, and what they compute on."""
    if DEVICE.type == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"{torch.get_num_threads()} threads"
    return f"{torch.__version__}, transformers {transformers.__version__}, {where}"


def choose_products(data: dict[str, np.ndarray]) -> None:
    """Float32 products of a GPU in full, or in TF32."""
    narrow = str(data["products"]) == "tensorfloat32"
    torch.set_float32_matmul_precision("high" if narrow else "highest")


def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        data = dict(arrays)
    choose_products(data)
    model = build(data).to(DEVICE).train()
    batches = torch.from_numpy(data["tokens"].astype(np.int64)).to(DEVICE)
    decayed = [leaf for name, leaf in model.named_parameters() if _decayed(name)]
    spared = [leaf for name, leaf in model.named_parameters() if not _decayed(name)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": spared, "weight_decay": 0.0}],
        lr=float(data["learning_rate"]),
        weight_decay=float(data["weight_decay"]),
        fused=True,
    )

    def step(tokens_BxL: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens_BxL, labels=tokens_BxL).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(data["clip_norm"]), foreach=True)
        optimizer.step()
        return loss.item()

    with torch.no_grad():
        first = model(input_ids=batches[0], labels=batches[0]).loss.item()
    print(json.dumps({"version": version(), "loss": first}), flush=True)
    for _ in sys.stdin:
        for tokens_BxL in batches:
            last = step(tokens_BxL)
        print(last, flush=True)


def _decayed(name: str) -> bool:
    return name.endswith("weight") and not any(part in name for part in ("ln_", "wte", "wpe"))


if __name__ == "__main__":
    main(sys.argv[1])
