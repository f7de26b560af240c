"""Several processes of `jax.distributed`: real pairs of them, on this machine."""

from pathlib import Path

import pytest

from tests.federated.pairs import JOINED, ended, free_address, start

REFUSED = """
import numpy as np
from pathlib import Path
import jaxpfl as jp
from jaxpfl.experiments import carry_out, choose_corpus, registry
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.sweep.points import run_sweep
from jaxpfl.federated.release import Releaser

values = np.zeros((1, 2), np.float32)
clients = jp.data.from_clients({str(k): {"x": values} for k in range(8)}, name="x", unit="y")
out = Path(sys.argv[3])
config = shipped.find(Path("quickstart"))
said = {}
for name, call in {
    "release": lambda: jp.release(lambda b, e, k: e.mask.sum(), clients, None, ledger=out / "l"),
    "Releaser": lambda: Releaser(clients, None, None, run=""),
    "run": lambda: carry_out.run(registry.load(config), out / "run", progress=False),
    "resume": lambda: carry_out.resume(out / "run"),
    "sweep": lambda: run_sweep(None, out / "sweep"),
    "fred": lambda: choose_corpus.choose_corpus(
        "docstrings:jax", ["docstrings:numpy"], plan=None, out=out / "f"
    ),
}.items():
    try:
        call()
    except jp.InputError as error:
        assert "2 processes" in str(error), error
        said[name] = str(error)
print(*said)
"""


@pytest.mark.long
def test_what_cannot_be_shared_among_processes_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    address = free_address()
    pair = [
        start(["-c", JOINED + REFUSED, str(index), address, str(tmp_path)]) for index in range(2)
    ]
    for code, said, errors in ended(pair):
        assert code == 0, errors
        assert said.split() == ["release", "Releaser", "run", "resume", "sweep", "fred"]
    assert not list(tmp_path.iterdir())
