"""The stages before the rounds: FreD's choice of a public corpus, and prefinetuning on it.

    runs/FreD/                      the release of the moments of the clients' data
    artifacts/fred_scores/          the distances of the candidates from these moments
    artifacts/prefinetuned_NAME/    the parameters that were prefinetuned on the candidate NAME

All of these are public, but for FreD's private/. Each is stored before the next one is made, and a
resumed run reads it. Everything that is computed from the release, such as the choice of the
winner, is post-processing and costs no privacy.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxpfl.algorithms.fred import FredPlan, fred, moments, public_moments, score, used_examples
from jaxpfl.algorithms.gaussian_moments import Moments, mixture
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.central.prefinetune import prefinetune
from jaxpfl.experiments.central.training import Fitted
from jaxpfl.experiments.config.sections import PrivacyConfig
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts, tree_arrays, tree_of
from jaxpfl.experiments.systems.federated_training.candidates import ALONE, Candidates
from jaxpfl.experiments.systems.federated_training.config import FredConfig
from jaxpfl.experiments.systems.federated_training.study import Prepared
from jaxpfl.experiments.systems.workspace import Workspace, params_digest
from jaxpfl.federated.hosts.shared_rounds import Asked
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from jaxpfl.progress import Progress
from jaxpfl.text.embed import Embedder, embed, embedder

SCORES = "fred_scores"
FRED = "FreD"
"""The run of FreD's release, and its stage for several processes."""


@dataclass(frozen=True)
class Stages:
    """The results of the stages before the rounds; public.

    Attributes:
      scores: candidate, distance and corrected distance of all candidates, nearest first; None
        without FreD.
      fred: record of FreD's release, such as its plan and statement; None without FreD.
      prefinetuned: the results by candidate, the winner first; others only if the config asks.
    """

    winner: str
    scores: list[dict[str, Any]] | None
    fred: dict[str, Any] | None
    prefinetuned: dict[str, Fitted] = field(repr=False)

    @classmethod
    def of(cls, study: Prepared, workspace: Workspace) -> "Stages":
        """Does what is left of the stages in the workspace's directory; refuses altered ones."""
        run, settings = workspace.config_id, study.config.prefinetune
        assert settings is not None
        if study.published_as is not None:
            run += f" from {study.published_as['sha256'][:12]}"
        artifacts = workspace.artifacts(run)
        released, scores, names = None, None, [ALONE]
        if study.fred is not None:
            released = _fred(study, workspace, artifacts, study.fred)
            scores = released.pop("scores")
            names = [entry["candidate"] for entry in scores]
        start = jax.device_get(initial_state(study.algorithm, study.config.run.seed).params)
        done = {}
        for name in names if settings.other_candidates else names[:1]:
            compute = partial(_prefinetune, study, name, start, workspace.progress)
            found = artifacts.load_or_compute(f"prefinetuned_{name}", compute, made_from=name)
            done[name] = Fitted(tree_of(found.arrays, start, name), dict(found.record))
        return cls(names[0], scores, released, done)


def _fred(
    study: Prepared, workspace: Workspace, artifacts: Artifacts, plan: FredPlan
) -> dict[str, Any]:
    """The scores of all candidates, and the plan and statement of the release."""
    config, candidates = study.config, study.candidates
    assert config.fred is not None and candidates is not None
    settings, function, corpora = config.fred, embedder(config.fred.embedder), {}
    begun = workspace.directory / "runs" / FRED / "run.json"
    if (artifacts.folder / SCORES).exists():
        if not begun.exists():
            raise CorruptFile(
                f"{begun}: is missing, but its release is scored in {artifacts.folder / SCORES}: "
                "restore the folder; nothing was charged"
            )
    else:
        # Candidates are read before the charge, so that an unreadable one costs no privacy.
        corpora = _public_moments(settings, candidates, function, config.run.seed)
    ledger = study.fred_ledger(workspace.directory)
    result = workspace.train(
        fred(plan, units=study.fred_units, dimension=function.dimension),
        study.clients,
        name=FRED,
        # The budget is for clients; a ledger for examples has this release alone.
        privacy=config.privacy if plan.unit == "client" else PrivacyConfig(private=False),
        ledger=ledger,
        ask=lambda: asked_by_fred(study, workspace, function)[1],
    )
    released = moments(plan, result.state)
    statement = plan.statement()
    if plan.private:
        # A release that was made again is charged again.
        own = [charge for charge in Ledger.read(ledger).charges if charge.run == result.run]
        statement = plan.claim + guarantee_of(own, plan.delta, plan.unit).statement()
    made_from = {"run": result.run, "moments_sha256": params_digest(released.arrays())}

    def scored() -> Artifact:
        record = {
            **made_from,
            "private": plan.private and not config.run.reproducible_noise,
            "statement": statement,
            "plan": plan.to_dict(),
            "embedder": function.name,
            "noise": released.noise._asdict(),
            "scores": [candidate.row() for candidate in score(released, corpora)],
        }
        return Artifact(record)

    return dict(artifacts.load_or_compute(SCORES, scored, made_from).record)


def asked_by_fred(study: Prepared, workspace: Workspace, function: Embedder | None = None) -> Asked:
    """FreD's queries, and the clients with the embeddings of its embedder, which may be loaded."""
    config, plan = study.config, study.fred
    assert config.fred is not None and plan is not None
    function = function or embedder(config.fred.embedder)
    algorithm = fred(plan, units=study.fred_units, dimension=function.dimension)
    used = used_examples(study.clients, plan, config.data.split_seed)
    return algorithm.queries, embed(used, function, progress=workspace.progress)


def _prefinetune(study: Prepared, name: str, start: Any, progress: bool) -> Artifact:
    config, candidates, settings = study.config, study.candidates, study.config.prefinetune
    assert settings is not None and candidates is not None
    corpus = candidates.corpus(
        name,
        settings.examples,
        settings.valid,
        seed=config.run.seed,
        columns=tuple(study.model.columns or ()),
        encode=study.encode,
    )
    # An epoch of each trial, and the others of the chosen one.
    total, seed = settings.trials + settings.epochs - 1, config.run.seed
    with Progress(f"prefinetune on {name}", total=total, progress=progress, step="epoch") as bar:

        def shown(epoch: int, loss: float) -> None:
            bar.update(epoch, {"public loss": f"{loss:.4g}"})

        found = prefinetune(study.model, start, corpus, settings, seed=seed, callback=shown)
    shares = candidates.shares[name]
    record = {
        "candidate": name,
        "shares": dict(shares),
        "sources": {source: candidates.sources[source] for source in shares},
        "params_sha256": params_digest(found.params),
        **found.record,
    }
    return Artifact(record, tree_arrays(found.params))


def _public_moments(
    config: FredConfig, candidates: Candidates, function: Embedder, seed: int
) -> dict[str, Moments]:
    """The moments of all candidates; a mixture's are computed from those of its sources."""
    of_source = {}
    for source in candidates.sources:
        sample = candidates.sample(source, function.column, config.max_candidate_examples, seed)
        of_source[source] = public_moments(sample, function, config.clip_norm, progress=False)
    found = {}
    for name, shares in candidates.shares.items():
        parts = [of_source[source] for source in shares]
        found[name] = mixture(parts, list(shares.values())) if len(parts) > 1 else parts[0]
    return found
