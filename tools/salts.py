"""Runs the tests that draw by a run's identity under many identities.

    python tools/salts.py            30 salts, the fast tests; prints the tests that failed, by salt
    python tools/salts.py 5 PATH...  5 salts, the tests of these files or folders

Cohorts and noise follow from a run's identity, and so from processor, flags and versions. A test
must hold whatever they are. `JAXPFL_TEST_SALT` (tests/conftest.py) makes another identity. The
first run is of all tests, and finds those in which an identity was made; the others are of these.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_FILE = "JAXPFL_SALTS_FILE"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes a test that makes an identity, itself or in its fixtures; for the first run."""
    from jaxpfl.federated.release import identity

    path, real, made = os.environ.get(_FILE), identity.described, []

    def described(*given: object) -> str:
        made.append(item.nodeid)
        return real(*given)  # pyright: ignore[reportArgumentType]

    identity.described = described
    try:
        return (yield)
    finally:
        identity.described = real
        if path and made:
            with open(path, "a", encoding="utf-8") as file:
                file.write(made[0] + "\n")


def run(salt: int, arguments: list[str], **environment: str) -> list[str]:
    """The tests that fail under a salt."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "JAXPFL_TEST_SALT": str(salt), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"salt {salt}: {done.stdout.strip().splitlines()[-1:]}", flush=True)
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


def main(salts: int, paths: list[str]) -> int:
    """The number of tests that failed under some salt."""
    with tempfile.TemporaryDirectory() as folder:
        noted, chosen = Path(folder) / "noted", Path(folder) / "chosen"
        noted.touch()
        failed = {0: run(0, ["-p", "tools.salts", *paths], **{_FILE: str(noted)})}
        tests = sorted(set(noted.read_text().splitlines()))
        print(f"{len(tests)} tests draw by an identity")
        chosen.write_text("\n".join(tests))
        for salt in range(1, salts if tests else 1):
            failed[salt] = run(salt, [f"@{chosen}"])
    for salt, names in failed.items():
        for name in names:
            print(f"salt {salt}: {name}")
    return len({name for names in failed.values() for name in names})


if __name__ == "__main__":
    number, *files = sys.argv[1:] or ["30"]
    sys.exit(bool(main(int(number), files)))
