"""The synthetic corpus of a finished study, with a card that says what it cost the clients.

    FILE                one {"text": ...} a line
    FILE.card.json      epsilon and its terms, the ledger's head, what wrote the texts

More texts than the run made are written by what the run released: post-processing, which costs the
clients nothing more. No client's data is read here.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.checks import positive_int
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.config.reader import load
from jaxpfl.experiments.engine.artifacts import Artifacts, Manifest, verified
from jaxpfl.experiments.engine.releases import FOLDER, missing
from jaxpfl.experiments.systems.base import RESULT
from jaxpfl.experiments.systems.synthetic_text.config import SCORING, SyntheticTextConfig
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import CorpusWriter
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

# Parts of the corpus that are written before a generator of empty texts is given up.
_PARTS = 50


def synthesize(
    run: str | Path, out: str | Path, *, texts: int | None = None, shown: bool = True
) -> dict[str, Any]:
    """Writes the corpus of the finished study in `run` to `out`; returns its card.

    Args:
      out: a new file.
      texts: so many, the run's first; None: as many as the run made.
      shown: draw progress bars on stderr.

    Raises:
      InputError: no finished study that makes texts, or `out` exists.
      CorruptFile: a file of the run was altered, or its ledger was cut off.
    """
    directory, path = Path(run), Path(out)
    card_path = path.with_name(path.name + ".card.json")
    if texts is not None:
        positive_int("texts", texts)
    for wanted in (path, card_path):
        if wanted.exists():
            raise InputError(f"{wanted}: exists already; choose another --out")
    config, record = _finished(directory)
    with files.exclusive(directory):
        ledger = _ledger(directory, config)
        manifest = verified(directory / FOLDER / "corpus")
        artifacts = Artifacts(directory / FOLDER, run=manifest.run, ledger=ledger)
        made = artifacts.load_or_compute("corpus", missing).arrays["texts"].tolist()
        wanted = len(made) if texts is None else texts
        found = made[:wanted]
        if len(found) < wanted:
            found = _continued(directory, config, record, artifacts, found, wanted, shown)
    content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found)
    card = {
        "file": path.name,
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
        "texts": len(found),
        "written_after_the_run": max(0, len(found) - len(made)),
        **_cost(record, ledger, manifest),
        "method": record["method"],
        "date": record["date"],
        "config_sha256": files.sha256_file(directory / "config.yaml"),
        "public_models": {
            name: about for name, about in record["public_models"].items() if name != "downstream"
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # In this order, so that no corpus is ever without its card.
    files.write_atomically(card_path, json.dumps(card, indent=1) + "\n")
    files.write_atomically(path, content)
    return card


def _finished(directory: Path) -> tuple[SyntheticTextConfig, dict[str, Any]]:
    if not (directory / RESULT).exists():
        raise InputError(f"{directory}: holds no finished run: there is no {RESULT}")
    record = files.read_json(directory / RESULT)
    if record.get("system") != "synthetic_text":
        raise InputError(
            f"{directory}: is no run of the system 'synthetic_text', found {record.get('system')!r}"
        )
    config = load(directory / "config.yaml", SyntheticTextConfig)
    if not (directory / FOLDER / "corpus").exists():
        raise InputError(f"{directory}: method {config.method!r} makes no synthetic texts")
    return config, record


def _ledger(directory: Path, config: SyntheticTextConfig) -> Ledger | None:
    if config.method not in SCORING:
        return None
    path = config.ledger_path(directory)
    if not path.exists():
        raise CorruptFile(f"{path}: the run's ledger is missing")
    ledger = Ledger.read(path)
    ledger.verify()
    return ledger


def _cost(record: Mapping[str, Any], ledger: Ledger | None, manifest: Manifest) -> dict[str, Any]:
    """What the texts cost the clients, and what all releases on their ledger cost together."""
    if ledger is None:
        return {
            "private": True,
            "stamp": "",
            "statement": record["privacy"],
            "epsilon": 0.0,
            "delta": 0.0,
            "unit": "client",
            "adjacency": None,
            "accountant": None,
            "ledger": None,
        }
    plan = Plan.from_dict(record["plan"])
    # Later releases on a ledger that is shared are not the run's.
    head = manifest.ledger_head
    return {
        "private": plan.private,
        "stamp": record["stamp"],
        "statement": record["privacy"],
        "epsilon": record["metrics"]["epsilon"],
        "delta": plan.delta if plan.private else None,
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        "accountant": plan.chosen_accountant if plan.private else None,
        "ledger": {
            "head": head,
            "charges_of_all": len(ledger),
            "epsilon_of_all": ledger.spent(plan.delta) if plan.private else None,
        },
    }


def _continued(
    directory: Path,
    config: SyntheticTextConfig,
    record: Mapping[str, Any],
    artifacts: Artifacts,
    found: list[str],
    wanted: int,
    shown: bool,
) -> list[str]:
    """The texts, and others by the same writer."""
    writer = CorpusWriter(config, shown)
    digest = writer.generator.digest()
    if digest != record["public_models"]["generator"]["sha256"]:
        raise InputError(
            f"{config.cache}: the public generator is not the one that the run started from: it "
            f"has SHA-256 {digest[:12]}..."
        )
    plan = record["plan"]
    model, samples = writer.tuned(
        directory,
        _only(artifacts),
        # A method that asks nobody has no plan.
        writer.scorer(Plan.from_dict(plan)) if plan else None,
        lambda step, state, round: step(state, missing, round),
    )
    found = list(found)
    for part in range(1, 1 + _PARTS):
        lacking = wanted - len(found)
        found += writer.texts(model, samples, lacking + lacking // 20 + 8, part)
        if len(found) >= wanted:
            return found[:wanted]
    raise InputError(f"the generator writes hardly more than empty texts: {len(found)} were found")


def _only(artifacts: Artifacts) -> Any:
    """Finds what was stored and computes nothing."""
    return lambda name, compute: artifacts.load_or_compute(name, missing).arrays


def described(card: Mapping[str, Any]) -> str:
    """The card in a few lines, for a terminal."""
    lines = [f"{card['texts']} texts, of which {card['written_after_the_run']} beyond the run's"]
    if card["stamp"]:
        lines.append(card["stamp"])
    return "\n".join([*lines, card["statement"]])
