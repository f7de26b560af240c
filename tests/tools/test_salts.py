"""`tools/salts.py`: a salt makes another identity, and the tests that draw by one are found."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

from jaxpfl.federated.release import identity
from tools import salts

ENVIRONMENT = """
import json
import tests.conftest
from jaxpfl.federated.release.identity import environment
print(json.dumps(environment()))
"""


def salted(salt: str) -> dict:
    variables = {**os.environ, "JAXPFL_TEST_SALT": salt}
    command = [sys.executable, "-c", ENVIRONMENT]
    done = subprocess.run(
        command, cwd=salts.ROOT, env=variables, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_each_salt_is_another_identity():
    """TRUST 59: as another machine is."""
    one, again, other = map(salted, ("1", "1", "2"))
    assert one == again != other


def test_the_tests_that_make_an_identity_are_noted(tmp_path, monkeypatch):
    """TRUST 59: these alone are run under other salts."""
    monkeypatch.setenv(salts._FILE, str(tmp_path / "noted"))
    monkeypatch.setattr(identity, "described", lambda *_: "")
    for name in ("draws", "draws not"):
        around = salts.pytest_runtest_protocol(SimpleNamespace(nodeid=name))  # pyright: ignore
        next(around)
        if name == "draws":
            identity.described(*[None] * 5)  # pyright: ignore
        assert list(around) == []
    assert (tmp_path / "noted").read_text() == "draws\n"
