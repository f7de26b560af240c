"""What is measured on a GPU: each part is a benchmark of ours with arguments of its own."""

import dataclasses
import importlib.util
import sys

# Seconds; a part that takes longer is stopped, and the next one begins.
LIMIT = 590


@dataclasses.dataclass(frozen=True)
class Part:
    """A benchmark that runs in a process of its own.

    Attributes:
      name: without spaces.
      module: it is run as `python -m`.
      arguments: of the measurement.
      tiny: of a run that shows in seconds, on any machine, that the part ends with a row.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    tiny: tuple[str, ...]


def _rounds() -> list[Part]:
    """EMNIST CNN: cohorts by form of the convolution and clients that train side by side."""
    parts = []
    for cohort, chunks in (
        (10, "1 2 4 16"),
        (50, "1 8 32 64"),
        (200, "8 32 64 128"),
        (1_000, "32 64 128 256"),
        (5_000, "32 64 128 256"),
    ):
        for form in ("convolution", "patches"):
            given = f"--cohorts {cohort} --forms {form} --repeats 5 --chunks {chunks}"
            parts.append(_part(f"round-{cohort}-{form}", "macro.round", given, _TINY_ROUND))
    return parts


def _part(name: str, module: str, arguments: str, tiny: str) -> Part:
    return Part(name, f"benchmarks.{module}", tuple(arguments.split()), tuple(tiny.split()))


def _against_torch(arguments: str) -> str:
    """With the peer, where this interpreter has it."""
    there = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    return f"{arguments} --torch {sys.executable}" if there else arguments


def parts() -> list[Part]:
    """In the order in which they run: what is least known comes first."""
    tiny_llama = (
        "--shape tiny --prompts 4 --responses 2 --prompt-tokens 24 --new-tokens 8 "
        "--batch-size 4 --part 2"
    )
    tune = "--devices 1 --batch 64 --length 64 --steps 10 --products"
    tune_tiny = "--devices 1 --batch 2 --length 8 --steps 1 --repeats 1 --layers 1"
    write = (
        "--shape distilgpt2 --no-baselines --prompts 64 --responses 8 --new-tokens 64 --products"
    )
    write_tiny = (
        "--shape distilgpt2 --no-baselines --prompts 1 --responses 2 --new-tokens 4 --repeats 1 "
        "--devices 1"
    )
    return [
        *_rounds(),
        _part(
            "aggregate",
            "micro.aggregate",
            "--clients 4096 --coordinates 1000000 --chunks 1 32 0",
            "--clients 8 --coordinates 1000 --chunks 1 0 --repeats 1 --devices 1",
        ),
        _part(
            "word-model-5000",
            "macro.word_lm",
            "--stack-overflow --clients 5000 --chunks 16 32 64 128 --repeats 3",
            "--stack-overflow --clients 2 --chunks 2 --repeats 1 --devices 1",
        ),
        _part("cifar10", "macro.cifar10", "", "--users 4 --cohort 2 --rounds 2 --test-images 50"),
        _part("scores", "micro.scores", "--clients 10000 --repeats 3", _TINY_SCORES),
        _part("frechet", "micro.frechet", "--repeats 3", _TINY_FRECHET),
        _part(
            "fred-covariance",
            "micro.fred_release",
            "--clients 5000 --chunks 8 32 64",
            "--clients 2 --chunks 1 --dimension 16 --examples 4 --repeats 1 --devices 1",
        ),
        *(
            _part(
                f"{what}-{products}",
                module,
                _against_torch(f"{given} {products}"),
                _against_torch(tiny),
            )
            for what, module, given, tiny in (
                ("finetune", "macro.finetune", tune, tune_tiny),
                ("generate", "macro.generate", write, write_tiny),
            )
            for products in ("float32", "tensorfloat32")
        ),
        # A fifth of the paper's round, and all of it in two parts.
        _part("llama-fifth", "gpu.llama", "--prompts 360", tiny_llama),
        _part("llama-fifth-int8", "gpu.llama", "--prompts 360 --int8", tiny_llama),
        _part("llama-round", "gpu.llama", "--warm-prompts 180", tiny_llama),
    ]


_TINY_ROUND = (
    "--cohorts 2 --forms patches --chunks 2 --repeats 1 --devices 1 --examples 20 --in-flight 1 "
    "--handwritten-up-to 0"
)
_TINY_SCORES = (
    "--clients 4 --texts 2 --prompts 3 --responses 2 --dimension 8 --repeats 1 --devices 1 "
    "--only release"
)
_TINY_FRECHET = "--examples 200 --dimension 8 --dimensions 8 --candidates 2 --parts 2 --repeats 1"
