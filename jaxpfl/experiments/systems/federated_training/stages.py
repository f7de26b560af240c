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
from jaxpfl.experiments.systems.federated_training.candidates import ALONE, Candidates
from jaxpfl.experiments.systems.federated_training.config import FredConfig
from jaxpfl.experiments.systems.federated_training.study import Prepared
from jaxpfl.experiments.systems.workspace import (
    Workspace,
    budget_of,
    ledger_path,
    params_digest,
)
from jaxpfl.privacy.ledger import Ledger
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

    @classmethod
    def of(cls, study: Prepared, workspace: Workspace) -> "Stages":
        """Does what is left of the stages in the workspace's directory.

        Raises:
          InputError: a candidate cannot be read or used, or the stored stages are of another
            config.
          BudgetExhausted: FreD does not fit the budget; nothing was released.
          CorruptFile: a file of a finished stage was altered, or the ledger was cut off.
        """
        settings, work = study.config.prefinetune, _Work(study, workspace)
        assert settings is not None
        fred, scores, names = None, None, [ALONE]
        if study.fred is not None:
            fred = dict(work.fred(study.fred))
            scores = fred.pop("scores")
            names = [entry["candidate"] for entry in scores]
        wanted = names if settings.other_candidates else names[:1]
        start = jax.device_get(initial_state(study.algorithm, study.config.run.seed).params)
        done = {name: work.prefinetuned(name, start) for name in wanted}
        return cls(names[0], scores, fred, done)


class _Work:
    """The stages in their directory: each is found there, or is carried out and stored."""

    def __init__(self, study: Prepared, workspace: Workspace) -> None:
        assert study.candidates is not None
        self.study, self.config, self.candidates = study, study.config, study.candidates
        self.workspace = workspace
        # FreD's release is stored under the name of its secret. The other artifacts are not: the
        # secret is deleted once the scores are stored.
        self.run = workspace.config_id
        if study.published_as is not None:
            self.run += f" from {study.published_as['sha256'][:12]}"

    def fred(self, plan: FredPlan) -> Mapping[str, Any]:
        """The scores of all candidates, and the plan and statement of the release."""
        privacy, directory = self.config.privacy, self.workspace.directory
        secret_path = directory / "private" / "fred_secret.json"
        budget, path = budget_of(privacy), ledger_path(privacy, directory)
        with Ledger(path, self.study.clients, budget=budget) as ledger:
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
        config, seed = self.config, self.workspace.reproducible_seed
        assert config.fred is not None
        secret = saved_secret(secret_path, reproducible_seed=seed, purpose="FreD")
        run = f"fred {run_id(secret)}"
        # Candidates are read before the charge, so that an unreadable one costs no privacy.
        function = embedder(config.fred.embedder)
        corpora = _public_moments(config.fred, self.candidates, function, config.run.seed)
        artifacts = self.workspace.artifacts(run, ledger)
        released = partial(self._released, plan, function, ledger, run, secret)
        stored = artifacts.load_or_compute(MOMENTS, released, made_from=self.run)
        found = PrivateMoments.of_arrays(stored.arrays, plan)
        record = {
            "run": run,
            "private": plan.private and seed is None,
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
        clients = self.study.clients
        algorithm = fred(plan, units=len(clients), dimension=function.dimension)
        # Embedding takes long, so a release that does not fit is refused before it.
        require_affordable(algorithm, ledger, run)
        used = used_examples(clients, plan, self.config.data.split_seed)
        embedded = embed(used, function, progress=self.workspace.progress)
        found = private_moments(embedded, plan, ledger=ledger, run=run, secret=secret)
        return Artifact(arrays=found.arrays())

    def prefinetuned(self, name: str, start: Any) -> Fitted:
        """The candidate's prefinetuned parameters, trained from the parameters `start`."""
        found = self.workspace.artifacts(self.run).load_or_compute(
            f"prefinetuned_{name}", partial(self._prefinetune, name, start), made_from=name
        )
        return Fitted(tree_of(found.arrays, start, name), dict(found.record))

    def _prefinetune(self, name: str, start: Any) -> Artifact:
        config, candidates, settings = self.config, self.candidates, self.config.prefinetune
        assert settings is not None
        corpus = candidates.corpus(
            name,
            settings.examples,
            settings.valid,
            seed=config.run.seed,
            columns=tuple(self.study.model.columns or ()),
            encoder=self.study.encoder,
            sequence_length=getattr(config.model, "sequence_length", 0),
        )
        with Progress(
            f"prefinetune on {name}",
            total=epochs_of(settings),
            progress=self.workspace.progress,
            step="epoch",
        ) as bar:
            found = prefinetune(
                self.study.model,
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
