"""The stages before the rounds: FreD's choice of a public corpus, and prefinetuning on it.

    artifacts/fred_moments/         the released moments of the clients' data
    artifacts/fred_scores/          the distances of the candidates from these moments
    artifacts/prefinetuned_NAME/    the parameters that were prefinetuned on the candidate NAME

All of these are public. Each is stored before the next one is made, and a resumed run reads it.
FreD's secret and its charges are on the disk before the release, so a run that was killed in
between makes the SAME release again, at no further cost. Everything that is computed from the
release, such as the choice of the winner, is post-processing and costs no privacy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpfl import files
from jaxpfl.algorithms.base import require_affordable
from jaxpfl.algorithms.fred import (
    FredPlan,
    PrivateMoments,
    fred,
    private_moments,
    public_moments,
    score,
    used_examples,
)
from jaxpfl.algorithms.gaussian_moments import Moments, mixture
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.central.prefinetune import epochs_of, prefinetune
from jaxpfl.experiments.central.training import Fitted
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.experiments.engine.run_directory import forget, run_id, saved_secret
from jaxpfl.experiments.records.artifacts import Artifact, tree_arrays, tree_of
from jaxpfl.experiments.systems import study_runs
from jaxpfl.experiments.systems.base import Workspace
from jaxpfl.experiments.systems.federated_training.build import Experiment
from jaxpfl.experiments.systems.federated_training.candidates import ALONE, Candidates
from jaxpfl.experiments.systems.federated_training.config import FredConfig
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.privacy.secret import RunSecret
from jaxpfl.progress import Progress
from jaxpfl.text.embed import Embedder, embed, embedder

MOMENTS = "fred_moments"
SCORES = "fred_scores"


@dataclass(frozen=True)
class Stages:
    """The results of the stages before the rounds; public.

    Attributes:
      winner: name of the corpus that the run starts from.
      scores: candidate, distance and corrected distance of all candidates, nearest first; None
        without FreD.
      fred: record of FreD's release, such as its plan and statement; None without FreD.
      prefinetuned: the results by candidate, the winner first; others only if the config asks.
    """

    winner: str
    scores: list[dict[str, Any]] | None
    fred: dict[str, Any] | None
    prefinetuned: dict[str, Fitted] = field(repr=False)


def carry_out(
    experiment: Experiment, workspace: Workspace, ledger: Path, budget: Budget | None
) -> Stages:
    """Does what is left of the stages in the workspace's directory.

    Args:
      ledger: the ledger that FreD is charged to.

    Raises:
      InputError: a candidate cannot be read or used, or the stored stages are of another config.
      BudgetExhausted: FreD does not fit the budget; nothing was released.
      CorruptFile: a file of a finished stage was altered, or the ledger was cut off.
    """
    return _Stages(experiment, workspace).carry_out(ledger, budget)


class _Stages:
    """The stages in their directory: each is found there, or is carried out and stored."""

    def __init__(self, experiment: Experiment, workspace: Workspace) -> None:
        self.experiment, self.config = experiment, experiment.config
        self.workspace = workspace
        # FreD's release is stored under the name of its secret. The other artifacts are not: the
        # secret is deleted once the scores are stored.
        self.run = study_runs.config_id(self.config)
        if experiment.published_as is not None:
            self.run += f" from {experiment.published_as['sha256'][:12]}"

    def carry_out(self, ledger_path: Path, budget: Budget | None) -> Stages:
        settings = self.config.prefinetune
        assert settings is not None
        fred, scores, names = None, None, [ALONE]
        if self.experiment.fred is not None:
            fred = dict(self._fred(self.experiment.fred, ledger_path, budget))
            scores = fred.pop("scores")
            names = [entry["candidate"] for entry in scores]
        wanted = names if settings.other_candidates else names[:1]
        initial = initial_state(self.experiment.algorithm, self.config.run.seed)
        start = jax.device_get(initial.params)
        done = {name: self._prefinetuned(name, start) for name in wanted}
        return Stages(names[0], scores, fred, done)

    def _fred(self, plan: FredPlan, ledger_path: Path, budget: Budget | None) -> Mapping[str, Any]:
        """The scores of all candidates, and the plan and statement of the release."""
        folder = files.private_directory(self.workspace.directory / "private")
        secret_path = folder / "fred_secret.json"
        with Ledger(ledger_path, self.experiment.sources, budget=budget) as ledger:
            artifacts = self.workspace.artifacts(self.run, ledger)
            compute = partial(self._scores, plan, ledger, secret_path)
            record = artifacts.load_or_compute(SCORES, compute).record
            if artifacts.sha256(MOMENTS) != record["moments_sha256"]:
                raise CorruptFile(
                    f"{artifacts.folder / MOMENTS}: holds other moments than those that the scores "
                    f"in {artifacts.folder / SCORES} were computed from"
                )
            forget(secret_path, ledger)
        return record

    def _scores(self, plan: FredPlan, ledger: Ledger, secret_path: Path) -> Artifact:
        """Releases the clients' moments, unless they are stored, and scores the candidates."""
        config, candidates = self.config, self.experiment.candidates
        assert config.fred is not None
        assert candidates is not None
        reproducible = config.run.reproducible_noise
        secret = saved_secret(
            secret_path,
            reproducible_seed=config.run.seed if reproducible else None,
            purpose="FreD",
        )
        run = f"fred {run_id(secret)}"
        # Candidates are read before the charge, so that an unreadable one costs no privacy.
        function = embedder(config.fred.embedder)
        corpora = _public_moments(config.fred, candidates, function, config.run.seed)
        artifacts = self.workspace.artifacts(run, ledger)
        released = partial(self._released, plan, function, ledger, run, secret)
        stored = artifacts.load_or_compute(MOMENTS, released, made_from=self.run)
        found = PrivateMoments.of_arrays(stored.arrays, plan)
        record = {
            "run": run,
            "private": plan.private and not reproducible,
            "statement": plan.statement(),
            "plan": plan.to_dict(),
            "embedder": function.name,
            "noise": found.noise._asdict(),
            "moments_sha256": artifacts.sha256(MOMENTS),
            "scores": [each.row() for each in score(found, corpora)],
        }
        return Artifact(record)

    def _released(
        self, plan: FredPlan, function: Embedder, ledger: Ledger, run: str, secret: RunSecret
    ) -> Artifact:
        """The moments of the clients' embeddings; charged and confirmed when this returns."""
        clients = self.experiment.sources
        algorithm = fred(plan, units=len(clients), dimension=function.dimension)
        # Embedding takes long, so a release that does not fit is refused before it.
        require_affordable(algorithm, ledger, run)
        used = used_examples(clients, plan, self.config.data.split_seed)
        embedded = embed(used, function, progress=self.workspace.progress)
        found = private_moments(embedded, plan, ledger=ledger, run=run, secret=secret)
        return Artifact(arrays=found.arrays())

    def _prefinetuned(self, name: str, start: Any) -> Fitted:
        """The candidate's prefinetuned parameters, trained from the parameters `start`."""
        found = self.workspace.artifacts(self.run).load_or_compute(
            f"prefinetuned_{name}", partial(self._prefinetune, name, start), made_from=name
        )
        return Fitted(tree_of(found.arrays, start, name), dict(found.record))

    def _prefinetune(self, name: str, start: Any) -> Artifact:
        config, candidates = self.config, self.experiment.candidates
        settings = config.prefinetune
        assert candidates is not None
        assert settings is not None
        corpus = candidates.corpus(
            name,
            settings.examples,
            settings.valid,
            seed=config.run.seed,
            columns=tuple(self.experiment.model.columns or ()),
            encoder=self.experiment.encoder,
            sequence_length=getattr(config.model, "sequence_length", 0),
        )
        with Progress(
            f"prefinetune on {name}",
            total=epochs_of(settings),
            progress=self.workspace.progress,
            step="epoch",
        ) as bar:
            found = prefinetune(
                self.experiment.model,
                start,
                corpus,
                settings,
                seed=config.run.seed,
                callback=lambda epoch, loss: bar.update(epoch, {"public loss": f"{loss:.4g}"}),
            )
        shares = candidates.shares[name]
        record = {
            "candidate": name,
            "shares": dict(shares),
            "sources": {source: candidates.sources[source] for source in shares},
            "params_sha256": study_runs.params_digest(found.params),
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
