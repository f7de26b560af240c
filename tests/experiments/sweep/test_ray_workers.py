"""Points in processes of Ray come to what they come to in one process."""

import importlib.util
import json
import threading
import time

import psutil
import pytest
import yaml

from jaxpfl import cli
from tests.experiments.sweep.three_points import BASE

# So that two runs of a point come to the same numbers.
CONFIG = {
    **BASE,
    "training": BASE["training"] | {"rounds": 1},
    "run": {"reproducible_noise": True, "devices": 2},
}


def sweep(path, out, *options):
    code = cli.main(["sweep", str(path), "--out", str(out), *options])
    record = out / "sweep.json"
    return code, json.loads(record.read_text())["rows"] if record.exists() else None


def kill_a_worker(out):
    """As soon as a point has a ledger."""
    while not any(out.rglob("ledger.jsonl")):
        time.sleep(0.1)
    started = psutil.Process().children(recursive=True)
    next(each for each in started if each.name().startswith("ray::_work")).kill()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_get_it(path, tmp_path, capsys):
    assert sweep(path, tmp_path / "out", "--ray", "1") == (2, None)
    assert "pip install 'jaxpfl[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Ray forks to start programs, of which JAX warns as of every fork; and it leaves files open.
@pytest.mark.filterwarnings(
    "ignore:os.fork", "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.long
def test_two_workers_of_ray_come_to_the_same_numbers_though_one_is_killed(path, tmp_path, capsys):
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'jaxpfl[ray]')")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    mapping = yaml.safe_load(path.read_text())
    # Refused only when the data is read.
    mapping["cases"] = {"good": {}, "bad": {"data.source": "digits?clients=no"}}
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    code, alone = sweep(path, tmp_path / "alone")
    assert code == 4
    (killer := threading.Thread(target=kill_a_worker, args=[tmp_path / "ray"], daemon=True)).start()
    code, found = sweep(path, tmp_path / "ray", "--ray", "2")
    assert code == 4 and not killer.is_alive()
    assert found == alone
    assert [row["runs"] for row in found] == [1, 1, 1, 0, 0, 0]
    assert "failed: case=bad,clients_per_round=5" in capsys.readouterr().out
