"""Audits published texts: do they repeat training clients more than held-out ones?

`text.metrics.leakage` says how that is tested. What is written reads clients' own texts without
noise, so it goes to a private folder:

    private/leakage.json, .html     counts, and no text
"""

from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.build import read_clients, split_clients
from jaxpfl.experiments.records.lines import where_begun
from jaxpfl.experiments.registry import load_run
from jaxpfl.experiments.report.leakage import NOT_PUBLIC, write_leakage
from jaxpfl.experiments.report.page import page_lines
from jaxpfl.experiments.systems import CORPUS
from jaxpfl.text.columns import texts_of
from jaxpfl.text.cut import MESSAGES, Cut
from jaxpfl.text.metrics.leakage import leakage


def audit_texts(
    texts: str | Path,
    training: str | Path | Population | None = None,
    held_out: str | Path | Population | None = None,
    *,
    out: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Compares what published texts have in common with training and with held-out clients.

    Args:
      texts: a source of public texts, see `jaxpfl.data.open`, or the directory of a finished run.
      training, held_out: sources of clients, dealt to the two sides at random; of a run those of
        its own parts `train` and `test`, unless they are given.
      out: the folder of what is written; None: that of the run, or nothing is written.

    Returns:
      what `leakage` returns, with "found", the verdict in a sentence, and "text".

    Raises:
      InputError: a source cannot be read, or a side has no texts.
    """
    directory, dealt, rule = Path(files.user_path(texts)), False, MESSAGES
    if (directory / CORPUS).is_file():
        config = load_run(directory)
        # Synthetic text has the rule in a section.
        rule = Cut.parse(getattr(config, "corpus", config).cut)
        if training is None or held_out is None:
            data = config.data
            with where_begun(directory):
                parts = split_clients(read_clients(data), data)
            if held_out is None and not parts.get("test"):
                raise InputError(f"{texts}: has no test clients of its own: name --held-out")
            dealt = training is None and held_out is None
            training, held_out = training or parts["train"], held_out or parts["test"]
        out, texts = out or directory, directory / CORPUS
    if training is None or held_out is None:
        raise InputError(
            f"{texts}: is no run that wrote a corpus: name --training and --held-out, the clients "
            "of whom these texts were made, and others"
        )
    sides = open_population(training), open_population(held_out)
    published = {"these texts": list(texts_of(open_population(texts, public=True)))}
    names = f"training clients of {sides[0].name}", f"held-out clients of {sides[1].name}"
    result = leakage(published, *map(rule.joined, sides), seed=seed)
    folder = None if out is None else files.user_path(out)
    record, page = write_leakage(
        folder, str(texts), names, result, NOT_PUBLIC, cut=rule, dealt=dealt
    )
    return {**record, "text": "\n".join([*page_lines(page), record["found"]])}
