"""Writes what a finished run made in formats that other libraries read.

    README.md                 the model's card, with the run's privacy statement
    config.json, *.safetensors, tokenizer.json, ...      the model, see `models.checkpoints`
    certificate.json          what was released and what it costs, with hashes of these files
    corpus/corpus.parquet     the synthetic texts, of a run that wrote some, with a card of theirs

They are of the run's verified artifacts; of a run from Python, the model that it wrote, by its
certificate. A crash leaves no folder of the wanted name.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl import files
from jaxpfl.checks import positive_int
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.carry_out import as_written
from jaxpfl.experiments.engine.setting import stamp_of
from jaxpfl.experiments.records.artifacts import begin
from jaxpfl.experiments.records.lines import where_begun
from jaxpfl.experiments.registry import load_run, system_of
from jaxpfl.experiments.run import MODEL
from jaxpfl.experiments.systems import CONFIG, RESULT
from jaxpfl.experiments.systems.base import Made, trained_on
from jaxpfl.models.checkpoints import folders
from jaxpfl.printable import template
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.certificate import sealed, with_weights
from jaxpfl.privacy.plan import Plan
from jaxpfl.trained import Trained

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
    with as_written(directory, "it cannot be exported"):
        made, record, kind = made_by(directory, texts, progress)
        if texts is not None and made.corpus is None:
            raise InputError("the run wrote no synthetic texts: leave out --texts")
        card = _card(f"{directory.absolute().name}: {kind}", record["privacy"], made)
    written = _write(folder, made, card, directory / CERTIFICATE)
    stated = {"privacy": record["privacy"], "stamp": made.stamp}
    return {"out": str(folder), "files": written, **stated}


def export_selected(
    directory: Path, folder: Path, *, title: str, statement: str, certificate: Path
) -> list[str]:
    """Writes what the run of a private selection's best point made, if it made something.

    Card and certificate are the selection's, whose cost is not that of the run alone. Returns the
    files' names. A folder that is there is left.
    """
    if not folder.exists():
        if not hasattr(system_of(load_run(directory).system).part("export"), "made"):
            return []
        with as_written(directory, "it cannot be exported"):
            made, _, kind = made_by(directory)
        card = _card(f"{title}: {kind}", statement, made)
        card["terms"]["accountant"] = "RDP"
        return _write(folder, made, card, certificate)
    return _files_in(folder)


def made_by(
    directory: Path, texts: int | None = None, progress: bool = False
) -> tuple[Made, Mapping[str, Any], str]:
    """What a finished run made, its record, and its system or, from Python, its algorithm."""
    from_python = not (directory / CONFIG).exists()
    if from_python and (directory / MODEL).is_dir():
        return _from_python(directory)
    if from_python and (directory / "run.json").exists():
        why = "its rounds are not finished, its algorithm has none, or it is not finite"
        raise InputError(f"{directory}: holds no model: {why}")
    config, result = load_run(directory), directory / RESULT
    system = system_of(config.system)
    record = files.read_record(result) if result.exists() else {}
    if record.get("system") != system.name:
        why = f"{RESULT} is missing or not complete; go on with `jaxpfl resume {directory}`"
        raise InputError(f"{directory}: holds no finished run: {why}")
    with files.exclusive(directory), where_begun(directory) as run_directory:
        makes = getattr(system.part("export"), "made", None)
        if makes is None:
            raise InputError(f"{directory}: holds no model: see what it made in its report.html")
        made = makes(run_directory, config, record, texts=texts, progress=progress)
    plans = () if made.plan is None else (made.plan,)
    of_plan = stamp_of(plans, reproducible=config.run.reproducible_noise)
    return replace(made, stamp=made.stamp or of_plan or record["stamp"]), record, system.name


def _from_python(directory: Path) -> tuple[Made, Mapping[str, Any], str]:
    """`made_by` of a run from Python, whose model must be as the certificate says."""
    stored, certificate = directory / MODEL, files.read_record(directory / CERTIFICATE)
    with_files = files.read_record(stored / CERTIFICATE, {"weights": dict})
    paths = [path for path in stored.rglob("*") if path.is_file() and path.name != CERTIFICATE]
    hashes = {p.relative_to(stored).as_posix(): files.sha256_file(p) for p in paths}
    result = files.read_record(directory / "result.json", {"privacy": str, "metrics": dict})
    same = certificate["statement"] == result["privacy"]
    if not same or with_files != sealed({**certificate, "weights": hashes}):
        raise CorruptFile(f"{stored}: is not the model that the run ended with: it was altered")
    run = files.read_record(directory / "run.json", {"plan": dict, "stamp": str, "label": str})
    plan, data = Plan.from_dict(run["plan"]), trained_on(run["population"])
    scores, tested_on = result["metrics"].get("evaluation") or {}, result["evaluated_on"]
    made = Made((), plan, run["stamp"], data, scores, tested_on, written=stored)
    return made, result, run["label"]


def _write(folder: Path, made: Made, card: Mapping[str, Any], certificate: Path) -> list[str]:
    """Writes everything under another name, then renames it; returns the names of the files."""
    folder = folder.absolute()
    temporary = begin(folder)
    try:
        if made.written is not None:
            shutil.copytree(made.written, temporary, dirs_exist_ok=True)
        for trained in made.models:
            made_of = trained.model, trained.params, trained.words, trained.fields
            Trained(*made_of).save(temporary / trained.folder, base=trained.base)
        if made.corpus is not None:
            (place := temporary / _CORPUS).mkdir()
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
    return _files_in(folder)


def _files_in(folder: Path) -> list[str]:
    return [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]


def _card(title: str, statement: str, made: Made) -> dict[str, Any]:
    """What the cards say, by the names that the template `card.md.jinja` has for it."""
    contents, terms, plan = {}, {}, made.plan
    for trained in made.models:
        reader = folders.reader(trained.model, trained.base)
        what = f"{type(trained.model).__name__}, read by `jaxpfl.load` and {reader}"
        contents[f"{trained.folder}/" if trained.folder else "./"] = what
    for place in made.folders:
        name = "." if place == made.written else place.name
        contents[f"{name}/"] = "weights (safetensors) and their model, read by `jaxpfl.load`"
    if made.corpus is not None:
        contents[f"{_CORPUS}/"] = f"{len(made.corpus)} synthetic texts, with a card of their own"
    if plan is not None:
        terms = {
            "delta": f"{plan.delta:g}" if plan.private else "none: there is no noise",
            "unit": _UNITS[plan.unit],
            "adjacency": f"{plan.adjacency} {plan.unit}".replace("_", " "),
            "accountant": plan.guarantee().accountant.upper() if plan.private else "none",
        }
    card = {"title": title, "stamp": made.stamp, "statement": statement, "terms": terms}
    return {**card, "made": made, "contents": contents}


def _rendered(card: Mapping[str, Any], texts: int | None = None) -> str:
    """README.md of a model, or of a data set of so many texts, in the hub's format."""
    return template(__package__ or "", "card.md.jinja").render(card=card, texts=texts)
