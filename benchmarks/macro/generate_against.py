"""The other side of `benchmarks.macro.generate`: `generate` of transformers, in PyTorch.

    python generate_against.py FILE.npz

The file holds the parameters in jaxpfl's layout, the prompts [N, L] and the settings. One line
answers the start: versions, device and the loss of the prompts; then each line read draws a
response of `new_tokens` tokens to each prompt, in one batch with a key-value cache, and is answered
with the number of tokens drawn. On the GPU, if there is one.
"""

import json
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from finetune_against import (  # pyright: ignore[reportMissingImports]
    DEVICE,
    build,
    choose_products,
    version,
)


def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        data = dict(arrays)
    choose_products(data)
    model = build(data).to(DEVICE).eval()
    prompts = torch.from_numpy(data["tokens"].astype(np.int64)).to(DEVICE)
    settings = {
        "max_new_tokens": int(data["new_tokens"]),
        "min_new_tokens": int(data["new_tokens"]),
    }
    drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
    with torch.inference_mode():
        loss = model(input_ids=prompts, labels=prompts).loss.item()
        print(json.dumps({"version": version(), "loss": loss}), flush=True)
        for _ in sys.stdin:
            drawn = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                pad_token_id=0,
                **settings,
                **drawing,
            )
            print(drawn[:, prompts.shape[1] :].numel(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
