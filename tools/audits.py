"""Audits every config that comes with jaxpfl, and secure sums, and writes the table of the docs.

    python -m tools.audits                       # all of them, half an hour
    python -m tools.audits quickstart popri      # those whose name contains a word
    python -m tools.audits --write               # the docs' tables and figure, from the stored rows

Each release is played for as long as `--seconds` of processor time allow, whatever is seen, with
all of its clients as canaries, or 16,384 of them. Configs of sweeps and of the papers are not
played: they ask what the others ask. Rows are appended to benchmarks/results/audits.jsonl, where
`python tools/audit.py --store` appends its own.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jaxpfl as jp
from benchmarks import comparison, harness
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.experiments import registry
from jaxpfl.experiments.audit import AuditSettings, game_of, judged
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.engine.description import PlannedRelease
from jaxpfl.experiments.report import plots
from jaxpfl.federated.audits.canaries import LENGTH, Played, of_one_row
from jaxpfl.privacy.auditing import Trials
from jaxpfl.privacy.ledger import guarantee_of
from tools.defects import between, markdown

RESULTS = "audits"
DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"system": DOCS / "trust_tests.md", "worse": DOCS / "auditing.md"}
FIGURE = DOCS / "audits.png"
# What the figure shows of the rows: a release of each system.
SHOWN = {
    "FreD": ("quickstart", "FreD"),
    "DP-FedAvg, images": ("digits_cnn", "rounds"),
    "DP-FedAvg, words": ("irc_word_lm", "rounds"),
    "SCAFFOLD, images": ("digits_cnn, SCAFFOLD", "rounds"),
    "Ditto, images": ("digits_cnn, Ditto", "rounds"),
    "DP-FTRL": ("popri_small, DP-FTRL", "rounds"),
    "Federated metrics": ("gan_inversion", "each of two histograms of users' accuracy"),
    "Private evolution": ("popri_small, private evolution", "rounds"),
    "POPri": ("popri_small", "rounds"),
    "One look": ("one_look", "moments"),
    "Secure sum": ("jp.secure_release", "discrete_gaussian"),
}
MARKS = {
    "system": ("<!-- systems: written by tools/audits.py --write -->", "<!-- end of systems -->"),
    "worse": ("<!-- worse: written by tools/audits.py --write -->", "<!-- end of worse -->"),
}

SETTINGS = AuditSettings(canaries=16_384, rounds=2_000)
# With 342,477 clients, a round takes long. So many have the same chances to a thousandth.
FEWER = {
    "stackoverflow_oov_concatenation": ["--data.clients", "16384"]
    + ["--words.training.clients_per_round", "239"]
    + ["--characters.training.clients_per_round", "239"]
}
# What else is asked of a config: other algorithms, and the methods of its sweeps.
ALSO = {
    "digits_cnn": {
        "SCAFFOLD": ["--training.algorithm.name", "scaffold"]
        + ["--training.algorithm.variate_clip", "2"],
        "Ditto": ["--training.algorithm.name", "ditto", "--training.algorithm.mu", "0.1"],
    },
    "popri_small": {
        "DP-FedAvg": ["--method", "fed_avg"],
        "DP-FTRL": ["--method", "fed_avg", "--privacy.sampling", "cyclic"]
        + ["--privacy.noise", "banded"],
        "private evolution": ["--method", "private_evolution"],
        "PE+SFT": ["--method", "pe_sft"],
        "steering": ["--method", "steered"],
    },
}
DELTA = 1e-4
"""Of what is in no config."""
_COST: dict[str, Any] = {"epsilon": 4.0, "delta": DELTA}
# Options of `jaxpfl synthesize` that change what is released.
SYNTHESIZE = (
    ("label", "moments of four labels", {**_COST, "labels": 4}),
    ("embedder", "moments of two embedders and a judge", {**_COST, "shares": (0.45, 0.45, 0.1)}),
)

Play = Callable[[int], Played]


class Audit(NamedTuple):
    """What is audited.

    Attributes:
      play: plays one run, given its seed.
      facts: what is stored beside the bounds.
    """

    system: str
    release: str
    play: Play
    facts: dict[str, Any]


def audits() -> Iterator[Audit]:
    """All releases that there are, in the order of the configs."""
    for name in shipped.names():
        if "/" in name or shipped.about(name).command != "run":
            continue
        for label, overrides in {"": [], **ALSO.get(name, {})}.items():
            config = registry.load(shipped.find(name), [*FEWER.get(name, []), *overrides])
            system = f"{name}, {label}" if label else name
            described = registry.system_of(config.system).describe(config)
            for release, each in described.releases.items():
                if each.guarantee.private:
                    yield _of_release(system, release, each)
    for option, release, settings in SYNTHESIZE:
        moments = PlannedRelease.of_moments(FredPlan.calibrated(**settings), 9_000)
        yield _of_release(f"synthesize --{option}", release, moments)
    yield Audit("jp.secure_release", "discrete_gaussian", _secure(), {"rounds": 1, "planned": 1})


def _of_release(system: str, name: str, release: PlannedRelease) -> Audit:
    game = game_of(release, SETTINGS)
    facts = {
        "rounds": game.rounds,
        "planned": game.plans[0].rounds,
        "canaries": game.canaries,
        "own_client_function": release.questions is not None,
    }
    return Audit(system, name, lambda seed: game.play(1, seed=seed), facts)


def _secure(clients: int = 256) -> Play:
    """One secure sum of clients who are all canaries. Its noise does not follow from the seed."""
    secure = jp.SecureSum(clients, clip_norm=1.0, noise_multiplier=1.0)

    def play(seed: int) -> Played:
        present_M = np.random.default_rng(seed).random(clients) < 0.5
        directions = np.arange(clients, dtype=np.int32)
        lengths = np.where(present_M, LENGTH, 0.0).astype(np.float32)
        population = of_one_row({"direction": directions, "length": lengths})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.jsonl"
            found = jp.secure_release(
                _own_coordinate,
                population,
                secure,
                delta=DELTA,
                ledger=path,
                broadcast=jnp.zeros(clients, jnp.float32),
                cohort=jp.CohortSpec(1, 1),
            )
            stated = guarantee_of(jp.Ledger.read(path).charges, DELTA, "client")
        return Played(Trials((2 * found.value - 1)[None] / 2, present_M), stated)

    return play


def _own_coordinate(zero_P, examples, key):
    del key  # nothing is drawn
    length = jnp.sum(jnp.where(examples.mask, examples.batches["length"], jnp.float32(0)))
    return zero_P.at[examples.batches["direction"][0, 0]].set(length)


def audited(audit: Audit, seconds: float) -> dict[str, Any]:
    """Plays runs for about so many seconds of processor time, and bounds their epsilon."""
    began, first, runs = time.process_time(), 0.0, []
    for seed in itertools.count():
        runs.append(audit.play(seed))
        spent = time.process_time() - began
        # The first one compiles.
        first = first or spent
        each = (spent - first) / max(1, seed)
        if seed and spent + each > seconds:
            break
    scores, present = zip(*(run.trials for run in runs), strict=True)
    trials = Trials(np.concatenate(scores, axis=1), np.concatenate(present))
    found = judged(trials, runs[0].stated, SETTINGS.confidence)
    return {
        "audit": "system",
        "system": audit.system,
        "release": audit.release,
        **audit.facts,
        "runs": len(runs),
        "seeds": f"0 .. {len(runs) - 1}",
        **{name: value for name, value in found.items() if name != "statement"},
        "cpu_s": round(time.process_time() - began, 1),
    }


def stored() -> list[dict[str, Any]]:
    """The last row of each release, by system."""
    rows = comparison.read(harness.RESULTS / f"{RESULTS}.jsonl")
    last = {(row["audit"], row.get("system"), row["release"]): row for row in rows}
    return sorted(last.values(), key=lambda row: row.get("system", ""))


def systems_table(rows: list[dict[str, Any]]) -> str:
    """The rows of systems as a table in Markdown."""
    cells = [("config", "release", "rounds", "stated epsilon", "at least", "trials"), ("---",) * 6]
    for row in rows:
        own = " (own clients)" if row.get("own_client_function") else ""
        numbers = f"{row['epsilon']:.4g}", f"{row['bound']:.3g}", f"{row['trials']:,}"
        cells.append((row["system"], row["release"] + own, f"{row['rounds']:,}", *numbers))
    return markdown(cells)


def drawn(rows: list[dict[str, Any]]) -> Any:
    """The figure of the stated epsilons, and of the bounds below them."""
    found = {(row["system"], row["release"]): row for row in rows if row["audit"] == "system"}
    chosen = [found[key] for key in SHOWN.values()]
    places = range(len(chosen), 0, -1)
    stated, bounds = ([row[name] for row in chosen] for name in ("epsilon", "bound"))
    axes = plots.axes("What an audit shows, and what is stated", width=6.4, height=3.8)
    axes.hlines(places, bounds, stated, color=plots.PALE, linewidth=3)
    axes.scatter(bounds, places, color=plots.ACCENT, zorder=3, label="at least (99 % confidence)")
    axes.scatter(stated, places, color=plots.INK, marker="|", s=150, label="at most, as stated")
    axes.set_yticks(places, SHOWN)
    axes.set_xlim(left=0)
    axes.legend(fontsize=9, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.4, -0.2))
    return plots.labelled(axes, "epsilon", "")


def worse_table(rows: list[dict[str, Any]]) -> str:
    """The rows of tools/audit.py as a table in Markdown."""
    titles = ("release", "trials", "stated epsilon", "bounds, least to largest", "flagged")
    cells = [titles, ("---",) * 5]
    for row in rows:
        bounds = f"{row['least']:.2f} .. {row['largest']:.2f}"
        flagged = f"{row['flagged']} of {row['seeds']}"
        cells.append(
            (row["release"], f"{row['trials']:,}", f"{row['epsilon']:.3f}", bounds, flagged)
        )
    return markdown(cells)


def written(kind: str, rows: list[dict[str, Any]]) -> str:
    """The page of a kind of audit, with the table of these rows in its place."""
    table = systems_table if kind == "system" else worse_table
    shown = table([row for row in rows if row["audit"] == kind])
    return between(PAGES[kind].read_text(encoding="utf-8"), *MARKS[kind], shown)


def main() -> int:
    parser = argparse.ArgumentParser(description="Audits every config that comes with jaxpfl.")
    parser.add_argument(
        "--seconds", type=float, default=20, help="of processor time for each (default: 20)"
    )
    parser.add_argument("--write", action="store_true", help="only write the docs from the rows")
    parser.add_argument("words", nargs="*", help="of the names of configs (default: all)")
    arguments = parser.parse_args()
    if arguments.write:
        for kind, page in PAGES.items():
            page.write_text(written(kind, stored()), encoding="utf-8")
        drawn(stored()).savefig(FIGURE)
        return 0
    exceeded = False
    for audit in audits():
        if not arguments.words or any(word in audit.system for word in arguments.words):
            row = audited(audit, arguments.seconds)
            exceeded |= row["exceeded"]
            harness.record(RESULTS, [row])
            print(systems_table([row]).splitlines()[-1], f"{row['cpu_s']:.0f} s", flush=True)
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
