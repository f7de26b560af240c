"""Every reader of files, with small valid files that it reads; see `test_fuzz`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl import files
from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.data import Population
from jaxpfl.data import open as open_population
from jaxpfl.data.folders import check_folder
from jaxpfl.data.readers.plain_text import read_counts
from jaxpfl.errors import InputError
from jaxpfl.experiments import registry
from jaxpfl.experiments.engine.rounds import planned
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.experiments.report.run_page import RunFiles
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.models.checkpoints import adapters, folders, pretrained
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.embed.encoder import SentenceEncoder
from jaxpfl.text.tokenisers.fast import hugging_face, read_template
from jaxpfl.text.tokenisers.vocabulary import Vocabulary
from jaxpfl.trained import load
from tests.fuzz import seeds
from tests.published_models import write_decoder, write_encoder, write_tokeniser

_TEXT = "an a 7\u00e9"


class Target(NamedTuple):
    """A reader and a file that it reads.

    Attributes:
      file: which file is damaged.
      make: writes it, and the others that the reader needs, to an empty folder.
      read: reads the folder as a user's command would, and uses what was read.
      share: how many inputs it gets beside the others, so that all take about the same time.
      sign: corrects the hashes by which the damage would be noticed, as whoever made the file can.
    """

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    share: float
    sign: Callable[[Path], object] = lambda folder: None


def _as(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content.encode())


def _at(file: str, use: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: use(folder / file)


def _read_population(folder: Path) -> None:
    population = Population.load(folder / "saved")
    dict(population.columns)
    population.client_ids.to_pylist()
    population.select(range(len(population))).sizes()
    check_folder(folder / "saved", progress=False)


def _read_run(folder: Path) -> None:
    str(RunFiles.read(folder).mark)
    planned(folder, {})


def _read_ledger(folder: Path) -> None:
    ledger = Ledger.read(folder / "ledger.jsonl")
    ledger.verify()
    str(ledger.adjacency)


def _read_checkpoint(folder: Path) -> None:
    with Checkpoints(folder, run="r") as checkpoints:
        checkpoints.restore(seeds.CHECKPOINT, warn=lambda _: None)


def _read_moments(folder: Path) -> None:
    PrivateMoments.load(folder / "moments.npz", None)  # pyright: ignore[reportArgumentType]


def _use(tokeniser: Any) -> None:
    ids = tokeniser.encode([_TEXT, ""])
    tokeniser.prompts([_TEXT])
    tokeniser.decode(ids[0])
    tokeniser.token_bytes()


def _read_adapters(folder: Path) -> None:
    model, params = pretrained.load(folder / "base")
    adapters.load(folder / "adapters", model, params)  # pyright: ignore[reportArgumentType]


def _predict(folder: Path) -> None:
    load(folder).predict([[0.5, 1.0]])


def _alone(
    file: str, make: Callable[[Path], object], read: Callable[[Path], object], share: float
) -> Target:
    """Of one file, which `make` writes and `read` takes."""
    return Target(file, _at(file, make), _at(file, read), share)


def _data(file: str, make: Callable[[Path], object], share: float, options: str = "") -> Target:
    def read(path: Path) -> None:
        population = open_population(f"{path}{options}")
        population.client_ids.to_pylist()
        dict(population.columns)

    return _alone(file, make, read, share)


def _weights(file: str, make: Callable[[Path], object], share: float) -> Target:
    return Target(file, make, lambda folder: pretrained.load((folder / file).parent), share)


def _config(make: Callable[[Path], object]) -> Target:
    return Target("config.json", make, _at("config.json", pretrained.read_config), 20)


def _tokeniser(file: str, make: Callable[[Path], object], share: float) -> Target:
    return Target(file, make, lambda folder: _use(hugging_face(folder)), share)


_POPULATION = (seeds.population, _read_population)
_ARTIFACT = (
    seeds.artifact,
    lambda folder: seeds.artifacts(folder).find("one"),
    2,
    seeds.sign_files,
)
_CHECKPOINT = (seeds.checkpoint, _read_checkpoint, 0.1, seeds.sign_files)
_ADAPTERS = (seeds.adapters, _read_adapters, 0.1)
_BUFFER = (*_POPULATION, 4, seeds.sign_buffers)

TARGETS: dict[str, Target] = {
    "JSON file": _alone("x.json", _as('{"a": [1, {"b": "c"}]}'), files.read_json, 120),
    "FreD's moments": Target("moments.npz", seeds.moments, _read_moments, 60),
    "population manifest": Target("saved/manifest.json", *_POPULATION, 20, seeds.sign_manifest),
    "population ids": Target("saved/client_ids.edges", *_BUFFER),
    "population offsets": Target("saved/offsets.values", *_BUFFER),
    "population edges": Target("saved/3.edges", *_BUFFER),
    "population texts": Target("saved/3.values", *_BUFFER),
    "run.json": Target("run.json", seeds.run, _read_run, 20),
    "metrics.jsonl": Target("metrics.jsonl", seeds.run, _at("metrics.jsonl", read_lines), 24),
    "secret.json": _alone("secret.json", seeds.secret, seeds.secret, 24),
    "ledger": Target("ledger.jsonl", seeds.ledger, _read_ledger, 4),
    "ledger, sealed again": Target(
        "fields.jsonl", seeds.fields, _read_ledger, 2, seeds.sign_fields
    ),
    "artifact arrays": Target("artifacts/one/arrays.npz", *_ARTIFACT),
    "artifact manifest": Target("artifacts/one/manifest.json", *_ARTIFACT),
    "checkpoint record": Target("round_00000001/record.json", *_CHECKPOINT),
    "checkpoint manifest": Target("round_00000001/manifest.json", *_CHECKPOINT),
    "checkpoint metadata": Target("round_00000001/state/_METADATA", *_CHECKPOINT),
    "checkpoint arrays": Target("round_00000001/state/0/0", *_CHECKPOINT),
    "checkpoint array's shape": Target("round_00000001/state/0/.zarray", *_CHECKPOINT),
    "config": _alone("a.yaml", seeds.quickstart, registry.load, 0.3),
    "sweep": Target("sweep.yaml", seeds.sweep, _at("sweep.yaml", load_sweep), 0.3),
    "vocabulary": _alone("v.json", seeds.vocabulary, Vocabulary.load, 14),
    "word counts": _alone("a.word_count", _as("the 5\na 3\n"), read_counts, 20),
    "tokenizer, bytes": _tokeniser("tokenizer.json", write_tokeniser, 10),
    "tokenizer, word pieces": _tokeniser("tokenizer.json", seeds.word_pieces, 8),
    "tokenizer, sentence pieces": _tokeniser("tokenizer.json", seeds.sentence_pieces, 16),
    "tokenizer settings": _tokeniser("tokenizer_config.json", seeds.chat, 4),
    "chat template": Target("tokenizer_config.json", seeds.chat, read_template, 0.6),
    "decoder config": _config(lambda folder: write_decoder(folder, "gemma3_text")),
    "encoder config": _config(lambda folder: write_encoder(folder, "roberta")),
    "weights": _weights("model.safetensors", lambda folder: write_decoder(folder, "llama"), 0.3),
    "weights index": _weights("model/model.safetensors.index.json", seeds.sharded, 1.5),
    "own model": Target("model/config.json", seeds.own, _at("model", folders.load), 8),
    "exported fields": Target("fields.json", seeds.trained, _predict, 8),
    "exported weights": Target("model.safetensors", seeds.trained, _predict, 4),
    "adapter settings": Target("adapters/adapter_config.json", *_ADAPTERS),
    "adapters": Target("adapters/adapter_model.safetensors", *_ADAPTERS),
    "sentence encoder": Target("modules.json", seeds.sentences, SentenceEncoder, 0.3),
    "JSON lines": _data("a.jsonl", _as(seeds.LINES), 4),
    "CSV": _data("a.csv", _as(seeds.CSV), 6),
    "Parquet": _data("a.parquet", seeds.packed, 12),
    "arrays": _data("a.npz", seeds.arrays, 40),
    "text": _data("a.txt", _as("one \u00e9\n\ntwo\n"), 16),
    "texts, archive": _data("a.tar.gz", seeds.archive, 20),
    "SQLite": _data("a.sqlite", seeds.sqlite, 6, "?dataset=shakespeare"),
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
