"""The other side of `benchmarks.macro.smollm2`: transformers and PEFT, in PyTorch.

    python smollm2_torch.py FILE.npz

As `smollm2_jaxpfl`. Written as one would for speed: fused attention, the head on the responses'
places alone, chosen and rejected in one batch, the fused AdamW.
"""

import sys

import numpy as np
import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from turns import serve


def writer(model, data: dict[str, np.ndarray]):
    prompts = torch.from_numpy(data["prompts"].astype(np.int64))
    requests = prompts.repeat_interleave(int(data["responses"]), dim=0)
    new = int(data["new"])

    def turn() -> None:
        with torch.inference_mode():
            for batch in requests.split(int(data["batch"])):
                model.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    pad_token_id=0,
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=True,
                    temperature=0.9,
                    top_k=0,
                    top_p=0.95,
                )

    return turn


def tuner(model, data: dict[str, np.ndarray]):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    ).train()
    asked = torch.from_numpy(data["asked"].astype(np.int64))
    answered = torch.from_numpy(data["answered"].astype(np.int64))
    optimizer = torch.optim.AdamW(
        [leaf for leaf in model.parameters() if leaf.requires_grad],
        lr=8e-7,
        weight_decay=0.0,
        fused=True,
    )

    def by_response(rows: torch.Tensor, length: int) -> torch.Tensor:
        """Log-probabilities of the last `length` tokens of each row, summed."""
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=length + 1).logits
        flat = logits[:, :-1].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(
            flat, rows[:, -length:].flatten(), reduction="none"
        )
        return -loss.view(len(rows), length).sum(dim=1)

    def step(asked_BxP: torch.Tensor, answered_Bx2xT: torch.Tensor) -> None:
        length = answered_Bx2xT.shape[2]
        responses = answered_Bx2xT.transpose(0, 1).flatten(0, 1)
        rows = torch.cat([asked_BxP.repeat(2, 1), responses], dim=1)
        with torch.no_grad(), model.disable_adapter():
            reference = by_response(rows, length)
        ratio = by_response(rows, length) - reference
        chosen, rejected = ratio.chunk(2)
        loss = -torch.nn.functional.logsigmoid(0.01 * (chosen - rejected)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def turn() -> None:
        size = int(data["pairs"])
        for batch in zip(asked.split(size), answered.split(size), strict=True):
            step(*batch)

    return turn


def main(file: str) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        data = dict(arrays)
    dtype = getattr(torch, str(data["dtype"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(data["folder"]), dtype=dtype)
    model.eval()
    prompts = torch.from_numpy(data["prompts"].astype(np.int64))
    with torch.no_grad():
        loss = model(input_ids=prompts, labels=prompts).loss.item()
    version = f"PyTorch {torch.__version__}, transformers {transformers.__version__}"
    turn = (writer if data["kind"] == "writing" else tuner)(model, data)
    serve(turn, version=version, loss=loss)


if __name__ == "__main__":
    main(sys.argv[1])
