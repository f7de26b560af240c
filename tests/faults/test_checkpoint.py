"""Checkpoints under damage, full disks and half-done work."""

import errno
import json
import os
import resource
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.records import artifacts
from jaxpfl.experiments.records.checkpoint import Checkpoints
from tests.experiments.crashes import damages


def _state(value: float):
    half = jnp.full(3, value, jnp.bfloat16)
    layer = {"w": jnp.full((3, 4), value, jnp.float32), "none": jnp.zeros((0, 2)), "half": half}
    params = {"layer": layer}
    server = optax.sgd(0.1, momentum=0.9).init(params)
    return {"params": params, "server": server, "round": jnp.int32(value)}


def _saved(folder: Path, *rounds: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, run="r1")
    for round in rounds:
        checkpoints.save(round, _state(round), ledger_head=f"head{round}")
    checkpoints.wait()
    return checkpoints


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    _saved(folder, 1, 2)
    return folder


@pytest.fixture
def checkpoints(two_rounds, tmp_path) -> Checkpoints:
    """Those of rounds 1 and 2, in `tmp_path`."""
    shutil.copytree(two_rounds, tmp_path, dirs_exist_ok=True)
    return Checkpoints(tmp_path, run="r1")


def _assert_is_round(restored, round: int) -> None:
    assert restored.round == round
    assert restored.ledger_head == f"head{round}"
    expected = _state(round)
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
    for found, wanted in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True
    ):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_a_checkpoint_restores_to_the_same_bits_and_structure(tmp_path):
    """The last two are kept, and nothing else lies around."""
    assert Checkpoints(tmp_path, run="r1").restore(_state(0), warn=pytest.fail) is None
    assert _saved(tmp_path, 1, 2, 3, 4).rounds() == [3, 4]
    assert sorted(os.listdir(tmp_path)) == ["round_00000003", "round_00000004"]
    restored = Checkpoints(tmp_path, run="r1").restore(_state(0), warn=pytest.fail)
    _assert_is_round(restored, 4)


def test_every_damage_is_found_and_the_previous_step_taken(tmp_path, checkpoints):
    """TRUST 35: flips, truncation, missing files -> found by SHA-256; the message names both."""
    latest = tmp_path / "round_00000002"
    number = 0
    for name, path, damage in damages(latest):
        content = path.read_bytes()
        damage(path)
        messages = []
        restored = checkpoints.restore(_state(0), warn=messages.append)
        _assert_is_round(restored, 1)
        assert len(messages) == 1, name
        assert "round_00000002" in messages[0], name
        assert "round_00000001" in messages[0], name
        path.write_bytes(content)
        number += 1
    assert number > 20
    _assert_is_round(checkpoints.restore(_state(0), warn=pytest.fail), 2)
    # What the manifest does not list is not trusted, either.
    (latest / "state" / "extra").write_text("x")
    messages = []
    _assert_is_round(checkpoints.restore(_state(0), warn=messages.append), 1)
    assert "extra" in messages[0]
    # Nothing is invented where nothing is intact.
    for round in (1, 2):
        (tmp_path / f"round_0000000{round}" / "record.json").unlink()
    with pytest.raises(CorruptFile, match=r"round_00000002.*round_00000001"):
        checkpoints.restore(_state(0), warn=lambda _: None)


def test_rubbish_of_a_crash_is_removed_and_never_restored(tmp_path):
    """TRUST 33: mid-save and mid-delete leave telling names only."""
    _saved(tmp_path, 1)
    os.rename(tmp_path / "round_00000001", tmp_path / ".tmp-00000002")
    _saved(tmp_path, 3)
    (tmp_path / ".deleted-round_00000001").mkdir()
    (tmp_path / ".deleted-round_00000001" / "record.json").write_text("half")
    checkpoints = Checkpoints(tmp_path, run="r1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["round_00000003"]
    _assert_is_round(checkpoints.restore(_state(0), warn=pytest.fail), 3)


@pytest.mark.parametrize(
    ("module", "call"),
    [(ocp.PyTreeCheckpointHandler, "save"), (files, "fsync_tree"), (artifacts, "commit")],
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_failing_disk_leaves_the_last_good_checkpoint(
    tmp_path, monkeypatch, module, call, number
):
    """TRUST 36: full, read-only or over quota -> the error comes out, the last good one stays."""
    checkpoints = _saved(tmp_path, 1)

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(module, call, fails)
        with pytest.raises(OSError) as caught:
            checkpoints.save(2, _state(2), ledger_head="head2")
            checkpoints.wait()
    assert caught.value.errno == number
    assert [entry.name for entry in tmp_path.iterdir()] == ["round_00000001"]
    after = Checkpoints(tmp_path, run="r1")
    _assert_is_round(after.restore(_state(0), warn=pytest.fail), 1)


def test_another_runs_checkpoint_is_refused(tmp_path):
    """And another model's, with the name of the leaf."""
    _saved(tmp_path, 1)
    with pytest.raises(InputError, match="belongs to run r1, expected run r2"):
        Checkpoints(tmp_path, run="r2").restore(_state(0), warn=pytest.fail)
    other = _state(0)
    other["params"]["layer"]["w"] = jnp.zeros((3, 5), jnp.float32)
    with pytest.raises(InputError, match=r"params\.layer\.w"):
        Checkpoints(tmp_path, run="r1").restore(other, warn=pytest.fail)


def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """TRUST 33: what was donated or changed meanwhile is saved as it was; half of it is nothing."""
    released, real = threading.Event(), artifacts.commit

    def waiting(*arguments):
        assert released.wait(60)
        real(*arguments)

    monkeypatch.setattr(artifacts, "commit", waiting)
    state = {"device": jnp.arange(200_000, dtype=jnp.float32), "host": np.arange(5)}
    expected = {name: np.array(leaf) for name, leaf in state.items()}
    with Checkpoints(tmp_path, run="r1") as checkpoints:
        checkpoints.save(1, state, ledger_head="head1")
        changed = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(state["device"])
        state["host"][:] = -1
        jax.block_until_ready(changed)
        assert checkpoints.rounds() == []
        released.set()
        checkpoints.wait()
        assert checkpoints.rounds() == [1]
        like = {"device": changed, "host": state["host"]}
        restored = checkpoints.restore(like, warn=pytest.fail)
    assert restored is not None
    for name, leaf in expected.items():
        np.testing.assert_array_equal(restored.state[name], leaf)


def test_a_failure_in_the_background_comes_out_and_hides_no_other(tmp_path, monkeypatch):
    """TRUST 36: at the next save or at the end, whichever comes first."""

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "commit", full)
        with pytest.raises(OSError), Checkpoints(tmp_path, run="r1") as checkpoints:
            checkpoints.save(1, _state(1))
        with pytest.raises(OSError), Checkpoints(tmp_path, run="r1") as checkpoints:
            checkpoints.save(1, _state(1))
            checkpoints.save(2, _state(2))
        with pytest.raises(KeyError) as caught, Checkpoints(tmp_path, run="r1") as checkpoints:
            checkpoints.save(1, _state(1))
            raise KeyError("other")
    assert any("full" in note for note in caught.value.__notes__)
    assert list(tmp_path.iterdir()) == []


def test_sharded_arrays_are_written_and_read_as_they_lie(tmp_path):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    dealt = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    with Checkpoints(tmp_path, run="r1") as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(values, dealt)})
        checkpoints.wait()
        for sharding in (dealt, whole):
            like = {"x": jax.device_put(np.zeros_like(values), sharding)}
            restored = checkpoints.restore(like, warn=pytest.fail)
            assert restored is not None
            assert restored.state["x"].sharding.is_equivalent_to(sharding, 2)
            np.testing.assert_array_equal(restored.state["x"], values)


def test_a_disk_that_is_full_while_the_arrays_are_written_is_an_os_error(tmp_path):
    """TRUST 36: also where Orbax meets it in the background; the last good step is intact."""
    large = {"w": np.random.default_rng(0).random(100_000, np.float32)}
    with Checkpoints(tmp_path, run="r1") as checkpoints:
        checkpoints.save(1, large)
        checkpoints.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(OSError, match="round_00000002"):
                checkpoints.save(2, large)
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(tmp_path) == ["round_00000001"]
        restored = checkpoints.restore(large, warn=pytest.fail)
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], large["w"])


def _hashed_again(path: Path) -> None:
    """Gives a checkpoint that was altered the hashes of what it holds now."""
    manifest = json.loads((path / "manifest.json").read_text())
    kept = {name: manifest[name] for name in ("what", "run", "private", "ledger_head")}
    temporary = artifacts.begin(path)
    temporary.rmdir()
    path.rename(temporary)
    artifacts.commit(temporary, path, artifacts.Manifest(**kept))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("_METADATA", b"{}"),
        ("_METADATA", b"[]"),
        ("_METADATA", b'"\xff"'),
        ("*/.zarray", b""),
        ("*/.zarray", None),
        ("*/0*", b""),
        ("*/0*", None),
    ],
)
def test_files_that_were_written_wrongly_are_damage(tmp_path, name, content):
    """TRUST 35: also where their hashes are right."""
    checkpoints = _saved(tmp_path, 1, 2)
    latest = tmp_path / "round_00000002"
    for path in (latest / "state").glob(name):
        path.unlink() if content is None else path.write_bytes(content)
    _hashed_again(latest)
    messages = []
    _assert_is_round(checkpoints.restore(_state(0), warn=messages.append), 1)
    assert "round_00000002" in messages[0]


def _wrapped(cause: ValueError) -> Exception:
    """As Orbax raises what is wrong with a part of an array."""
    error = Exception("Encountered error while reading array index")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, "Too many open files"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        ValueError("RESOURCE_EXHAUSTED: Error reading 0/.zarray: Too many open files"),
        ValueError("UNKNOWN: Error reading 0/.zarray: Input/output error"),
        _wrapped(ValueError("UNKNOWN: Error reading 0/0.0: Input/output error")),
    ],
)
def test_what_the_machine_cannot_read_now_is_no_damage(checkpoints, monkeypatch, error):
    """TRUST 34: an older checkpoint would repeat rounds, which may be charged again."""

    def fails(*_, **__):
        raise error

    kind = OSError if type(error) in (ValueError, Exception) else type(error)
    manifest = [(Path, "read_bytes")] if type(error) is OSError else []
    for owner, reads in [(ocp.PyTreeCheckpointHandler, "restore"), *manifest]:
        with monkeypatch.context() as patched:
            patched.setattr(owner, reads, fails)
            with pytest.raises(kind):
                checkpoints.restore(_state(0), warn=pytest.fail)
    _assert_is_round(checkpoints.restore(_state(0), warn=pytest.fail), 2)


def test_a_fault_of_the_program_is_no_damage(checkpoints, monkeypatch):
    """A KeyError of our own would otherwise silently resume from an older checkpoint."""
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", lambda *_, **__: {})
    with pytest.raises(KeyError):
        checkpoints.restore(_state(0), warn=pytest.fail)
