"""Audits: what a config would release, on canaries in place of clients; and published texts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.checked import Checked, NonNegativeInt, OpenFraction, PositiveInt
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.build import read_clients, split_clients
from jaxpfl.experiments.engine.description import PlannedRelease
from jaxpfl.experiments.records.lines import where_begun
from jaxpfl.experiments.registry import load_run, system_of
from jaxpfl.experiments.report.leakage import NOT_PUBLIC, write_leakage
from jaxpfl.experiments.report.page import audited, page_lines, text_lines
from jaxpfl.experiments.systems import CORPUS
from jaxpfl.federated.audits.canaries import Game
from jaxpfl.federated.mesh import require_one_process
from jaxpfl.privacy.auditing import Trials, lower_bound
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.progress import track
from jaxpfl.text.columns import texts_of
from jaxpfl.text.cut import MESSAGES, Cut
from jaxpfl.text.metrics.leakage import leakage

MOST_DIMENSIONS = 384
"""The most dimensions of embeddings, and so the most canaries of a run, where a system's own client
functions are audited."""

SIMULATED = "SIMULATED: canaries in place of clients; no client was read, and no ledger charged"

_FITS = (
    "No bound exceeds what the ledger states, at {confidence:.0%} confidence. That is not a proof "
    "that nothing more is released."
)
_EXCEEDED = (
    "A bound exceeds the epsilon that the ledger states: more is released than is charged (or this "
    "is an accident that a confidence of {confidence:.2%} leaves: repeat it with another --seed)."
)


@dataclasses.dataclass(frozen=True)
class AuditSettings(Checked):
    """How much is played: `runs` of each release, with so many `canaries`, and trials, each.

    Canaries are at most the whole population, or `MOST_DIMENSIONS` where a system's own client
    functions are asked. At most so many of a plan's `rounds` are played, and compared with what
    these cost. `confidence` is of all bounds on all releases of a config together.
    """

    canaries: PositiveInt = 1_000
    runs: PositiveInt = 8
    rounds: PositiveInt = 20
    confidence: OpenFraction = 0.99
    seed: NonNegativeInt = 0


def audit(config: Any, settings: AuditSettings, *, progress: bool = True) -> dict[str, Any]:
    """Audits every release of a config of any system; returns the bounds as plain data.

    The plans are those that a dry run finds (`engine.description`): no client is read, nothing is
    fetched, charged to a ledger of the user's, or written. `federated.audits.canaries` says what is
    played, and `privacy.auditing` what a bound means.

    Returns:
      "releases" by name: epsilon, as the ledger of the game states it, delta, the bound and the
      trials; "exceeded": whether a bound exceeds its epsilon; "found", in a sentence; "text".

    Raises:
      InputError: the config is not valid, or nothing in it is private.
    """
    require_one_process("an audit", "start it in one, because several make the same releases")
    releases = system_of(config.system).describe(config).releases
    private = [(name, planned) for name, planned in releases.items() if planned.guarantee.private]
    if not private:
        raise InputError("the config releases nothing with noise: there is no epsilon to audit")
    # The text and the exit status are about all releases together.
    confidence = 1 - (1 - settings.confidence) / len(private)
    bounds: dict[str, dict[str, Any]] = {}
    for name, release in track(private, "audit", progress=progress):
        game = game_of(release, settings)
        played = game.play(settings.runs, seed=settings.seed)
        rounds = {"rounds": game.rounds, "planned_rounds": game.plans[0].rounds}
        bounds[name] = rounds | judged(played.trials, played.stated, confidence)
    exceeded = any(row["exceeded"] for row in bounds.values())
    found = (_EXCEEDED if exceeded else _FITS).format(confidence=settings.confidence)
    others = [name for name in releases if name not in bounds]
    record = {"simulation": SIMULATED, "system": config.system}
    record |= {"settings": dataclasses.asdict(settings), "releases": bounds}
    record |= {"not_private": others, "exceeded": exceeded, "found": found}
    table: Any = audited(record).table
    left = [f"not audited, because NOT PRIVATE: {name}" for name in others]
    return {**record, "text": "\n".join([SIMULATED, "", *text_lines(table), "", found, *left])}


def game_of(release: PlannedRelease, settings: AuditSettings) -> Game:
    wanted = settings.canaries
    wanted = wanted if release.questions is None else min(wanted, MOST_DIMENSIONS)
    plans = tuple(_smaller(plan, wanted) for plan in release.plans)
    canaries, rounds = min(wanted, plans[0].population), min(settings.rounds, plans[0].rounds)
    return Game(plans, canaries, rounds, release.questions)


def judged(trials: Trials, stated: Guarantee, confidence: float) -> dict[str, Any]:
    """What is stated and bounded, as plain data."""
    bound = lower_bound(trials, stated, confidence=confidence).epsilon
    epsilon, number = stated.epsilon(), len(trials.present_N)
    cost = {"epsilon": epsilon, "delta": stated.delta, "statement": stated.statement()}
    return {**cost, "bound": bound, "trials": number, "exceeded": bound > epsilon}


def _smaller(plan: Plan, canaries: int) -> Plan:
    """The plan on fewer clients, if its cost and each client's chance to take part are the same."""
    number, taken = plan.population, plan.clients_per_round
    if plan.sampling != "poisson" or plan.clip.adaptive is not None:
        return plan
    least = number // math.gcd(number, taken)
    fewer = least * -(-canaries // least)
    if fewer >= number:
        return plan
    participation = Poisson(fewer, taken * fewer // number)
    return dataclasses.replace(plan, participation=participation, simulates=None)


def audit_texts(
    texts: str | Path,
    training: str | Path | Population | None = None,
    held_out: str | Path | Population | None = None,
    *,
    out: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Compares what published texts have in common with training and with held-out clients.

    `text.metrics.leakage` says how. What is written reads clients' own texts without noise, so it
    goes to a private folder: private/leakage.json and .html, with counts, and no text.

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
        sides = "name --training and --held-out, the clients whose texts it was made of, and others"
        raise InputError(f"{texts}: is no run that wrote a corpus: {sides}")
    sides = open_population(training), open_population(held_out)
    published = {"these texts": list(texts_of(open_population(texts, public=True)))}
    names = f"training clients of {sides[0].name}", f"held-out clients of {sides[1].name}"
    result = leakage(published, *map(rule.joined, sides), seed=seed)
    folder = None if out is None else files.user_path(out)
    about = str(texts), names, result, NOT_PUBLIC
    record, page = write_leakage(folder, *about, cut=rule, dealt=dealt)
    return {**record, "text": "\n".join([*page_lines(page), record["found"]])}
