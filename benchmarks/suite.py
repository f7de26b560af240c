"""The benchmarks by name."""

import importlib.util
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module that records rows, and the arguments that it is run with.

    Attributes:
      module: below `benchmarks`.
      arguments: of its command line.
      results: the name of its file of rows.
    """

    module: str
    arguments: tuple[str, ...]
    results: str


CEILINGS = Benchmark("micro.ceilings", (), "ceilings")


def _of(module: str, *arguments: str) -> Benchmark:
    return Benchmark(module, arguments, module.split(".")[1])


SUITE: dict[str, Benchmark] = {
    "aggregate": _of("micro.aggregate"),
    "checkpoint": _of("micro.checkpoint"),
    "packing": _of("micro.packing"),
    "round": _of("macro.round"),
    "model_step": _of("micro.model_step"),
    "example_unit": _of("micro.example_unit"),
    "embed": _of("micro.embed"),
    "frechet": _of("micro.frechet"),
    "fred_noise": _of("micro.fred_noise"),
    "scores": _of("micro.scores"),
    "tff": _of("micro.tff"),
    "gan_round": _of("macro.gan_round"),
    "word_lm": _of("macro.word_lm"),
    "generate": _of("macro.generate"),
    "decoder_step": _of("micro.decoder_step"),
    "finetune": _of("macro.finetune"),
    "popri_cost": _of("macro.popri_cost"),
}


def sentence(benchmark: Benchmark) -> str:
    """The first line of a benchmark's documentation, without importing it."""
    spec = importlib.util.find_spec(f"benchmarks.{benchmark.module}")
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        return file.readline().strip().strip('"')
