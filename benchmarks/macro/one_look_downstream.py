"""What a downstream model gains from the texts of `benchmarks.macro.one_look`.

    JAXPFL_DATA=... python -m benchmarks.macro.one_look_downstream FOLDER

FOLDER is what `one_look --keep FOLDER` left. The GPT-2 of configs/one_look.yaml, pretrained on
sentences of Wikipedia and abstracts, is fine-tuned on 1,000 texts of each arm, and scored on spans
of text of held-out speeches, DECLARED PUBLIC here. Beside the arms:

  public    fine-tuned on as many sentences of Wikipedia
  untuned   on texts of the model before any round
  central   on as many spans of the clients' own texts, NOT PRIVATE: the ceiling

The seeds, of the order of the texts, are the same in all arms. Texts that were written once are
read again.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks import harness
from benchmarks.macro.one_look import (
    DOWNSTREAM,
    SETTINGS,
    adapters,
    language_model,
    opened,
    wikipedia,
)
from jaxpfl.algorithms.popri import synthesise, with_adapters
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.registry import load
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import CorpusWriter
from jaxpfl.models import adapter_trees
from jaxpfl.models.decoder import lora
from jaxpfl.text.embed import embedder
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.metrics.prediction import evaluate


@dataclasses.dataclass(frozen=True)
class Config:
    folder: tyro.conf.Positional[Path]
    seeds: int = 5


def written(writer: LanguageModel, samples: list[str], path: Path) -> list[str]:
    """The texts of a model, from `path` if they are there."""
    if not path.exists():
        found = synthesise(writer, samples, DOWNSTREAM + 150, SETTINGS, seed=998, progress=True)
        found = [text for text in found if len(text.split()) >= SETTINGS.least_words]
        path.write_text(json.dumps(found[:DOWNSTREAM]))
    return json.loads(path.read_text())


def tuned(generator: LanguageModel, path: Path) -> LanguageModel:
    """The generator with the adapters that were kept in `path`."""
    settings, key = SETTINGS.lora, jax.random.key(0)
    first, base = adapter_trees.split(
        lora.attach(generator.model, generator.params, settings, key)[1]
    )
    return with_adapters(generator, SETTINGS, adapter_trees.join(adapters(path, first), base))


def texts_of_arms(config: Config, real: list[str], generator: LanguageModel) -> dict[str, Any]:
    samples, folder = wikipedia(), config.folder
    draw = np.random.default_rng(5)
    found = {
        "public": [samples[i] for i in draw.permutation(len(samples))[:DOWNSTREAM]],
        "central": [real[i] for i in draw.permutation(len(real))[:DOWNSTREAM]],
        "untuned": written(generator, samples, folder / "untuned.json"),
    }
    for path in sorted(folder.glob("*.npz")):
        found[path.stem] = written(tuned(generator, path), samples, path.with_suffix(".json"))
    for path in sorted(folder.glob("pe-*.json")):
        found[path.stem] = json.loads(path.read_text())
    return found


def main(config: Config) -> None:
    _, real, held_out = opened("congress", embedder("minilm"))
    texts = texts_of_arms(config, real, language_model())
    cache = str(config.folder / "cache")
    writer = CorpusWriter(load("configs/one_look.yaml", ["--cache", cache]))
    settings = writer.config.corpus.fine_tuning
    start = writer.downstream
    held_out_NxL = writer.rows(held_out.columns["text"].to_pylist()[:4_000])
    rows = [{"arm": "checkpoint", **evaluate(start.model, start.params, held_out_NxL)}]
    for arm, found in texts.items():
        tokens = {"tokens": writer.rows(found)}
        scores = []
        for seed in range(config.seeds):
            with tempfile.TemporaryDirectory() as place:
                fitted = fit(start.model, start.params, tokens, settings, seed=seed, folder=place)
            scores.append(evaluate(start.model, fitted.params, held_out_NxL))
        row: dict[str, Any] = {"arm": arm, "texts": len(found), "seeds": config.seeds}
        for name in ("accuracy", "perplexity"):
            values = np.array([each[name] for each in scores])
            row[name] = float(values.mean())
            row[f"{name}_error"] = float(values.std(ddof=1) / len(values) ** 0.5)
        rows.append(row)
        print(row, flush=True)
    harness.record("one_look_downstream", rows)
    harness.table(rows, ["arm", "accuracy", "accuracy_error", "perplexity", "perplexity_error"])


if __name__ == "__main__":
    main(tyro.cli(Config))
