"""`jaxpfl synthesize`: from a user's own table to a chosen public corpus, by one release."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import yaml

from jaxpfl import checks, files
from jaxpfl.data.open import corpora_in
from jaxpfl.data.open import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.choose_corpus import named
from jaxpfl.experiments.init import usual_delta
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.models.checkpoints import hub
from jaxpfl.printable import template

_PLAIN = {"texts": 1_000, "judge": None, "cut": "messages"}


def config_of(
    clients: str,
    public: Sequence[str],
    *,
    epsilon: float = 4.0,
    delta: float | None = None,
    embedder: str | Sequence[str] | None = None,
    writer: str | None = None,
    ledger: str | Path | None = None,
    labels: tuple[str, Sequence[str]] | None = None,
    **plain: Any,
) -> str:
    """A config, as YAML with comments; arguments as of `synthesize`, also `texts`, `judge`, `cut`.

    Where no delta is given, all of the table is read, to count its clients.
    """
    if unknown := plain.keys() - _PLAIN.keys():
        raise TypeError(f"synthesize has no argument {min(unknown)!r}")
    sources = [source for given in public for source in corpora_in(given)]
    number = len(open_population(clients)) if delta is None else None
    if number == 0:
        raise InputError(f"{clients}: has no clients")
    config = template(__package__ or "", "synthesize.yaml.jinja").render(
        # A string of JSON is one of YAML, too.
        clients=json.dumps(clients, ensure_ascii=False),
        number=number,
        corpora=json.dumps(named(sources), ensure_ascii=False, indent=2),
        epsilon=epsilon,
        delta=delta if number is None else usual_delta(number),
        ledger=json.dumps(None if ledger is None else str(ledger)),
        embedder=json.dumps(embedder or ("hashed" if hub.at_hand("minilm") is None else "minilm")),
        **{name: json.dumps(value) for name, value in (_PLAIN | plain).items()},
        writer=json.dumps(None if writer is None else {"generator": _generator(writer)}),
        labels=labels and json.dumps({"column": labels[0], "names": list(labels[1])}),
    )
    # Refuses a config that `jaxpfl run` would refuse.
    from_mapping(yaml.safe_load(config), "the config for the table")
    return config


def _generator(writer: str) -> dict[str, Any]:
    """The section of a model that writes: a published one, or ADDRESS#MODEL."""
    api, _, model = writer.partition("#")
    if "://" not in api:
        return {"path": writer, "chat": False}
    if not model:
        raise InputError(
            "writer must name the server's model after its address, as in "
            "http://127.0.0.1:8000/v1#MODEL, found no #"
        )
    return {"api": api, "model": model}


def synthesize(
    clients: str | Population,
    public: str | Sequence[str],
    *,
    epsilon: float,
    out: str | Path,
    progress: bool = True,
    **settings: Any,
) -> carry_out.Outcome:
    """Chooses public texts that are together like the clients', by one release of these.

    The new directory `out` gets corpus.jsonl, card.md, certificate.json, ledger.jsonl and
    report.html. `jaxpfl resume` goes on with an interrupted run, at no further cost.

    Args:
      clients: a source, or a population, as `data.from_dataframe` makes it, which is saved in
        `out`/private. Their number is public.
      public: sources, each SOURCE or NAME=SOURCE, or folders, each file of which is one.
      settings: these arguments of `config_of`:
      delta: None: the largest power of ten that is at most 0.1 / the number of clients.
      texts: how many are chosen.
      embedder: one or several, which share the release. None: minilm where its weights are at
        hand, else hashed.
      judge: a further one, with a tenth of the release, which decides nothing: how near the texts
        are by it is reported.
      cut: the rule by which the texts of clients and corpora are cut, see `text.cut`.
      writer: the language model that continues chosen texts, after which all are chosen anew:
        smollm2, a folder, a name on the Hugging Face hub, or ADDRESS#MODEL of an OpenAI-compatible
        server, whose owner sees these public texts. None: no text is written.
      ledger: the file to charge; None: `out`/ledger.jsonl.
      labels: a column of the clients, which a source must name (`?columns=`), and a PUBLIC list of
        its values: texts are chosen for each, by the one release. None: for all together.

    Raises:
      InputError: the config cannot be carried out; a public source holds the clients' data; there
        are too few public texts; or noise hides all of the clients' texts.
      BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
    """
    directory, saved = files.user_path(out), None
    sources = [public] if isinstance(public, str) else public
    if isinstance(clients, Population):
        files.make_directory(directory)
        saved = files.private_directory(directory / "private") / "clients"
        clients.save(saved)
    checks.instance("clients", clients, (str, Population), "a source or a Population")
    try:
        source = str(clients) if saved is None else str(saved)
        text = config_of(source, sources, epsilon=epsilon, **settings)
        config = from_mapping(yaml.safe_load(text), "synthesize")
        # On other devices, `jaxpfl resume` would make another release.
        run = replace(config.run, devices=jax.device_count())
        return carry_out.run(replace(config, run=run), directory, progress=progress)
    except InputError:
        if saved is not None and not (directory / "config.yaml").exists():
            shutil.rmtree(saved)
        raise
