"""`tools/salts.py`: a salt makes another identity, and the tests that draw by one are found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from jaxpfl.federated.release import identity
from tools import salts

ENVIRONMENT = """
import json
import tests.conftest
import jax
from jaxpfl.federated.release.identity import environment
jax.jit(lambda x: x * 3.0 + 1.0)(2.0).block_until_ready()
print(json.dumps(environment()))
"""


def salted(salt: str, cache: Path) -> dict:
    variables = {"JAXPFL_TEST_SALT": salt, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    command, options = [sys.executable, "-c", ENVIRONMENT], {"capture_output": True, "check": True}
    done = subprocess.run(command, cwd=salts.ROOT, env=os.environ | variables, **options)
    return json.loads(done.stdout)


def test_each_salt_is_another_identity(tmp_path):
    """TRUST 59: as another machine is. What was compiled under one is not compiled again."""
    environments, compiled = [], []
    for salt in ("1", "2"):
        environments.append(salted(salt, tmp_path))
        compiled.append({path.name for path in tmp_path.glob("*-cache")})
    one, other = environments
    # Nothing but the flags differs.
    assert one["flags"] != other["flags"] and one | {"flags": other["flags"]} == other
    assert compiled[0] and compiled[0] == compiled[1]


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
