"""The file of a run's secret: it is the run's own, and nobody else's will do."""

import shutil

import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.run_directory import run_id, saved_secret


def test_another_runs_secret_is_refused(tmp_path):
    """TRUST 33: with it, all rounds would be drawn anew, and the old ones be lost."""
    own, other = tmp_path / "own" / "secret.json", tmp_path / "other" / "secret.json"
    made = saved_secret(own, reproducible_seed=None, purpose="a")
    run = f"a system {run_id(made)}"
    again = saved_secret(own, reproducible_seed=None, purpose="a", run=run)
    assert again.words == made.words
    saved_secret(other, reproducible_seed=None, purpose="a")
    shutil.copy(other, own)
    with pytest.raises(InputError, match="the secret of another run"):
        saved_secret(own, reproducible_seed=None, purpose="a", run=run)
    own.unlink()
    with pytest.raises(CorruptFile, match="is missing"):
        saved_secret(own, reproducible_seed=None, purpose="a", run=run)
    assert not own.exists()
