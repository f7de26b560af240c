"""Writes what a finished run made in formats that other libraries read.

    README.md                 the model's card, with the run's privacy statement
    config.json, *.safetensors, tokenizer.json, ...      the model, see `models.checkpoints`
    certificate.json          what was released and what it costs, with hashes of these files
    corpus/corpus.parquet     the synthetic texts, of a run that wrote some, with a card of theirs

Nothing is copied from the run's directory: what is written are the parameters and texts of its
verified artifacts. A crash leaves no folder of the wanted name.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl import files
from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.experiments.carry_out import as_written, finished
from jaxpfl.experiments.engine.setting import stamp_of
from jaxpfl.experiments.records.artifacts import begin
from jaxpfl.experiments.records.lines import where_begun
from jaxpfl.experiments.registry import load_run, system_of
from jaxpfl.experiments.systems.base import Made, TrainedModel, last_part
from jaxpfl.models.checkpoints import adapters, jaxpfl_models, pretrained
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.printable import template
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.certificate import with_weights
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

_CORPUS = "corpus"
_CARD = "README.md"
_UNITS = {
    "client": "client: one client with everything that it holds, over the whole run",
    "example": "example: one example of a client",
}


def export(
    run: str | Path, folder: str | Path, *, texts: int | None = None, progress: bool = True
) -> dict[str, Any]:
    """Writes what the finished run in the directory `run` made to the new folder `folder`.

    A synthetic corpus has so many `texts`, or as many as the run wrote. More cost the clients
    nothing.
    """
    directory, folder = files.user_path(run), files.user_path(folder)
    if texts is not None:
        positive_int("texts", texts)
    if folder.exists():
        raise InputError(f"{folder}: exists already; choose another FOLDER")
    config = load_run(directory)
    system = system_of(config.system)
    record = finished(directory, system.name)
    with as_written(directory, "it cannot be exported"):
        with files.exclusive(directory), where_begun(directory) as run_directory:
            makes = getattr(system.part("export"), "made", None)
            if makes is None:
                raise InputError(f"runs of the system {system.name!r} make nothing to export")
            made = makes(run_directory, config, record, texts=texts, progress=progress)
        if texts is not None and made.corpus is None:
            raise InputError("the run wrote no synthetic texts: leave out --texts")
        plans = () if made.plan is None else (made.plan,)
        of_plan = stamp_of(plans, reproducible=config.run.reproducible_noise)
        stamp = made.stamp or of_plan or record["stamp"]
        card = _card(directory, config, record, made, stamp)
    written = _write(folder, made, card, directory / CERTIFICATE)
    stated = {"privacy": record["privacy"], "stamp": stamp}
    return {"out": str(folder), "files": written, **stated}


def _write(folder: Path, made: Made, card: Mapping[str, Any], certificate: Path) -> list[str]:
    """Writes everything under another name, then renames it; returns the names of the files."""
    folder = folder.absolute()
    temporary = begin(folder)
    try:
        for trained in made.models:
            _write_model(temporary / trained.folder, trained)
        if made.corpus is not None:
            place = temporary / _CORPUS
            place.mkdir()
            texts = pa.table({"text": pa.array(made.corpus, pa.string())})
            parquet.write_table(texts, place / "corpus.parquet")
            (place / _CARD).write_text(_rendered(card, len(made.corpus)), encoding="utf-8")
        (temporary / _CARD).write_text(_rendered(card), encoding="utf-8")
        with_weights(certificate, temporary)
        files.fsync_tree(temporary)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files.fsync_path(folder.parent)
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in written]


def _write_model(folder: Path, trained: TrainedModel) -> None:
    folder.mkdir(exist_ok=True)
    save, _ = _format(trained)
    save(folder, trained.model, trained.params)
    if isinstance(trained.words, Vocabulary):
        source = last_part(trained.words.source)
        dataclasses.replace(trained.words, source=source).save(folder / "vocabulary.json")
    elif trained.words is not None:
        trained.words.save(folder)


def _card(
    directory: Path, config: Any, record: Mapping[str, Any], made: Made, stamp: str
) -> dict[str, Any]:
    """What the cards say, by the names that the template `card.md.jinja` has for it."""
    contents, terms, plan = {}, {}, made.plan
    for trained in made.models:
        what = f"{trained.model.name}, read by `{_format(trained)[1]}`"
        contents[f"{trained.folder}/" if trained.folder else "./"] = what
    if made.corpus is not None:
        contents[f"{_CORPUS}/"] = f"{len(made.corpus)} synthetic texts, with a card of their own"
    if plan is not None:
        terms = {
            "delta": f"{plan.delta:g}" if plan.private else "none: there is no noise",
            "unit": _UNITS[plan.unit],
            "adjacency": f"{plan.participation.adjacency.replace('_', ' ')} {plan.unit}",
            "accountant": plan.guarantee().accountant if plan.private else "none",
        }
    return {
        "title": f"{directory.absolute().name}: {config.system}",
        "stamp": stamp,
        "statement": record["privacy"],
        "terms": terms,
        "made": made,
        "contents": contents,
    }


def _rendered(card: Mapping[str, Any], texts: int | None = None) -> str:
    """README.md of a model, or of a data set of so many texts, in the hub's format."""
    return template(__package__ or "", "card.md.jinja").render(card=card, texts=texts)


def _format(trained: TrainedModel) -> tuple[Callable, str]:
    """What writes a model, and what reads it."""
    module = "jaxpfl.models.checkpoints"
    if isinstance(trained.model, Decoder) and trained.model.lora is not None:
        reader = f"{module}.adapters.load` or PEFT, beside `{trained.base}"
        return partial(adapters.save, base=trained.base), reader
    if isinstance(trained.model, Decoder | Encoder):
        return pretrained.save, f"{module}.pretrained.load` or `transformers"
    return jaxpfl_models.save, f"{module}.jaxpfl_models.load"
