"""The command line. Results go to stdout, progress and messages to stderr.

Nothing heavy is imported before the arguments are known to be good, so that help is instant.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxpfl import checks, compilation_cache
from jaxpfl.errors import BudgetExhausted, InputError

if TYPE_CHECKING:
    from jaxpfl.experiments.carry_out import StudyOutcome
    from jaxpfl.experiments.config.sections import Config
    from jaxpfl.experiments.config.study_config import Study
    from jaxpfl.experiments.systems.federated_training.study import Outcome

_EXIT_CODES = """\
exit codes:
  0    done
  1    a fault of the program or the machine (a full disk, for one)
  2    bad input: the message says where, what was found and what was expected
  3    the privacy budget is exhausted: the next release was not made
  130  interrupted by SIGINT; 143: by SIGTERM. A run was saved: `jaxpfl resume DIR`
"""


class _Parser(argparse.ArgumentParser):
    """Bad arguments are bad input: reported like any other."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxpfl",
        description="Private federated learning in JAX: simulate it, measure it, trust it.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, does: Callable[[argparse.Namespace, list[str]], dict[str, Any]], text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.add_argument(
            "--json", action="store_true", help="print one JSON object on stdout, and nothing else"
        )
        added.set_defaults(does=does, extra=name == "run")
        return added

    run = command("run", _run, "Carry out an experiment.")
    run.usage = "jaxpfl run CONFIG [--section.key VALUE ...] [--ledger FILE] [--out DIR] [--json]"
    run.add_argument("config", metavar="CONFIG", type=Path, help="YAML file; see configs/")
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory (default: runs/NAME-OF-CONFIG)"
    )
    run.add_argument(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="as --privacy.ledger: shared by all that is released from these clients (default: "
        "the run's own, in its directory)",
    )
    resume = command("resume", _resume, "Go on with an interrupted run, to the same final bits.")
    resume.add_argument("directory", metavar="DIR", type=Path)
    sweep = command("sweep", _sweep, "Carry out one experiment at every point of a grid.")
    sweep.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of the sweep")
    sweep.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory (default: runs/NAME-OF-CONFIG); what is done there is not done again",
    )
    synthesize = command(
        "synthesize", _synthesize, "Write a study's synthetic corpus, and the card of its privacy."
    )
    synthesize.add_argument("directory", metavar="RUN_DIR", type=Path)
    synthesize.add_argument("--out", type=Path, metavar="FILE", required=True, help="JSON Lines")
    synthesize.add_argument(
        "--texts",
        type=int,
        metavar="N",
        help="default: as many as the run made; more cost the clients nothing",
    )
    report = command("report", _report, "Write a run's report.html and its plots anew.")
    report.add_argument("directory", metavar="DIR", type=Path)
    convert = command("convert", _convert, "Write clients' data to a folder that opens at once.")
    convert.add_argument("source", metavar="SOURCE", help="what to read; see jaxpfl.data.open")
    convert.add_argument("out", metavar="OUT", type=Path, help="a new folder; it is private")
    budget = command("budget", _budget, "Say what the releases in a ledger have cost together.")
    budget.add_argument("ledger", metavar="LEDGER", type=Path)
    budget.add_argument("--delta", type=float, required=True)
    budget.add_argument("--accountant", choices=("pld", "rdp"))
    calibrate = command("calibrate", _calibrate, "Noise for an epsilon, or epsilon for a noise.")
    calibrate.add_argument("--delta", type=float, required=True)
    calibrate.add_argument("--rounds", type=int, required=True)
    calibrate.add_argument("--population", type=int, required=True)
    calibrate.add_argument("--clients-per-round", type=int, required=True)
    wanted = calibrate.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--epsilon", type=float)
    wanted.add_argument("--noise-multiplier", type=float)
    calibrate.add_argument("--accountant", choices=("pld", "rdp"))
    calibrate.add_argument(
        "--sampling", choices=("poisson", "fixed"), help="default: poisson, with PLD"
    )
    calibrate.add_argument(
        "--as-published",
        choices=("augenstein",),
        metavar="PAPER",
        help="augenstein: the epsilon in that paper's form, which is NOT valid, and the valid ones",
    )
    fred = command(
        "fred", _fred, "Rank public corpora by a private Frechet distance to clients' data."
    )
    fred.add_argument("--private", metavar="SOURCE", required=True, help="the clients")
    fred.add_argument(
        "--candidates",
        metavar="SOURCE",
        nargs="+",
        required=True,
        help="public corpora, each SOURCE or NAME=SOURCE",
    )
    fred.add_argument("--epsilon", type=float)
    fred.add_argument("--delta", type=float)
    fred.add_argument(
        "--unit",
        choices=("client", "example"),
        default="client",
        help="what is protected: a client with all it holds (default), or one example",
    )
    fred.add_argument(
        "--embedder",
        metavar="NAME",
        default="hashed",
        help="hashed (default), minilm, encoder:FOLDER, sentence-transformers:NAME, ...",
    )
    fred.add_argument("--clip-norm", type=float, default=1.0, help="of embeddings (default: 1)")
    fred.add_argument(
        "--non-private",
        action="store_true",
        help="also (without --epsilon: only) the distances without noise; they are NOT private",
    )
    fred.add_argument("--ledger", type=Path, metavar="FILE", help="default: OUT/ledger.jsonl")
    fred.add_argument("--out", type=Path, metavar="DIR", help="default: runs/fred")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        parsed, rest = _parser().parse_known_args(given)
        if rest and not parsed.extra:
            raise InputError(f"jaxpfl: unexpected argument {rest[0]!r}")
        compilation_cache.enable()
        result = parsed.does(parsed, rest)
    except (InputError, BudgetExhausted) as error:
        return _fail(error, str(error), error.exit_code, as_json)
    except KeyboardInterrupt as error:
        return _fail(error, str(error), 128 + getattr(error, "number", 2), as_json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(error, f"{where}{error.strerror or error}", 1, as_json)
    text = result.pop("text")
    print(json.dumps(result) if as_json else text)
    return 0


def _fail(error: BaseException, message: str, code: int, as_json: bool) -> int:
    print(f"error: {message}", file=sys.stderr)
    if as_json:
        kind = type(error).__name__
        print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
    return code


def _run(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config.reader import load
    from jaxpfl.experiments.config.sections import Config

    if arguments.ledger is not None:
        overrides = [*overrides, "--privacy.ledger", str(arguments.ledger)]
    config = _use_devices(load(arguments.config, overrides))
    out = arguments.out or _unused_directory(arguments.config.stem)
    print(f"run directory: {out}", file=sys.stderr)
    if isinstance(config, Config):
        from jaxpfl.experiments.systems.federated_training.study import run_config

        return _told(run_config(config, out))
    from jaxpfl.experiments.carry_out import run_study

    return _told_study(run_study(config, out))


def _resume(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config.reader import load
    from jaxpfl.experiments.config.sections import Config

    config = _use_devices(load(arguments.directory / "config.yaml"))
    if isinstance(config, Config):
        from jaxpfl.experiments.systems.federated_training.study import resume_run

        return _told(resume_run(arguments.directory))
    from jaxpfl.experiments.carry_out import resume_study

    return _told_study(resume_study(arguments.directory))


def _sweep(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    from jaxpfl.experiments.sweep.config import load_sweep

    sweep = load_sweep(arguments.config)
    devices = {point.config.run.devices for point in sweep.points}
    if len(devices) > 1:
        raise InputError(f"{arguments.config}: run.devices must be the same at all points")
    _use_devices(sweep.points[0].config)
    from jaxpfl.experiments.sweep.page import table_lines
    from jaxpfl.experiments.sweep.sweep import SIMULATION, run_sweep

    out = arguments.out or Path("runs", arguments.config.stem)
    print(f"sweep directory: {out}", file=sys.stderr)
    outcome = run_sweep(sweep, out)
    report = outcome.out / "report.html"
    lines = [f"report: {report}", "", *table_lines(sweep, outcome.rows), "", SIMULATION]
    return {
        "out": str(outcome.out),
        "report": str(report),
        "rows": outcome.rows,
        "note": SIMULATION,
        "text": "\n".join(lines),
    }


def _synthesize(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    if arguments.texts is not None:
        checks.positive_int("--texts", arguments.texts)
    from jaxpfl.experiments.config.reader import load

    if (arguments.directory / "config.yaml").exists():
        _use_devices(load(arguments.directory / "config.yaml"))
    from jaxpfl.experiments.systems.synthetic_text.synthesize import described, synthesize

    card = synthesize(arguments.directory, arguments.out, texts=arguments.texts)
    return {"out": str(arguments.out), "card": card, "text": described(card)}


def _use_devices(config: "Config | Study") -> "Config | Study":
    """Gives JAX the config's number of virtual CPU devices, before it starts."""
    import dataclasses

    import jax

    devices = config.run.devices
    if devices is None:
        affinity = getattr(os, "sched_getaffinity", None)
        devices = len(affinity(0)) if affinity else os.cpu_count() or 1
    # Accelerators ignore it; the number is kept in the resolved config, for a resume.
    jax.config.update("jax_num_cpu_devices", devices)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, devices=devices))


def _unused_directory(name: str) -> Path:
    number = 1
    while True:
        path = Path("runs", name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
        number += 1


def _told_study(outcome: "StudyOutcome") -> dict[str, Any]:
    record = outcome.to_dict()
    return {**record, "text": "\n".join([f"report: {record['report']}", "", *outcome.lines])}


def _told(outcome: "Outcome") -> dict[str, Any]:
    record = outcome.to_dict()
    lines = [f"report: {record['report']}", ""]
    if record["table"]:
        lines += [*_compared(record["table"], record["tested_on"], _is_language(record)), ""]
    if record["fred"]:
        lines += [*_candidates(record["fred"], ("before",)), ""]
    lines.append(record["privacy"])
    if record["simulation"]:
        lines += ["", *_simulation(record)]
    return {**record, "text": "\n".join(lines)}


def _is_language(record: dict[str, Any]) -> bool:
    return any(row["model"] == "unigram" for row in record["table"])


def _compared(table: list[dict[str, Any]], tested_on: str, language: bool) -> list[str]:
    """Models, scored on the same data; which it is stands above them."""
    first, second = ("perplexity", "next-token accuracy") if language else ("loss", "accuracy")
    lines = [f"on {tested_on}:", f"{'':44}{first:>12}{second:>22}"]
    for row in table:
        name = row["model"] + ("" if row["private"] else " (NOT PRIVATE)")
        value = row.get(first)
        shown = "" if value is None else f"{value:.4g}" if value < 1e5 else f"{value:.2e}"
        lines.append(f"{name:44}{shown:>12}{100 * row['accuracy']:>20.2f} %")
    frequencies = [row["frequencies"] for row in table if "frequencies" in row]
    return lines + [f"unigram: word frequencies of {each}" for each in frequencies]


def _candidates(fred: dict[str, Any], stages: Sequence[str]) -> list[str]:
    """The candidates by FreD, and the perplexity of their models where there are any."""
    stamp = "" if fred.get("private", True) else " (NOT PRIVATE)"
    titles = {"before": "perplexity before", "after": "after the rounds"}
    heading = f"{f'public corpus, by FreD{stamp}':38}{'FreD':>12}"
    lines = [heading + "".join(f"{titles[stage]:>20}" for stage in stages)]
    for row in fred["candidates"]:
        name = f"{row['rank']}. {row['candidate']}"
        line = f"{name:38}{row['distance']:>12.5g}"
        for stage in stages:
            value = None if row[stage] is None else row[stage]["perplexity"]
            line += f"{'' if value is None else f'{value:.4g}':>20}"
        lines.append(line.rstrip())
    correlations = [
        f"{value:.2f} {stage} the private rounds"
        for stage, value in fred["spearman"].items()
        if value is not None
    ]
    if correlations:
        lines.append(f"rank correlation of FreD with perplexity: {', '.join(correlations)}")
    return lines


def _simulation(record: dict[str, Any]) -> list[str]:
    """What the statement above does not cover, under a line that says so."""
    simulation = record["simulation"]
    lines = [simulation["note"], str(Path(record["out"]) / "simulation.html"), ""]
    if simulation["tested_on"]:
        lines += _compared(simulation["table"], simulation["tested_on"], _is_language(record))
    if "fred" in simulation:
        lines += ["", *_candidates(simulation["fred"], ("before", "after"))]
    return lines


def _report(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    if (arguments.directory / "study.json").exists():
        from jaxpfl.experiments.carry_out import write_study_report as write_report
    else:
        from jaxpfl.experiments.report.run_page import write_report

    path = write_report(arguments.directory)
    return {"report": str(path), "text": str(path)}


def _convert(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    from jaxpfl.data.convert import convert

    record = convert(arguments.source, arguments.out)
    return {**record, "text": f"{record['clients']} clients written to {record['out']}"}


def _budget(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    delta = checks.open_fraction("--delta", arguments.delta)
    from jaxpfl.privacy.ledger import Ledger

    if not arguments.ledger.is_file():
        raise InputError(f"{arguments.ledger}: there is no such ledger")
    ledger = Ledger.read(arguments.ledger)
    ledger.verify()
    record = ledger.summary(delta, arguments.accountant)
    text = (
        f"epsilon = {record['epsilon']:.4g} at delta = {delta:g}, {record['charges']} releases, "
        f"unit = {record['unit']}, adjacency = {record['adjacency']}, "
        f"accountant = {record['accountant']}"
    )
    return {"ledger": str(arguments.ledger), **record, "text": text}


def _fred(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    if (arguments.epsilon is None) != (arguments.delta is None):
        raise InputError("--epsilon and --delta belong together, found only one of them")
    if arguments.epsilon is None and not arguments.non_private:
        raise InputError("fred needs --epsilon and --delta, or --non-private")
    from jaxpfl.algorithms.fred import FredPlan
    from jaxpfl.experiments.choose import choose, table

    shared: dict[str, Any] = {"unit": arguments.unit, "clip_norm": arguments.clip_norm}
    plan = None
    if arguments.epsilon is not None:
        plan = FredPlan.calibrated(epsilon=arguments.epsilon, delta=arguments.delta, **shared)
    record = choose(
        arguments.private,
        arguments.candidates,
        plan=plan,
        without_privacy=FredPlan.without_privacy(**shared) if arguments.non_private else None,
        embedder_name=arguments.embedder,
        out=arguments.out or _unused_directory("fred"),
        ledger=arguments.ledger,
    )
    return {**record, "text": table(record)}


def _calibrate(arguments: argparse.Namespace, _: list[str]) -> dict[str, Any]:
    if arguments.as_published is not None:
        return _as_published(arguments)
    from jaxpfl.privacy import Clip, Noise, Plan, participation

    # The cost of a round does not depend on the clip norm: noise is relative to it.
    clip_norm = 1.0
    sampling = arguments.sampling or "poisson"
    if arguments.epsilon is not None:
        plan = Plan.calibrated(
            epsilon=arguments.epsilon,
            delta=arguments.delta,
            population=arguments.population,
            clients_per_round=arguments.clients_per_round,
            rounds=arguments.rounds,
            clip_norm=clip_norm,
            sampling=sampling,
            accountant=arguments.accountant,
        )
    else:
        plan = Plan(
            rounds=arguments.rounds,
            clip=Clip(clip_norm),
            noise=Noise(arguments.noise_multiplier),
            participation=participation.of(
                sampling, arguments.population, arguments.clients_per_round
            ),
            delta=arguments.delta,
            accountant=arguments.accountant,
        )
    epsilon = plan.epsilon()
    return {
        "noise_multiplier": plan.noise_multiplier,
        "epsilon": epsilon,
        "delta": plan.delta,
        "rounds": plan.rounds,
        "population": plan.population,
        "clients_per_round": plan.clients_per_round,
        "sampling": plan.sampling,
        "accountant": plan.chosen_accountant,
        "confirmed_epsilon": plan.confirmed_epsilon(),
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        "text": f"noise multiplier = {plan.noise_multiplier:.4g}\n{plan.statement()}",
    }


def _as_published(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.noise_multiplier is None:
        raise InputError("--as-published needs --noise-multiplier: it tells what a noise costs")
    if arguments.accountant is not None or arguments.sampling is not None:
        raise InputError("--as-published shows every form: give no --accountant and no --sampling")
    from jaxpfl.privacy.published import as_published

    setting = {
        "noise_multiplier": arguments.noise_multiplier,
        "delta": arguments.delta,
        "rounds": arguments.rounds,
        "population": arguments.population,
        "clients_per_round": arguments.clients_per_round,
    }
    found = as_published(arguments.as_published, **setting)
    lines = [
        f"paper's form ({found.paper}): {found.statement()}",
        f"valid, fixed-size rounds:     {found.fixed.statement()}",
        f"valid, Poisson rounds:        {found.poisson.statement()}",
    ]
    if found.fixed.allow_large_delta is not None:
        lines.append("delta is 1 / N, as published: a delta should be well below it")
    return {**setting, **found.to_dict(), "text": "\n".join(lines)}
