"""Every reader of files, with small valid files that it reads; see `test_fuzz` and `__main__`."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.data import Population
from jaxpfl.data import open as open_population
from jaxpfl.data.check import check
from jaxpfl.data.readers.counts import read_counts
from jaxpfl.data.staging import Staging
from jaxpfl.errors import InputError
from jaxpfl.experiments import registry
from jaxpfl.experiments.engine.final_state import planned
from jaxpfl.experiments.engine.run_directory import saved_secret
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.experiments.report.run_page import RunFiles
from jaxpfl.experiments.sweep import directory as sweeps
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.models.checkpoints import adapters, own_models, pretrained
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.embed.encoder import SentenceEncoder
from jaxpfl.text.tokenisers.chat import read_template
from jaxpfl.text.tokenisers.fast import hugging_face
from jaxpfl.text.tokenisers.vocabulary import Vocabulary
from tests.fuzz import seeds
from tests.published_models import write_decoder, write_encoder, write_tokeniser

_TEXT = "an a 7\u00e9"


class Target(NamedTuple):
    """A reader and a file that it reads.

    Attributes:
      file: which file is damaged.
      make: writes it, and the others that the reader needs, to an empty folder.
      read: reads the folder as a user's command would, and uses what was read.
      sign: corrects the hashes by which the damage would be noticed, as whoever made the file can.
      share: how many inputs it gets beside the others, so that all take about the same time.
    """

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    sign: Callable[[Path], object] = lambda folder: None
    share: float = 1.0


def _as_json(value: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(value))


def _in(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: make(folder / name)


def _read_population(folder: Path) -> None:
    population = Population.load(folder / "saved")
    dict(population.columns)
    population.client_ids.to_pylist()
    population.select(range(len(population))).sizes()
    check(folder / "saved", progress=False)


def _read_run(folder: Path) -> None:
    str(RunFiles.read(folder).mark)
    planned(folder, {})


def _read_secret(path: Path) -> None:
    saved_secret(path, reproducible_seed=3, purpose="a")


def _read_ledger(folder: Path) -> None:
    ledger = Ledger.read(folder / "ledger.jsonl")
    ledger.verify()
    str(ledger.adjacency)


def _find_artifact(folder: Path) -> None:
    seeds.artifacts(folder).find("one")


def _read_staging(folder: Path) -> None:
    # A copy, because what is staged is gone on with where it is.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        copy = Path(place, "staging")
        shutil.copytree(folder / "staging", copy)
        with Staging.opened(copy, {"source": "a"}) as begun:
            begun.append(seeds.STAGED)
            begun.commit()
            offsets = np.array([0, begun.examples])
            begun.write(Path(place, "examples.arrow"), list(begun.columns), offsets)
            begun.content(list(begun.columns), offsets)


def _read_checkpoint(folder: Path) -> None:
    with Checkpoints(folder, run="r") as checkpoints:
        checkpoints.restore(seeds.CHECKPOINT, warn=lambda _: None)


def _read_moments(path: Path) -> None:
    PrivateMoments.load(path, None)  # pyright: ignore[reportArgumentType]


def _read_point(folder: Path) -> None:
    sweeps.state_of(folder / "points" / "x")


def _use(tokeniser: Any) -> None:
    ids = tokeniser.encode([_TEXT, ""])
    tokeniser.prompts([_TEXT])
    tokeniser.decode(ids[0])
    tokeniser.token_bytes()


def _read_own(folder: Path) -> None:
    own_models.load(folder / "model")


def _read_adapters(folder: Path) -> None:
    model, params = pretrained.load(folder / "base")
    adapters.load(folder / "adapters", model, params)  # pyright: ignore[reportArgumentType]


_ADAPTERS = (seeds.adapters, _read_adapters)


def _one(
    name: str,
    make: Callable[[Path], object],
    read: Callable[[Path], object],
    sign: Callable[[Path], object] = lambda folder: None,
    share: float = 1.0,
) -> Target:
    """A reader that takes the damaged file itself, and not its folder."""
    return Target(name, make, lambda folder: read(folder / name), sign, share)


def _alone(
    name: str, make: Callable[[Path], object], read: Callable[[Path], object], share: float = 1.0
) -> Target:
    """A reader of one file that `make` writes."""
    return _one(name, _in(name, make), read, share=share)


def _data(name: str, make: Callable[[Path], object], options: str = "", share: float = 1) -> Target:
    def read(path: Path) -> None:
        population = open_population(f"{path}{options}")
        population.client_ids.to_pylist()
        dict(population.columns)

    return _alone(name, make, read, share)


def _stored(name: str) -> Target:
    return Target(f"artifacts/one/{name}", seeds.artifact, _find_artifact, seeds.sign_artifact, 2.0)


def _weights(name: str, make: Callable[[Path], object], share: float) -> Target:
    return Target(name, make, lambda folder: pretrained.load((folder / name).parent), share=share)


def _config(make: Callable[[Path], object]) -> Target:
    return _one("config.json", make, pretrained.read_config, share=20)


def _tokeniser(name: str, make: Callable[[Path], object], share: float) -> Target:
    return Target(name, make, lambda folder: _use(hugging_face(folder)), share=share)


def _staged(name: str) -> Target:
    return Target(f"staging/{name}", seeds.staging, _read_staging, share=8)


def _checkpoint(name: str) -> Target:
    file, sign = f"round_00000001/{name}", seeds.sign_checkpoint
    return Target(file, seeds.checkpoint, _read_checkpoint, sign, 1)


_POPULATION = (seeds.population, _read_population)
_SHAKESPEARE = "?dataset=shakespeare"

TARGETS: dict[str, Target] = {
    "JSON file": _alone("x.json", _as_json({"a": [1, {"b": "c"}]}), files.read_json, 120),
    "npz": _one("moments.npz", seeds.moments, files.read_npz, share=100),
    "FreD's moments": _one("moments.npz", seeds.moments, _read_moments, share=60),
    "population manifest": Target("saved/manifest.json", *_POPULATION, seeds.sign_manifest, 20),
    "population clients": Target("saved/clients.arrow", *_POPULATION, seeds.sign_clients, 4),
    "population examples": Target("saved/examples.arrow", *_POPULATION, seeds.sign_examples, 8),
    "run.json": Target("run.json", seeds.run, _read_run, share=20),
    "result.json": Target("result.json", seeds.run, _read_run, share=12),
    "metrics.jsonl": _one("metrics.jsonl", seeds.run, read_lines, share=24),
    "secret.json": _alone("secret.json", seeds.secret, _read_secret, 24),
    "ledger": Target("ledger.jsonl", seeds.ledger, _read_ledger, share=4),
    "ledger, sealed again": Target(
        "fields.jsonl", seeds.fields, _read_ledger, seeds.sign_fields, 2
    ),
    "artifact arrays": _stored("arrays.npz"),
    "artifact record": _stored("record.json"),
    "artifact manifest": _stored("manifest.json"),
    "staging journal": _staged("journal.json"),
    "staged texts": _staged("0"),
    "staged offsets": _staged("0.offsets"),
    "checkpoint record": _checkpoint("record.json"),
    "checkpoint manifest": _checkpoint("manifest.json"),
    "checkpoint state": _checkpoint("state.bin"),
    "config": _alone("a.yaml", seeds.quickstart, registry.load, 0.3),
    "sweep": _one("sweep.yaml", seeds.sweep, load_sweep, share=0.3),
    "points.json": Target("points.json", seeds.begun_sweep, sweeps.load_begun, share=2),
    "point.json": Target("points/x/point.json", seeds.begun_sweep, _read_point, share=12),
    "vocabulary": _alone("v.json", seeds.vocabulary, Vocabulary.load, 14),
    "word counts": _alone("a.word_count", seeds.word_counts, read_counts, 20),
    "word counts, archive": _alone("a.word_count.tar.bz2", seeds.archive, read_counts, 8),
    "tokenizer, bytes": _tokeniser("tokenizer.json", write_tokeniser, 10),
    "tokenizer, word pieces": _tokeniser("tokenizer.json", seeds.word_pieces, 8),
    "tokenizer, sentence pieces": _tokeniser("tokenizer.json", seeds.sentence_pieces, 16),
    "tokenizer settings": _tokeniser("tokenizer_config.json", seeds.chat, 4),
    "chat template": Target("tokenizer_config.json", seeds.chat, read_template, share=0.6),
    "decoder config": _config(lambda folder: write_decoder(folder, "qwen2")),
    "encoder config": _config(lambda folder: write_encoder(folder, "roberta")),
    "model config": _weights("config.json", lambda folder: write_decoder(folder, "llama"), 1),
    "weights": _weights("model.safetensors", lambda folder: write_decoder(folder, "llama"), 0.3),
    "weights index": _weights("model/model.safetensors.index.json", seeds.sharded, 1.5),
    "own model": Target("model/config.json", seeds.own, _read_own, share=8),
    "adapter settings": Target("adapters/adapter_config.json", *_ADAPTERS, share=0.1),
    "adapters": Target("adapters/adapter_model.safetensors", *_ADAPTERS, share=0.1),
    "sentence encoder": Target("modules.json", seeds.sentences, SentenceEncoder, share=0.3),
    "JSON lines": _data("a.jsonl", seeds.lines, share=4),
    "JSON lines, packed": _data("a.jsonl.gz", seeds.lines, share=12),
    "JSON": _data("a.json", _as_json(seeds.ROWS), share=6),
    "CSV": _data("a.csv", seeds.csv, share=6),
    "Parquet": _data("a.parquet", seeds.arrow, share=12),
    "Arrow": _data("a.arrow", seeds.arrow, share=32),
    "Arrow, packed": _data("a.arrow", seeds.packed_arrow, share=20),
    "arrays": _data("a.npz", seeds.arrays, share=40),
    "text": _data("a.txt", seeds.text, share=16),
    "texts, archive": _data("a.tar.gz", seeds.archive, share=20),
    "SQLite": _data("a.sqlite", seeds.sqlite, _SHAKESPEARE, 6),
    "SQLite, packed": _data("a.sqlite.lzma", seeds.sqlite, _SHAKESPEARE, 3),
}


def made(target: Target, folder: Path) -> bytes:
    """Makes the target's files in an empty folder; returns the content of the one to damage."""
    target.make(folder)
    return (folder / target.file).read_bytes()


def run_input(target: Target, folder: Path, content: bytes) -> None:
    """Reads one input; raises whatever is not the library's own error."""
    path = folder / target.file
    # A new file: the old one may still be mapped by what read it.
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    target.sign(folder)
    try:
        target.read(folder)
    except InputError:
        return
