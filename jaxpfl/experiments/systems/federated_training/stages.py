"""The stages before the rounds: FreD's choice of a public corpus, and prefinetuning on it.

    fred/moments.npz, fred/scores.json              the private release, and every candidate's FreD
    prefinetune/NAME/params.npz, prefinetune.json   one candidate's parameters: public

Each stage is written whole before the next one starts, and found again by a resumed run. FreD's
secret is on the disk before its first use and its charges before anything is released, so
that a run killed in between makes the SAME release again, at no further cost. What follows the
release, the choice of the winner included, is post-processing and costs nothing.
"""

import hashlib
import io
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import require_affordable
from jaxpfl.algorithms.fred import (
    FredPlan,
    PrivateMoments,
    fred,
    private_moments,
    public_moments,
    score,
)
from jaxpfl.algorithms.gaussian_moments import Moments, mixture
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.central.prefinetune import Prefinetuned, epochs_of, prefinetune
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.config.sections import LanguageModelConfig, PrefinetuneConfig
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.experiments.engine.tracking import jsonable
from jaxpfl.experiments.systems.federated_training.build import Experiment
from jaxpfl.experiments.systems.federated_training.candidates import ALONE, Candidates
from jaxpfl.experiments.systems.federated_training.config import FredConfig
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.progress import Progress
from jaxpfl.text.embed import Embedder, embed, embedder


@dataclass(frozen=True)
class Stages:
    """What the stages before the rounds came to; public.

    Attributes:
      winner: name of the corpus that the run starts from.
      scores: of all candidates, nearest first: candidate, distance, corrected; None without FreD.
      fred: plan and statement of FreD's release; None without FreD.
      prefinetuned: by candidate, the winner first; the others where they were asked for.
    """

    winner: str
    scores: list[dict[str, Any]] | None
    fred: dict[str, Any] | None
    prefinetuned: dict[str, Prefinetuned] = field(repr=False)


def carry_out(
    experiment: Experiment, directory: Path, ledger: Path, budget: Budget | None, *, shown: bool
) -> Stages:
    """Does what is left of the stages in `directory`, whose lock the caller holds.

    Raises:
      InputError: a candidate cannot be read or used, or the stages in `directory` are another
        run's.
      BudgetExhausted: FreD does not fit the budget; nothing was released.
      CorruptFile: a file of a finished stage was altered.
    """
    settings = experiment.config.prefinetune
    assert settings is not None
    record = None
    names = [ALONE]
    if experiment.fred is not None:
        record = _fred(experiment, experiment.fred, directory, ledger, budget, shown)
        names = [entry["candidate"] for entry in record["scores"]]
    wanted = names if settings.other_candidates else names[:1]
    start = jax.device_get(initial_state(experiment.algorithm, experiment.config.run.seed).params)
    done = {
        name: _prefinetuned(experiment, settings, name, start, directory, shown) for name in wanted
    }
    return Stages(
        winner=names[0],
        scores=None if record is None else record["scores"],
        fred=None if record is None else {k: v for k, v in record.items() if k != "scores"},
        prefinetuned=done,
    )


def _fred(
    experiment: Experiment,
    plan: FredPlan,
    directory: Path,
    ledger_path: Path,
    budget: Budget | None,
    shown: bool,
) -> dict[str, Any]:
    """The private release and the scores: read where they are done, else made."""
    config = experiment.config
    assert config.fred is not None
    assert experiment.candidates is not None
    described = hashlib.sha256(f"fred {_described(experiment)}".encode()).hexdigest()[:12]
    folder = directory / "fred"
    folder.mkdir(exist_ok=True)
    released, scores = folder / "moments.npz", folder / "scores.json"
    secret_path = files.private_directory(directory / "private") / "fred_secret.json"
    with Ledger(ledger_path, experiment.sources, budget=budget) as ledger:
        if scores.exists():
            record = files.read_json(scores)
            _require_same(scores, record, described)
            # A ledger cut off after the release would be charged too little.
            ledger.verify(record["ledger_head"])
            if files.sha256_file(released) != record["moments_sha256"]:
                raise CorruptFile(f"{released}: was altered: it fails its SHA-256")
            forget(secret_path)
            return record
        secret = saved_secret(
            secret_path,
            reproducible_seed=config.run.seed if config.run.reproducible_noise else None,
            purpose="FreD",
        )
        run = f"fred {run_id(secret)}"
        # Read before anything is charged: a candidate that cannot be read costs nothing.
        function = embedder(config.fred.embedder)
        corpora = _public_moments(config.fred, experiment.candidates, function, config.run.seed)
        found = _released_before(released, plan, run)
        if found is None:
            algorithm = fred(plan, units=len(experiment.sources), dimension=function.dimension)
            require_affordable(algorithm, ledger, run)
            embedded = embed(experiment.sources, function, progress=shown)
            found = private_moments(embedded, plan, ledger=ledger, run=run, secret=secret)
            _save_moments(found, released, run)
        head = ledger.head
    ranked = score(found, corpora)
    stamp = not plan.private or config.run.reproducible_noise
    record = {
        "config": described,
        "run": run,
        "private": not stamp,
        "statement": plan.statement(),
        "plan": plan.to_dict(),
        "embedder": function.name,
        "noise": found.noise._asdict(),
        "moments_sha256": files.sha256_file(released),
        "ledger_head": head,
        "scores": [
            {"candidate": each.name, "distance": each.distance, "corrected": each.corrected}
            for each in ranked
        ],
    }
    record = jsonable(record)
    files.write_atomically(scores, json.dumps(record, indent=1) + "\n")
    forget(secret_path)
    return record


def _public_moments(
    config: FredConfig, candidates: Candidates, function: Embedder, seed: int
) -> dict[str, Moments]:
    """Moments of all candidates; those of a mixture follow from its sources'."""
    of_source = {}
    for source in candidates.sources:
        sample = candidates.sample(source, function.column, config.max_candidate_examples, seed)
        of_source[source] = public_moments(sample, function, config.clip_norm, progress=False)
    found = {}
    for name in candidates.names:
        shares = candidates.shares(name)
        parts = [of_source[source] for source in shares]
        found[name] = mixture(parts, list(shares.values())) if len(parts) > 1 else parts[0]
    return found


def _prefinetuned(
    experiment: Experiment,
    settings: PrefinetuneConfig,
    name: str,
    start: Any,
    directory: Path,
    shown: bool,
) -> Prefinetuned:
    """One candidate's prefinetuning: read where it is done, else made."""
    config, candidates = experiment.config, experiment.candidates
    assert candidates is not None
    folder = directory / "prefinetune" / name
    folder.mkdir(parents=True, exist_ok=True)
    identity = hashlib.sha256(f"{name}\n{_described(experiment)}".encode()).hexdigest()[:12]
    arrays, described = folder / "params.npz", folder / "prefinetune.json"
    if described.exists():
        record = files.read_json(described)
        _require_same(described, record, identity)
        params = load_params(arrays, start, record["params_sha256"])
        return Prefinetuned(params, record)
    language = config.model if isinstance(config.model, LanguageModelConfig) else None
    corpus = candidates.corpus(
        name,
        settings.examples,
        settings.valid,
        seed=config.run.seed,
        columns=("tokens",) if language is not None else ("image", "label"),
        vocabulary=experiment.vocabulary,
        sequence_length=0 if language is None else language.sequence_length,
    )
    with Progress(
        f"prefinetune on {name}",
        total=epochs_of(settings),
        progress=shown,
        step="epoch",
    ) as bar:
        found = prefinetune(
            experiment.model,
            start,
            corpus,
            settings,
            seed=config.run.seed,
            callback=lambda epoch, loss: bar.update(epoch, {"public loss": f"{loss:.4g}"}),
        )
    digest = save_params(arrays, found.params)
    record = jsonable(
        {
            "config": identity,
            "candidate": name,
            "shares": dict(candidates.shares(name)),
            "sources": {source: candidates.sources[source] for source in candidates.shares(name)},
            "params_sha256": digest,
            **found.record,
        }
    )
    files.write_atomically(described, json.dumps(record, indent=1) + "\n")
    return Prefinetuned(found.params, record)


def save_params(path: Path, params: Any) -> str:
    """Writes a tree of arrays as one .npz file, whole or not at all; returns its SHA-256."""
    content = _as_npz(params)
    files.write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def params_digest(params: Any) -> str:
    """SHA-256 of the file that `save_params` would write."""
    return hashlib.sha256(_as_npz(params)).hexdigest()


def _as_npz(params: Any) -> bytes:
    leaves = {
        jax.tree_util.keystr(keys, simple=True, separator="."): np.asarray(leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    return files.npz(leaves)


def load_params(path: Path, like: Any, sha256: str) -> Any:
    """Reads what `save_params` wrote into the structure of `like`.

    Raises:
      CorruptFile: the file is missing or altered, or holds other parameters than `like`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CorruptFile(f"{path}: was altered: it fails its SHA-256")
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            for keys, leaf in paths:
                name = jax.tree_util.keystr(keys, simple=True, separator=".")
                array = arrays[name]
                if array.shape != leaf.shape or array.dtype != leaf.dtype:
                    raise CorruptFile(
                        f"{path}: {name} is {array.dtype}{list(array.shape)}, expected "
                        f"{leaf.dtype}{list(leaf.shape)}"
                    )
                leaves.append(array)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise CorruptFile(f"{path}: does not hold this model's parameters") from error
    return jax.tree_util.tree_unflatten(structure, leaves)


def _released_before(path: Path, plan: FredPlan, run: str) -> PrivateMoments | None:
    """What this run released before a crash; made again elsewhere it could be another release."""
    note = path.with_name("release.json")
    if not (path.exists() and note.exists()):
        return None
    record = files.read_json(note)
    if record != {"run": run, "moments_sha256": files.sha256_file(path)}:
        return None
    return PrivateMoments.load(path, plan)


def _save_moments(found: PrivateMoments, path: Path, run: str) -> None:
    temporary = path.with_name(".tmp-moments.npz")
    found.save(temporary)
    note = {"run": run, "moments_sha256": files.sha256_file(temporary)}
    files.write_atomically(path.with_name("release.json"), json.dumps(note) + "\n")
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    files.fsync_directory(path.parent)


def _described(experiment: Experiment) -> str:
    """All that the stages follow from, but the noise."""
    return json.dumps(jsonable(to_mapping(experiment.config)), sort_keys=True)


def _require_same(path: Path, record: Any, expected: str) -> None:
    found = record.get("config") if isinstance(record, dict) else None
    if found != expected:
        raise InputError(
            f"{path}: is of config {found}, expected {expected}: the config is not the one this "
            "run began with"
        )
