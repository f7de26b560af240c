"""Plants each defect of tests/defects, one at a time, and runs the test that must then fail.

    python tools/defects.py                    # all of them
    python tools/defects.py unclipped          # those whose name contains a word
    python tools/defects.py --write            # docs/trust_tests.md's table from the files alone

A test that passes shows little unless it fails on wrong code. Every promise in tests/defects names
a test, and a defect: a change to the code, in a copy of it, that breaks the promise. The named
tests are run once on the code as it is, where all must pass, and then each on its own defect, where
it must fail. Any other outcome (no such test, code that cannot be imported) is an error.
"""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "defects"
PAGE = ROOT / "docs" / "trust_tests.md"
BEGIN, END = "<!-- promises: written by tools/defects.py --write -->", "<!-- end of promises -->"

_WORKERS = 2
_LIMIT_S = 600


@dataclasses.dataclass(frozen=True)
class Defect:
    """A change that breaks a promise.

    Attributes:
      name: of the defect.
      what: the defect in words.
      file: relative to the repository.
      before, after: a piece of the file that is there once, and what stands in its place.
    """

    name: str
    what: str
    file: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Promise:
    """What the library does about a fault, the test that holds it, and what that test must catch.

    Attributes:
      case: the fault's number, which groups promises.
      fault: bad input, or what goes wrong, in a few words.
      promise: what the library does.
      test: FILE::NAME, relative to the repository.
      defect: what the test is seen to fail on.
    """

    case: int
    fault: str
    promise: str
    test: str
    defect: Defect


def read() -> list[Promise]:
    """All promises, by case."""
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            found.append(Promise(**{**entry, "defect": Defect(**entry["defect"])}))
    return sorted(found, key=lambda promise: promise.case)


def planted(defect: Defect, text: str) -> str:
    """The file's text with the defect.

    Raises:
      ValueError: what it changes is not there exactly once.
    """
    count = text.count(defect.before)
    if count != 1:
        raise ValueError(f"{defect.name}: {defect.file} holds {defect.before!r} {count} times")
    return text.replace(defect.before, defect.after)


def table(promises: list[Promise]) -> str:
    """The promises as a table in Markdown; a case is named in its first line."""
    rows: list[tuple[str, ...]] = [
        ("case", "fault", "what the library does", "test", "planted defect"),
        ("---",) * 5,
    ]
    before = None
    for each in promises:
        case = (str(each.case), each.fault)
        held_by = "`{}`: `{}`".format(*each.test.removeprefix("tests/").split("::"))
        first = ("", "") if case == before else case
        rows.append((*first, each.promise, held_by, f"`{each.defect.name}`"))
        before = case
    return markdown(rows)


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """A table of rows of cells."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with a text between its two marks."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{rest[rest.index(end) :]}"


def written(page: str, promises: list[Promise]) -> str:
    """The page with the table of the promises in its place."""
    return between(page, BEGIN, END, table(promises))


def copy_of_the_tree(target: Path) -> None:
    """Copies what git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def tested(tree: Path, tests: list[str]) -> tuple[int, str]:
    """The exit status of pytest on these tests in a copy, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S * len(tests),
    )
    return done.returncode, done.stdout


def caught(tree: Path, promise: Promise) -> str:
    """ "" if the promise's test fails on its defect, else what happened."""
    file = tree / promise.defect.file
    sound = file.read_text(encoding="utf-8")
    file.write_text(planted(promise.defect, sound), encoding="utf-8")
    try:
        status, printed = tested(tree, [promise.test])
    finally:
        file.write_text(sound, encoding="utf-8")
    # A test that cannot be imported or set up is an error of pytest's, too, and no failed test.
    if status == 1 and re.search(r"^FAILED |\b\d+ failed\b", printed, re.MULTILINE):
        return ""
    return "the test passes" if status == 0 else f"pytest ended with {status}:\n{printed[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants defects that the tests must catch.")
    parser.add_argument("names", nargs="*", help="only defects whose name contains one of these")
    parser.add_argument("--write", action="store_true", help="write docs/trust_tests.md's table")
    given = parser.parse_args()
    promises = read()
    if given.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), promises), encoding="utf-8")
        return 0
    if given.names:
        promises = [p for p in promises if any(name in p.defect.name for name in given.names)]
    began, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(_WORKERS):
            copy_of_the_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))
        tree = trees.get()
        status, printed = tested(tree, sorted({promise.test for promise in promises}))
        trees.put(tree)
        if status:
            print(f"the named tests do not all pass on the code as it is:\n{printed[-4000:]}")
            return 1

        def attempt(promise: Promise) -> tuple[Promise, str, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return promise, caught(tree, promise), time.monotonic() - start
            except (ValueError, subprocess.TimeoutExpired) as error:
                return promise, str(error), time.monotonic() - start
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(_WORKERS) as pool:
            for promise, fault, seconds in pool.map(attempt, promises):
                label = f"{promise.case:>3}  {promise.defect.name}"
                print(f"{label:<60} {fault or 'caught'}  {seconds:.0f} s", flush=True)
                missed += bool(fault)
    total = time.monotonic() - began
    print(f"{len(promises) - missed} of {len(promises)} defects caught, {total:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
