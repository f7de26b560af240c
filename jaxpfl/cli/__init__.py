"""The command line. Results go to stdout, progress and messages to stderr.

JAX is imported only after the arguments are checked, so that help appears at once.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

from jaxpfl import compilation_cache
from jaxpfl.cli import (
    budget,
    calibrate,
    compare,
    configs,
    convert,
    export,
    fred,
    run,
    sweep,
    synthesize,
)
from jaxpfl.errors import BudgetExhausted, InputError

_EXIT_CODES = """\
exit codes:
  0    done
  1    a fault of the program or the machine, such as a full disk
  2    bad input: the message says where, what was found and what was expected
  3    the privacy budget is exhausted: the next release was not made
  130  interrupted by SIGINT; 143: by SIGTERM. A run was saved: `jaxpfl resume DIR`
"""


class _Parser(argparse.ArgumentParser):
    """Raises `InputError` for bad arguments, so that they are reported like other bad input."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")


class _Command(NamedTuple):
    """A command of the command line.

    Attributes:
      help: a sentence.
      add: adds the command's arguments to a parser.
      run: takes the parsed and the unknown arguments and returns the result: its entry "text" is
        printed, or with --json all other entries.
      takes_overrides: whether unknown arguments set keys of a config.
    """

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], dict[str, Any]]
    takes_overrides: bool = False


_COMMANDS = {
    "run": _Command("Carry out an experiment.", run.add_run, run.run, takes_overrides=True),
    "configs": _Command("List the configs that come with jaxpfl.", configs.add, configs.run),
    "resume": _Command(
        "Go on with an interrupted run, to the same final bits.", run.add_directory, run.resume
    ),
    "sweep": _Command("Carry out one experiment at every point of a grid.", sweep.add, sweep.run),
    "synthesize": _Command(
        "Write the synthetic corpus of a run, and the card of its privacy.",
        synthesize.add,
        synthesize.run,
    ),
    "export": _Command(
        "Write what a finished run made, a model or synthetic texts, in formats others read.",
        export.add,
        export.run,
    ),
    "report": _Command(
        "Write a run's report.html and its plots anew.", run.add_directory, run.report
    ),
    "compare": _Command(
        "Put runs side by side: scores, curves, and what each and all of them cost.",
        compare.add,
        compare.run,
    ),
    "convert": _Command(
        "Write clients' data to a folder that opens at once.", convert.add, convert.run
    ),
    "budget": _Command(
        "Say what the releases in a ledger have cost together.", budget.add, budget.run
    ),
    "calibrate": _Command(
        "Noise for an epsilon, or epsilon for a noise.", calibrate.add, calibrate.run
    ),
    "fred": _Command(
        "Rank public corpora by a private Frechet distance to clients' data.", fred.add, fred.run
    ),
}


def _parser() -> argparse.ArgumentParser:
    shared: dict[str, Any] = {
        "epilog": _EXIT_CODES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    description = "Private federated learning in JAX: simulate it, measure it, trust it."
    parser = _Parser(prog="jaxpfl", description=description, **shared)
    parser.add_argument("--version", action="version", version=f"jaxpfl {version('jaxpfl')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in _COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.help, **shared)
        added.add_argument(
            "--json", action="store_true", help="print one JSON object on stdout, and nothing else"
        )
        added.set_defaults(command=command)
        command.add(added)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        if not given:
            _parser().print_help()
            return 0
        parsed, rest = _parser().parse_known_args(given)
        if not hasattr(parsed, "command"):
            raise InputError("jaxpfl: expected a command, see jaxpfl --help")
        if rest and not parsed.command.takes_overrides:
            raise InputError(f"jaxpfl: unexpected argument {rest[0]!r}")
        compilation_cache.enable()
        parsed.command_line = shlex.join(["jaxpfl", *given])
        result = parsed.command.run(parsed, rest)
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
