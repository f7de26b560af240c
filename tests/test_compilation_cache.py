"""The compilation cache: where it is, that it is used, and that it grows no further than it may."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import jaxpfl as jp
from jaxpfl import compilation_cache
from tests.faults.runs import adding

COMPILE = """
from jaxpfl import compilation_cache
compilation_cache.enable()
import jax, jax.numpy as jnp
from jax import monitoring
hits = []
monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None
)
print(float(jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((3, 3)) / 7)).hex(), len(hits) > 0)
"""


def _fresh(tmp_path: Path, **more: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    least = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**mine, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", **least, **more}


def _compile(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILE],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_a_second_process_reads_what_the_first_compiled_and_computes_the_same_bits(tmp_path):
    first, second = _compile(_fresh(tmp_path)), _compile(_fresh(tmp_path))
    assert first[1] == "False" and second[1] == "True"
    assert first[0] == second[0]
    kept = tmp_path / "jaxpfl" / "compiled"
    assert kept.stat().st_mode & 0o077 == 0
    # Another processor or other flags find nothing; a file that was cut off is no fault.
    assert _compile(_fresh(tmp_path, XLA_FLAGS="--xla_cpu_max_isa=SSE4_2"))[1] == "False"
    for file in kept.iterdir():
        file.write_bytes(file.read_bytes()[:40])
    assert _compile(_fresh(tmp_path)) == first


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder that `enable` would use, of which JAX has not heard."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    return compilation_cache.caches() / "compiled"


def test_jaxs_own_settings_go_first(cache, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    compilation_cache.enable()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"
    assert not cache.parent.exists()


@pytest.mark.parametrize("named", ["", "relative"])
def test_without_a_cache_folder_of_their_own_it_is_in_the_users_home(monkeypatch, tmp_path, named):
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compilation_cache.caches().is_relative_to(tmp_path)


def test_a_folder_that_cannot_be_made_or_that_others_may_write_is_not_used(cache):
    """TRUST 39: what is found there is executed."""
    cache.parent.write_text("a file, where a folder should be")
    compilation_cache.enable()
    cache.parent.unlink()
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    compilation_cache.enable()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_the_programs_compiled_longest_ago_go_first(cache, monkeypatch):
    monkeypatch.setattr(compilation_cache, "_MOST_BYTES", 250)
    cache.mkdir(parents=True)
    for age, name in enumerate(("new", "older", "oldest")):
        (cache / name).write_bytes(bytes(100))
        os.utime(cache / name, (10**9 - age, 10**9 - age))
    compilation_cache.enable()
    assert {file.name for file in cache.iterdir()} == {"new", "older"}


@pytest.fixture
def without_a_cache(monkeypatch, tmp_path):
    """A process that has imported JAX, and in which nobody named a folder for programs."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "_LEAST_SECONDS", 0.0)
    jax.config.update("jax_compilation_cache_dir", None)
    # So that JAX would keep every program, if it still had the folder after the run.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax_cache.reset_cache()
    yield tmp_path / "jaxpfl" / "compiled"
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def test_a_run_from_python_keeps_its_programs_and_leaves_jaxs_settings_alone(
    without_a_cache, tmp_path
):
    settings = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in settings]
    jp.run(*adding(1), ledger=tmp_path / "ledger.jsonl", out=tmp_path / "run")
    kept = {file.name for file in without_a_cache.iterdir()}
    assert any("accumulate" in name for name in kept)
    assert [getattr(jax.config, name) for name in settings] == before
    jax.jit(lambda x: x * 0.654321)(jnp.ones(3, jnp.float32))
    assert {file.name for file in without_a_cache.iterdir()} == kept


@pytest.mark.parametrize("setting", ["jax_compilation_cache_dir", "jax_enable_compilation_cache"])
def test_a_folder_that_jax_has_and_a_cache_that_is_off_stay_so(without_a_cache, tmp_path, setting):
    before = getattr(jax.config, setting)
    value = str(tmp_path / "own") if setting.endswith("dir") else False
    jax.config.update(setting, value)
    try:
        with compilation_cache.enabled():
            assert getattr(jax.config, setting) == value
            assert jax.config.jax_compilation_cache_dir in (None, value)
    finally:
        jax.config.update(setting, before)
    assert not without_a_cache.exists()
