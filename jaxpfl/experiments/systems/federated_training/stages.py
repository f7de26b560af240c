"""The stages before the rounds: FreD's choice of a public corpus, and prefinetuning on it.

    artifacts/fred_moments/         what FreD released
    artifacts/fred_scores/          the candidates' distances from it; public, like all here
    artifacts/prefinetuned_NAME/    the parameters of the candidate NAME

Each is stored whole before the next is made, and is found again by a resumed run. FreD's secret is
on the disk before its first use, and its charges before anything is released, so that a run
killed in between makes the SAME release again, at no further cost. What follows from the release,
the choice of the winner included, is post-processing and costs nothing.
"""

import hashlib
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
)
from jaxpfl.algorithms.gaussian_moments import Moments, mixture
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.central.prefinetune import epochs_of, prefinetune
from jaxpfl.experiments.central.training import Fitted
from jaxpfl.experiments.config.reader import to_yaml
from jaxpfl.experiments.config.sections import LanguageModelConfig
from jaxpfl.experiments.engine.artifacts import Artifact, Artifacts, tree_arrays, tree_of
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.experiments.engine.study_runs import params_digest
from jaxpfl.experiments.systems.base import Workspace
from jaxpfl.experiments.systems.federated_training.build import Experiment
from jaxpfl.experiments.systems.federated_training.candidates import ALONE, Candidates
from jaxpfl.experiments.systems.federated_training.config import FredConfig
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.privacy.secret import Secret
from jaxpfl.progress import Progress
from jaxpfl.text.embed import Embedder, embed, embedder

FOLDER = "artifacts"
MOMENTS = "fred_moments"
SCORES = "fred_scores"


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
    prefinetuned: dict[str, Fitted] = field(repr=False)


def carry_out(
    experiment: Experiment, workspace: Workspace, ledger: Path, budget: Budget | None
) -> Stages:
    """Does what is left of the stages in the workspace's directory.

    Args:
      ledger: which FreD is charged to.

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
        self.workspace, self.progress = workspace, workspace.progress
        digest = hashlib.sha256(to_yaml(self.config).encode()).hexdigest()[:12]
        # The secret, after which FreD's release is called, is gone when the scores are stored;
        # what is no release is therefore called after the config.
        self.described = f"{self.config.system} {digest}"

    def carry_out(self, ledger_path: Path, budget: Budget | None) -> Stages:
        settings = self.config.prefinetune
        assert settings is not None
        record, names = None, [ALONE]
        if self.experiment.fred is not None:
            record = self._fred(self.experiment.fred, ledger_path, budget)
            names = [entry["candidate"] for entry in record["scores"]]
        wanted = names if settings.other_candidates else names[:1]
        initial = initial_state(self.experiment.algorithm, self.config.run.seed)
        start = jax.device_get(initial.params)
        done = {name: self._prefinetuned(name, start) for name in wanted}
        return Stages(
            winner=names[0],
            scores=None if record is None else record["scores"],
            fred=None if record is None else {k: v for k, v in record.items() if k != "scores"},
            prefinetuned=done,
        )

    def _artifacts(self, run: str, ledger: Ledger | None = None) -> Artifacts:
        folder = self.workspace.directory / FOLDER
        return Artifacts(folder, run=run, ledger=ledger, private=not self.workspace.stamp)

    def _fred(self, plan: FredPlan, ledger_path: Path, budget: Budget | None) -> Mapping[str, Any]:
        """The scores of all candidates, and the plan and statement of the release."""
        folder = files.private_directory(self.workspace.directory / "private")
        secret_path = folder / "fred_secret.json"
        with Ledger(ledger_path, self.experiment.sources, budget=budget) as ledger:
            artifacts = self._artifacts(self.described, ledger)
            compute = partial(self._scores, plan, ledger, secret_path)
            record = artifacts.load_or_compute(SCORES, compute).record
            if artifacts.sha256(MOMENTS) != record["moments_sha256"]:
                raise CorruptFile(
                    f"{artifacts.folder / MOMENTS}: holds other moments than those that the scores "
                    f"in {artifacts.folder / SCORES} were computed from"
                )
        # It is needed until the scores are stored, and not afterwards.
        forget(secret_path)
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
        # Read before anything is charged: a candidate that cannot be read costs nothing.
        function = embedder(config.fred.embedder)
        corpora = _public_moments(config.fred, candidates, function, config.run.seed)
        artifacts = self._artifacts(run, ledger)
        stored = artifacts.load_or_compute(
            MOMENTS,
            partial(self._released, plan, function, ledger, run, secret),
            made_from=self.described,
        )
        found = PrivateMoments.of_arrays(stored.arrays, plan)
        record = {
            "run": run,
            "private": plan.private and not reproducible,
            "statement": plan.statement(),
            "plan": plan.to_dict(),
            "embedder": function.name,
            "noise": found.noise._asdict(),
            "moments_sha256": artifacts.sha256(MOMENTS),
            "scores": [
                {"candidate": each.name, "distance": each.distance, "corrected": each.corrected}
                for each in score(found, corpora)
            ],
        }
        return Artifact(record)

    def _released(
        self, plan: FredPlan, function: Embedder, ledger: Ledger, run: str, secret: Secret
    ) -> Artifact:
        """The moments of the clients' embeddings; charged and confirmed when this returns."""
        clients = self.experiment.sources
        algorithm = fred(plan, units=len(clients), dimension=function.dimension)
        # Embedding takes long: a release that does not fit is refused before it.
        require_affordable(algorithm, ledger, run)
        embedded = embed(clients, function, progress=self.progress)
        found = private_moments(embedded, plan, ledger=ledger, run=run, secret=secret)
        return Artifact(arrays=found.arrays())

    def _prefinetuned(self, name: str, start: Any) -> Fitted:
        """The candidate's prefinetuned parameters and how they came about.

        Args:
          start: the parameters that prefinetuning begins with.
        """
        found = self._artifacts(self.described).load_or_compute(
            f"prefinetuned_{name}", partial(self._prefinetune, name, start), made_from=name
        )
        return Fitted(tree_of(found.arrays, start, name), dict(found.record))

    def _prefinetune(self, name: str, start: Any) -> Artifact:
        config, candidates = self.config, self.experiment.candidates
        settings = config.prefinetune
        assert candidates is not None
        assert settings is not None
        language = config.model if isinstance(config.model, LanguageModelConfig) else None
        corpus = candidates.corpus(
            name,
            settings.examples,
            settings.valid,
            seed=config.run.seed,
            columns=("tokens",) if language is not None else ("image", "label"),
            vocabulary=self.experiment.vocabulary,
            sequence_length=0 if language is None else language.sequence_length,
        )
        with Progress(
            f"prefinetune on {name}",
            total=epochs_of(settings),
            progress=self.progress,
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
        shares = candidates.shares(name)
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
