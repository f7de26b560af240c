"""`jaxpfl.run`: from an algorithm and its clients to a finished run directory."""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from jaxpfl import checks, compilation_cache, files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.columns import warn_of_numbers
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.engine.evaluate import Evaluator
from jaxpfl.experiments.engine.rounds import Loop
from jaxpfl.experiments.engine.run_directory import Run, first_attempt
from jaxpfl.experiments.engine.setting import OnRound, Result, Setting, Tracking, stamp_of
from jaxpfl.experiments.records.cautions import OURS, of_table
from jaxpfl.experiments.records.lines import FROM_PYTHON, read_lines, record_attempt
from jaxpfl.experiments.report.run_page import page_of_run
from jaxpfl.federated.hosts import processes
from jaxpfl.federated.release.query import Query
from jaxpfl.privacy.certificate import NAME as CERTIFICATE
from jaxpfl.privacy.certificate import certify, with_weights
from jaxpfl.privacy.keys import ReproducibleSeed
from jaxpfl.privacy.ledger import Budget

MODEL = "model"
"""The folder of the final model, in the directory of a run from Python."""


def run(
    algorithm: Algorithm,
    clients: Population,
    *,
    ledger: str | Path,
    out: str | Path,
    seed: int | ReproducibleSeed = 0,
    evaluation: Evaluator | None = None,
    budget: Budget | None = None,
    every: int = 10,
    resume: bool = False,
    on_round: OnRound | Sequence[OnRound] = (),
) -> Result:
    """Runs all rounds of `algorithm` on `clients` and returns the result.

    Args:
      algorithm: e.g. from `algorithms.fed_avg`.
      clients: the private clients, as many as the plan was made for. Text must be encoded by
        `Vocabulary.encode`, with a vocabulary of public text.
      ledger: file that is charged before every release; created if absent.
      out: run directory, for `report.html`, `metrics.jsonl`, checkpoints and `private/`.
      seed: of the initial state. Noise, cohorts and shuffles do not depend on it, unless it is a
        `jaxpfl.privacy.ReproducibleSeed`: for tests only, NOT private.
      evaluation: scores parameters on public data, `jaxpfl.Evaluator(model,
        jaxpfl.DeclaredPublic(test, "test clients"))`; None evaluates nothing.
      budget: hard limit of the whole ledger.
      every: rounds between two evaluations, and between two checkpoints.
      resume: continues the run in `out`, which must have begun with the same arguments.
      on_round: one function or several, each called after each round, and before the first, with
        what is public, a `jaxpfl.Round`. It may return "stop", which makes that round the last, or
        "keep", which makes its parameters those of the result; `jaxpfl.KeepBest` does both.

    Several processes that `jax.distributed` joined share a run if all call this with the same
    arguments: process 0 alone reads and writes `ledger` and `out`, and all return its result.

    Raises:
      InputError: an argument is of another kind, the data does not fit the plan or the model, more
        than half of the evaluation data is the clients' own (less is left out, and the name of the
        evaluation says so), or `out` holds another run.
      BudgetExhausted: the next round does not fit the budget; `out` holds the rounds before it.
      Interrupted: SIGINT, SIGTERM or SIGHUP was received; the run can be resumed.
    """
    checks.instance("algorithm", algorithm, Algorithm, "one of jaxpfl.algorithms")
    checks.instance("name", algorithm.name, str, "a text")
    checks.instance("queries", algorithm.queries, tuple, "a tuple of jaxpfl.Query")
    for query in algorithm.queries:
        checks.instance("queries", query, Query, "a tuple of jaxpfl.Query")
    checks.arguments(f"init of {algorithm.name!r}", algorithm.init, "(key)")
    checks.arguments(f"step of {algorithm.name!r}", algorithm.step, "(state, release, round)")
    functions: Any = tuple(on_round) if isinstance(on_round, list | tuple) else (on_round,)
    for function in functions:
        checks.arguments("on_round", function, "(round)")
    checks.instance("ledger", ledger, (str, Path), "the path of a file")
    checks.instance("out", out, (str, Path), "the path of a directory")
    ledger, directory = map(files.user_path, (ledger, out))
    checks.instance("clients", clients, Population, "a Population, see jaxpfl.data.from_clients")
    checks.positive_int("every", every)
    checks.non_negative_int("seed", seed)
    if evaluation is not None:
        hint = "jaxpfl.Evaluator(model, jaxpfl.DeclaredPublic(clients))"
        checks.instance("evaluation", evaluation, Evaluator, hint)
    if budget is not None:
        checks.instance("budget", budget, Budget, "jaxpfl.Budget(epsilon, delta)")
    read = {name for query in algorithm.queries for name in query.columns or ()}
    if "tokens" in read and "tokens" not in clients.columns and "text" in clients.columns:
        # Only the user can say which vocabulary is public.
        call = "jaxpfl.text.Vocabulary.from_public(SOURCE, size).encode(clients)"
        how = f"encode them by a vocabulary of PUBLIC text, {call}"
        raise InputError(f"the clients hold text and the model reads tokens: {how}")
    every_column = any(query.columns is None for query in algorithm.queries)
    numbers = clients.numeric().items()
    warn_of_numbers({name: column for name, column in numbers if every_column or name in read})
    reproducible = isinstance(seed, ReproducibleSeed)
    with compilation_cache.enabled(), processes.shared():
        sentences = None
        if evaluation is not None:
            private, name = PrivateContent(clients), evaluation.name
            evaluation = evaluation.on(private.refuse_clients(evaluation.population, name))
            if evaluation.vocabulary is not None:
                from jaxpfl.text.generation.language_model import sentences_of

                sentences = sentences_of(evaluation.model, evaluation.vocabulary, seed=seed)
        tracking = Tracking(evaluation, every, sentences, every, on_round=functions)
        held = files.exclusive(directory) if resume else first_attempt(directory, [ledger])
        with processes.led(held):
            setting = Setting({"every": every}, int(seed), reproducible)
            run = Run(
                directory, algorithm, clients, setting, ledger=ledger, budget=budget, resume=resume
            )
            loop = Loop(run, tracking)

            def begin() -> None:
                if evaluation is not None and evaluation.vocabulary is not None:
                    evaluation.vocabulary.save(directory / "vocabulary.json")
                record_attempt(directory, FROM_PYTHON)

            def end() -> tuple[Sequence[Any], Sequence[str]]:
                stated = _with_baselines(algorithm, evaluation, result) if evaluation else result
                plans = [query.plan for query in algorithm.queries]
                terms = {"statement": result.privacy, "ledgers": [ledger]}
                stamp = stamp_of(plans, reproducible=reproducible)
                certify(directory, algorithm.name, plans, stamp=stamp, **terms)
                _save_model(directory, algorithm, evaluation, result)
                return stated.table, stated.cautions

            processes.decide("the attempt", begin)
            with processes.led(page_of_run(directory)):
                result = loop.carry_out()
                table, cautions = processes.decide("the table", end)
        return replace(result, table=tuple(table), cautions=tuple(cautions))


def _save_model(
    directory: Path, algorithm: Algorithm, evaluation: Evaluator | None, result: Result
) -> None:
    """Writes the model of a finished run, if it is finite, with a certificate, for `export`."""
    if algorithm.model is None:
        return
    # Loaded here, because no round needs them.
    from jaxpfl.algorithms.ifca import Clusters
    from jaxpfl.trained import Trained

    words = None if evaluation is None else evaluation.vocabulary
    try:
        if isinstance(model := algorithm.model, Clusters):
            for k in range(model.clusters):
                own = jax.tree.map(lambda leaf, k=k: leaf[k], result.params)
                Trained(model.model, own, words).save(directory / MODEL / f"cluster_{k + 1}")
        else:
            Trained(model, result.params, words).save(directory / MODEL)
        with_weights(directory / CERTIFICATE, directory / MODEL)
    except Exception as error:  # of a model of one's own; the run is finished, and was charged
        shutil.rmtree(directory / MODEL, ignore_errors=True)
        if not isinstance(error, InputError):
            what = f"{type(error).__name__}: {error}"
            warnings.warn(f"the model cannot be exported later ({what})", stacklevel=2)


def _with_baselines(algorithm: Algorithm, evaluator: Evaluator, result: Result) -> Result:
    """The result with a table: the model before its rounds, and word frequencies, scored alike."""
    records = read_lines(result.out / "metrics.jsonl")
    scored = [record for record in records if record.get("evaluation")]
    rows: list[dict[str, Any]] = []
    if scored and scored[0]["round"] == 0:
        rows.append({"model": algorithm.begins_as, "private": True, **scored[0]["evaluation"]})
    vocabulary, tokens = evaluator.vocabulary, evaluator.columns.get("tokens")
    if vocabulary is not None and tokens is not None:
        from jaxpfl.text.metrics.baselines import scored_counts
        from jaxpfl.text.tokenisers.vocabulary import EOS

        if vocabulary.counts[EOS]:
            row = {"model": "unigram", "private": True}
            row["frequencies"] = f"{vocabulary.source} (declared public)"
            rows.append({**row, **asdict(scored_counts(vocabulary.counts, tokens))})
    if not rows:
        return result
    path = result.out / "result.json"
    record = files.read_record(path, {"private": bool})
    ours = result.metrics.get("evaluation") or {}
    rows.append({"model": OURS, "private": record["private"], **ours})
    # A classifier has a perplexity, too, which nobody asks for.
    language = tokens is not None and "perplexity" in ours
    record |= {"tested_on": evaluator.name, "table": rows, "language": language}
    files.write_json(path, record)
    worse = of_table(rows, "perplexity" if language else "loss", evaluator.name)
    return replace(result, table=tuple(rows), cautions=(*worse, *result.cautions))
