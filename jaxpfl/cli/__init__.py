"""The command line. Results go to stdout, progress and messages to stderr.

JAX is imported only after the arguments are checked, so that help appears at once. A stream may be
closed, full, or read by nobody any more. A result that stdout cannot take is said on stderr and by
the exit code. Messages that stderr cannot take are dropped: the work goes on without them.
"""

import argparse
import difflib
import errno
import io
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

from jaxpfl import compilation_cache, files
from jaxpfl.cli import begin, data, privacy, runs
from jaxpfl.cli.common import add, path
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.printable import printable
from jaxpfl.progress import Messages
from jaxpfl.signals import terminable

_LOST = 6
_EXIT_CODES = """\
exit codes:
  0    done
  1    a fault of the program or the machine, such as a full disk
  2    bad input: the message says where, what was found and what was expected
  3    the privacy budget is exhausted: the next release was not made
  4    some points of a sweep failed, each with its sentence; the others are done
  5    an audit found more than the stated epsilon allows, or texts did not pass one
  6    done, but the result could not be written to stdout; 141: its reader was gone
  130  interrupted by SIGINT; 143: by SIGTERM; 129: by SIGHUP. A run that had begun can be resumed
"""


# How `shtab` completes a config: its name in fish, and a file in all shells.
_CONFIG = {
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "fish": r"(jaxpfl configs 2>/dev/null | string match -rg '^jaxpfl \S+ (\S+)') "
    "(__fish_complete_path (commandline -ct))",
}


class _Parser(argparse.ArgumentParser):
    """Raises `InputError` for bad arguments, so that they are reported like other bad input."""

    def add_argument(self, *names: str, **options: Any) -> Any:
        """Tells `shtab` which arguments are files."""
        action: Any = super().add_argument(*names, **options)
        if action.metavar == "CONFIG" and not action.option_strings:
            action.complete = _CONFIG
        elif action.type is path:
            action.complete = "file"
        return action

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; see `{self.prog} --help`")


class _Command(NamedTuple):
    """A command; `run` takes parsed and, if it `takes_overrides`, unknown arguments, a config's.

    The entry "text" of its result is printed, or with --json all others, but for "exit_code", which
    is 0 if absent.
    """

    arguments: Mapping[str, str]  # see `common.add`
    run: Callable[[argparse.Namespace, Sequence[str]], dict[str, Any]]
    help: str
    example: str
    takes_overrides: bool = False


COMMANDS = {
    "run": _Command(runs.RUN, runs.run, "Carry out an experiment.",
        "run quickstart --out runs/mine --training.rounds 30", takes_overrides=True),
    "init": _Command(begin.INIT, begin.init, "Write a config that runs on a table of your own.",
        "init messages.csv --client user --text message"),
    "synthesize": _Command(begin.SYNTHESIZE, begin.synthesize,
        "Choose public texts that, together, are like those of your own table, by one release.",
        "synthesize messages.csv --client user --text message --public news.jsonl --epsilon 4"),
    "configs": _Command(
        begin.CONFIGS, begin.configs, "List the configs that come with jaxpfl.", "configs"),
    "data": _Command(
        data.DATA, data.run, "List the data sets that the configs read, and fetch one.",
        "data get shakespeare --folder data/tff"),
    "resume": _Command(
        runs.RESUME, runs.resume, "Continue an interrupted run, to the same final bits.",
        "resume runs/mine"),
    "sweep": _Command(runs.SWEEP, runs.sweep, "Carry out one experiment at every point of a grid.",
        "sweep grid.yaml --out runs/grid --seeds 3", takes_overrides=True),
    "export": _Command(runs.EXPORT, runs.export,
        "Write what a finished run made, a model or synthetic texts, in formats others read.",
        "export runs/mine exported"),
    "predict": _Command(
        runs.PREDICT, runs.predict, "Write what a trained model predicts for a table's rows.",
        "predict exported new.csv --out predictions.csv"),
    "report": _Command(runs.REPORT, runs.report, "Write a run's report.html and plots anew.",
        "report runs/mine"),
    "compare": _Command(runs.COMPARE, runs.compare,
        "Put runs side by side: the settings that differ, scores and curves.",
        "compare runs/mine runs/mine-2 --out runs/compared"),
    "convert": _Command(
        data.CONVERT, data.run_convert, "Write clients' data to a folder that opens at once.",
        "convert 'clients.jsonl.gz?client=author&text=body' clients"),
    "convert-model": _Command(
        data.CONVERT_MODEL, data.run_convert_model, "Write a GGUF file's model to a folder.",
        "convert-model SmolLM2-135M-Instruct.Q4_1.gguf smollm2"),
    "budget": _Command(privacy.BUDGET, privacy.budget,
        "Show what all releases in a ledger, or in several, have cost together.",
        "budget runs/mine/ledger.jsonl --delta 1e-5"),
    "verify": _Command(privacy.VERIFY, privacy.verify,
        "Check certificates: compute each epsilon again, and compare ledgers and weights.",
        "verify runs/mine/certificate.json --ledger runs/mine/ledger.jsonl"),
    "calibrate": _Command(privacy.CALIBRATE, privacy.calibrate,
        "Compute the noise that an epsilon needs, or the epsilon that a noise gives.",
        "calibrate --epsilon 7 --delta 3e-6 --rounds 20 --population 10000 "
        "--clients-per-round 1000"),
    "audit": _Command(privacy.AUDIT, privacy.audit,
        "Attack the releases of a config, for a lower bound on their epsilon; or compare how much "
        "published texts repeat training clients and held-out ones.",
        "audit quickstart --runs 16", takes_overrides=True),
    "fred": _Command(begin.FRED, begin.fred,
        "Rank public corpora by a private Frechet distance to clients' data.",
        "fred --private docstrings:jax,scipy --candidates docstrings:numpy docstrings:rich "
        "--epsilon 0.6 --delta 2e-6"),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    shared: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    description = "Private federated learning in JAX: simulate it, measure it, trust it."
    made = _Parser(prog="jaxpfl", description=description, epilog=_EXIT_CODES, **shared)
    made.add_argument("--version", action="version", version=f"jaxpfl {version('jaxpfl')}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        texts = {"help": command.help, "description": command.help}
        texts["epilog"] = f"example:\n  jaxpfl {command.example}\n\n{_EXIT_CODES}"
        added = commands.add_parser(name, **texts, **shared)
        add(added, {"--json": "print one JSON object on stdout, and nothing else"})
        added.set_defaults(command=command)
        add(added, command.arguments)
        if command.takes_overrides:
            usage = added.format_usage().removeprefix("usage: ").rstrip()
            added.usage = f"{usage} [--section.key VALUE ...]"
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    if arguments is None:
        _take_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json, parsed = "--json" in given, argparse.Namespace()
    try:
        if not given:
            return _shown(parser().format_help(), 0)
        if given[0] not in COMMANDS and not given[0].startswith("-"):
            near = difflib.get_close_matches(given[0], COMMANDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f": expected {', '.join(COMMANDS)}"
            raise InputError(f"jaxpfl: there is no command {given[0]!r}{hint}")
        prog, (parsed, rest) = f"jaxpfl {given[0]}", parser().parse_known_args(given)
        if not hasattr(parsed, "command"):
            raise InputError("jaxpfl: expected a command, see jaxpfl --help")
        if "--distributed" in rest:
            hint = "start it in one process; --launcher shares the points of a sweep"
            raise InputError(f"{prog}: there is no --distributed: {hint}")
        if rest and not parsed.command.takes_overrides:
            raise InputError(f"{prog}: unexpected argument {rest[0]!r}; see `{prog} --help`")
        compilation_cache.enable()
        parsed.command_line = shlex.join(["jaxpfl", *given])
        with terminable():
            result = parsed.command.run(parsed, rest)
    except (InputError, BudgetExhausted) as error:
        return _fail(error, _as_typed(str(error), given, parsed), error.exit_code, as_json)
    except KeyboardInterrupt as error:
        return _fail(error, str(error) or "interrupted", 128 + getattr(error, "number", 2), as_json)
    except OSError as error:
        # A failed write does not name its file.
        parts = vars(parsed)
        named: Any = error.filename or parts.get("out") or parts.get("directory")
        hint = files.where(named) if isinstance(error, FileNotFoundError) and error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "; make room: what was saved is kept, and a run goes on with `jaxpfl resume DIR`"
        where = f"{named}: " if named else ""
        return _fail(error, f"{where}{error.strerror or error}{hint}", 1, as_json)
    except SystemExit as ended:
        if ended.code:
            raise
        return _shown("", 0)  # --help and --version have been printed
    text, code = result.pop("text"), result.pop("exit_code", 0)
    if (lost := getattr(sys.stderr, "lost", None)) is not None:
        text += f"\nlost: messages, which stderr could not take: {lost}"
    line = json.dumps(result) if as_json else printable(text, allowed="\n\t")
    return _shown(f"{line}\n", code, result.get("report", result.get("out")))


def _shown(text: str, code: int, place: str | None = None) -> int:
    """Writes a result to stdout; the exit code says if it was lost, unless it says more already."""
    if (lost := _write(text)) is None:
        return code
    kept = f", see {place}" if place else ""
    what = f"error: stdout could not take the result: {lost.strerror}; the rest is done{kept}"
    print(printable(what), file=sys.stderr)
    return code or (128 + signal.SIGPIPE if lost.errno == errno.EPIPE else _LOST)


def _as_typed(message: str, given: Sequence[str], parsed: argparse.Namespace) -> str:
    """Names a message's settings by their options; one of a word only where a sentence begins.

    A section's setting is named by its last word if the message has the value that was typed.
    """
    options = {name: f"--{name.replace('_', '-')}" for name in vars(parsed) if "_" in name}
    values = {}
    for place, argument in enumerate(given):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            values[name[2:]] = value if equals else "".join(given[place + 1 : place + 2])
    options |= {name.replace("-", "_"): f"--{name}" for name in values}

    def option(match: re.Match[str]) -> str:
        name, rest = match[0], message[match.end() :]
        same = [key for key in values if key.endswith(f".{name}")]
        same = [f"--{key}" for key in same if rest.startswith(f" = {values[key]} ")]
        return options.get(name) or (same[0] if len(same) == 1 else name)

    return re.sub(r"((?:^|(?<=: ))[a-z]|(?<![\w./-])[a-z]+[._])[\w.]*(?= )", option, message)


def _fail(error: BaseException, message: str, code: int, as_json: bool) -> int:
    print(printable(f"error: {message}", allowed="\n"), file=sys.stderr)
    if as_json:
        record = {"kind": type(error).__name__, "message": message, "exit_code": code}
        _write(json.dumps({"error": record}) + "\n")
    return code


def _take_streams() -> None:
    """Makes stdin, stdout and stderr of this process safe to use.

    A closed one is opened on nothing. Else the next file, such as the ledger, would get its number,
    and what a library writes to stderr would be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free, which is this one. A result, which is written
            # to the second, is still refused.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    # Without a buffer, nothing is left that Python would try to write once more when it ends.
    unbuffered: Any = io.FileIO(2, "w", closefd=False)
    text = io.TextIOWrapper(unbuffered, encoding, "backslashreplace", write_through=True)
    sys.stderr = Messages(text)


def _write(text: str) -> OSError | None:
    """Writes a result to stdout; returns the error if not all of it could be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python would try once more when it ends.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        return error
    return None
