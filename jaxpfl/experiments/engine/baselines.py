"""Baselines of a run's model: the model before its rounds, and word frequencies alone.

Both are scored on the very examples that the run is evaluated on, and neither reads the clients.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.experiments.engine.evaluate import Evaluator
from jaxpfl.experiments.engine.setting import Result
from jaxpfl.experiments.records.cautions import OURS, of_table
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.text.metrics.baselines import scored_counts
from jaxpfl.text.tokenisers.vocabulary import EOS


def with_baselines(algorithm: Algorithm, evaluator: Evaluator, result: Result) -> Result:
    """The result with the table of these models, which is written to `result.json`, too.

    The words of the unigram model are those that the evaluator's vocabulary was made of: the only
    public text that a caller of `jaxpfl.run` names besides the evaluation's. There is none without
    a vocabulary, or with one that does not know how many sentences it counts.
    """
    records = read_lines(result.out / "metrics.jsonl")
    scored = [record for record in records if record.get("evaluation")]
    rows: list[dict[str, Any]] = []
    if scored and scored[0]["round"] == 0:
        rows.append({"model": algorithm.begins_as, "private": True, **scored[0]["evaluation"]})
    vocabulary, tokens = evaluator.vocabulary, evaluator.columns.get("tokens")
    if vocabulary is not None and vocabulary.counts[EOS] and tokens is not None:
        unigram = dataclasses.asdict(scored_counts(vocabulary.counts, tokens))
        frequencies = f"{vocabulary.source} (declared public)"
        rows.append({"model": "unigram", "private": True, "frequencies": frequencies, **unigram})
    if not rows:
        return result
    path = Path(result.out) / "result.json"
    record = files.read_record(path, {"private": bool})
    ours = result.metrics.get("evaluation") or {}
    rows.append({"model": OURS, "private": record["private"], **ours})
    files.write_json(path, record | {"tested_on": evaluator.name, "table": rows})
    metric = "perplexity" if "perplexity" in ours else "loss"
    worse = of_table(rows, metric, evaluator.name)
    return dataclasses.replace(result, table=tuple(rows), cautions=(*worse, *result.cautions))
