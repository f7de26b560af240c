"""`jaxpfl.run`: from an algorithm and its clients to a finished run directory."""

import dataclasses
from pathlib import Path

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import BudgetExhausted
from jaxpfl.experiments import files
from jaxpfl.experiments.evaluate import DeclaredPublic, Evaluator
from jaxpfl.experiments.loop import Interrupted, Loop, Result, Tracking
from jaxpfl.privacy.ledger import Budget


def run(
    algorithm: Algorithm,
    clients: Population,
    *,
    ledger: str | Path,
    out: str | Path,
    seed: int = 0,
    evaluation: DeclaredPublic | None = None,
    budget: Budget | None = None,
    evaluate_every: int = 10,
    checkpoint_every: int = 10,
    reproducible_noise: bool = False,
    resume: bool = False,
) -> Result:
    """Runs all rounds of `algorithm.plan` on `clients` and returns what came out.

    Where the clients hold a "text" column and the model reads tokens, the text is encoded with a
    vocabulary made from the docstrings of public packages, and `evaluation`, if None, is that
    public corpus.

    Args:
      algorithm: e.g. of `algorithms.fed_avg`.
      clients: the private clients; as many as the plan was made for.
      ledger: file charged before every round; made if absent.
      out: run directory; `report.html`, `metrics.jsonl`, checkpoints and `private/` go there.
      seed: of the model's start. Noise, cohorts and shuffles never follow it.
      evaluation: held-out clients, wrapped in `DeclaredPublic`.
      budget: hard limit of the whole ledger.
      evaluate_every, checkpoint_every: in rounds.
      reproducible_noise: draws the noise from `seed`: for tests, NOT private.
      resume: continues the run in `out`; the arguments must be those it began with.

    Raises:
      InputError: the data does not fit the plan or the model, or `out` holds another run.
      BudgetExhausted: the next round does not fit the budget; the rounds before are in `out`.
      Interrupted: SIGINT or SIGTERM came; the run can be resumed.
    """
    from jaxpfl.experiments.report import write_report
    from jaxpfl.experiments.texts import encode_with_public_vocabulary, sentences_of

    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    with files.exclusive(directory):
        tracking = Tracking(evaluate_every=evaluate_every, checkpoint_every=checkpoint_every)
        size = getattr(algorithm.model, "vocab_size", None)
        if size is not None and "tokens" not in clients.columns and "text" in clients.columns:
            clients, evaluation, vocabulary = encode_with_public_vocabulary(
                clients, evaluation, size
            )
            vocabulary.save(directory / "vocabulary.json")
            sentences = sentences_of(algorithm.model, vocabulary, seed=seed)
            tracking = dataclasses.replace(tracking, sentences=sentences)
        if evaluation is not None:
            evaluator = Evaluator(algorithm.model, evaluation)
            tracking = dataclasses.replace(tracking, evaluate=evaluator)
        loop = Loop(
            algorithm,
            clients,
            directory=directory,
            ledger=ledger,
            budget=budget,
            seed=seed,
            reproducible_noise=reproducible_noise,
            tracking=tracking,
            resume=resume,
            config={"evaluate_every": evaluate_every},
        )
        try:
            result = loop.run()
        except (BudgetExhausted, Interrupted):
            write_report(directory)
            raise
        write_report(directory)
        return result
