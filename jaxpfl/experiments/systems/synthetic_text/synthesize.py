"""Exports the synthetic corpus of a finished study, with a card of what it cost the clients.

    FILE                one object {"text": ...} in each line
    FILE.card.json      epsilon and its terms, the head of the ledger, the models that wrote the
                        texts

If more texts are wanted than the run wrote, its tuned generator writes them. That is
post-processing of the releases and costs no further privacy: no client's data is read here.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.checks import positive_int
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.releases import FOLDER, missing
from jaxpfl.experiments.records.artifacts import Artifacts, Manifest, verified
from jaxpfl.experiments.systems.synthetic_text.config import (
    SCORING,
    WRITING,
    SyntheticTextConfig,
)
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import (
    CorpusWriter,
    json_lines,
    question,
)
from jaxpfl.experiments.systems.workspace import ledger_path
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.generation.language_model import LanguageModel

# How often the generator is asked for more texts, since some may be empty.
_MOST_PARTS = 50


def synthesize(
    directory: Path,
    config: SyntheticTextConfig,
    record: Mapping[str, Any],
    path: Path,
    *,
    texts: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Writes the corpus of a finished study and returns its card; see `systems.base.System`."""
    card_path = path.with_name(path.name + ".card.json")
    if texts is not None:
        positive_int("texts", texts)
    for new in (path, card_path):
        if new.exists():
            raise InputError(f"{new}: exists already; choose another --out")
    if not (directory / FOLDER / "corpus").exists():
        raise InputError(
            f"{directory}: method {config.method!r} writes no synthetic texts, expected a run of "
            f"one of {', '.join(map(repr, WRITING))}"
        )
    ledger = verified_ledger(directory, config)
    manifest = verified(directory / FOLDER / "corpus")
    artifacts = Artifacts(directory / FOLDER, run=manifest.run, ledger=ledger)
    corpus = artifacts.load_or_compute("corpus", missing).arrays["texts"].tolist()
    of_run = len(corpus)
    if texts is not None and texts > of_run:
        writer = CorpusWriter(config, progress)
        corpus += _more_texts(directory, writer, record, artifacts, texts - of_run)
    corpus = corpus[:texts]
    content = json_lines(corpus)
    card = {
        "file": path.name,
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
        "texts": len(corpus),
        "written_after_the_run": max(0, len(corpus) - of_run),
        **_cost(record, ledger, manifest),
        "method": record["method"],
        "date": record["date"],
        "config_sha256": files.sha256_file(directory / "config.yaml"),
        "public_models": {
            name: about for name, about in record["public_models"].items() if name != "downstream"
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # The card comes first, so that a crash leaves no corpus without its card.
    files.write_json(card_path, card)
    files.write_atomically(path, content)
    return card


def verified_ledger(directory: Path, config: SyntheticTextConfig) -> Ledger | None:
    """The verified ledger that the run charged; None where no client was asked."""
    if config.method not in SCORING:
        return None
    path = ledger_path(config.privacy, directory)
    if not path.exists():
        raise CorruptFile(f"{path}: the run's ledger is missing")
    ledger = Ledger.read(path)
    ledger.verify()
    return ledger


def _cost(record: Mapping[str, Any], ledger: Ledger | None, manifest: Manifest) -> dict[str, Any]:
    """What the texts cost the clients, and what all releases on their ledger cost together."""
    found: dict[str, Any] = {"private": True, "stamp": "", "delta": 0.0, "unit": "client"}
    found |= {"adjacency": None, "accountant": None, "ledger": None}
    if ledger is not None:
        plan = Plan.from_dict(record["plan"])
        found |= {
            "private": plan.private,
            "stamp": record["stamp"],
            "delta": plan.delta if plan.private else None,
            "unit": plan.unit,
            "adjacency": plan.adjacency,
            "accountant": plan.chosen_accountant if plan.private else None,
            "ledger": {
                # The head after the run: a shared ledger may have been charged since.
                "head": manifest.ledger_head,
                "charges_of_all": len(ledger),
                "epsilon_of_all": ledger.spent(plan.delta) if plan.private else None,
            },
        }
    # Of a method that asks no client, the epsilon of the record is 0.
    return {**found, "statement": record["privacy"], "epsilon": record["metrics"]["epsilon"]}


def tuned_generator(
    directory: Path, writer: CorpusWriter, record: Mapping[str, Any], artifacts: Artifacts
) -> tuple[LanguageModel, list[str]]:
    """The generator as the run tuned it, and the texts that its prompts are made of.

    Raises:
      InputError: the public generator is another one than the run used.
      CorruptFile: an artifact of the run is missing or was altered.
    """
    require_public(writer, "generator", record)
    plan = record["plan"]
    return writer.tuned(
        directory,
        lambda name, _: artifacts.load_or_compute(name, missing).arrays,
        # A method that asks no client has no plan.
        question(writer.config, Plan.from_dict(plan)) if plan else None,
        lambda step, state, round: step(state, missing, round),
    )


def require_public(writer: CorpusWriter, name: str, record: Mapping[str, Any]) -> None:
    """Refuses a public model, "generator" or "downstream", that the run did not start from."""
    digest, expected = writer.about(name)["sha256"], record["public_models"][name]["sha256"]
    if digest != expected:
        where = writer.identity.get(name, {}).get("path", writer.config.cache)
        raise InputError(
            f"{where}: the public {name} must be the one that the run used, with SHA-256 "
            f"{expected[:12]}..., found {digest[:12]}...: restore it"
        )


def _more_texts(
    directory: Path,
    writer: CorpusWriter,
    record: Mapping[str, Any],
    artifacts: Artifacts,
    number: int,
) -> list[str]:
    """New texts by the generator as the run tuned it."""
    model, samples = tuned_generator(directory, writer, record, artifacts)
    found: list[str] = []
    for part in range(1, 1 + _MOST_PARTS):
        lacking = number - len(found)
        found += writer.texts(model, samples, lacking + lacking // 20 + 8, part)
        if len(found) >= number:
            return found[:number]
    raise InputError(
        f"{directory}: the generator wrote only {len(found)} of {number} more texts that are not "
        "empty: ask for fewer --texts"
    )
