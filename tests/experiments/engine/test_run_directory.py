"""What is refused before a run begins, and a secret that is not the run's own."""

import shutil

import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.algorithms import Algorithm
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.run_directory import saved_secret


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_plan_for_another_population_is_refused_without_the_datas_number(tmp_path, unit):
    clients = jp.data.from_clients({f"c{i}": {"x": np.zeros(1, np.float32)} for i in range(37)})

    def client_fn(broadcast, examples, key):
        return examples.mask.sum(dtype=np.float32)

    client_fn.example_bound = 1.0  # pyright: ignore[reportFunctionMemberAccess]
    plan = jp.Plan(1, jp.Clip(1.0), jp.Noise(1.0), jp.Poisson(64, 8), 1e-4, unit=unit)
    query = jp.Query("s", client_fn, plan, jp.CohortSpec(2, 4))
    algorithm = Algorithm("a", lambda key: 0.0, lambda s, release, round: (s, {}), (query,))
    with pytest.raises(InputError, match=f"population of 64 {unit}s") as refused:
        jp.run(algorithm, clients, ledger=tmp_path / "ledger.jsonl", out=tmp_path / "out")
    assert "37" not in str(refused.value).replace(str(tmp_path), "")


def test_another_runs_secret_is_refused(tmp_path):
    """TRUST 33: with it, all rounds would be drawn anew, and the old ones be lost."""
    own, other = tmp_path / "own" / "secret.json", tmp_path / "other" / "secret.json"
    made = saved_secret(own, reproducible_seed=None, purpose="a")
    again = saved_secret(own, reproducible_seed=None, purpose="a", run=made.public_name)
    assert again.words == made.words
    saved_secret(other, reproducible_seed=None, purpose="a")
    shutil.copy(other, own)
    with pytest.raises(InputError, match="the secret of another run"):
        saved_secret(own, reproducible_seed=None, purpose="a", run=made.public_name)
    own.unlink()
    with pytest.raises(CorruptFile, match="is missing"):
        saved_secret(own, reproducible_seed=None, purpose="a", run=made.public_name)
    assert not own.exists()
