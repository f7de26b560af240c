"""Several systems on the same clients and one ledger: each statement shows what all cost."""

import json
import re

import pytest

from jaxpfl.cli import main
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from tests.experiments.conftest import NEAR, write_lines

CONFIG = """\
data: {{source: "{folder}/clients.jsonl", public: "{folder}/public.jsonl",
        split: {{train: 0.7, valid: 0.15, test: 0.15}}}}
model: {{name: cifg_lm, vocab_size: 24, embedding: 4, hidden: 4, projection: 4, sequence_length: 6}}
privacy: {{epsilon: 8.0, delta: 1e-3, clip_norm: 0.5, budget_epsilon: 30.0,
          ledger: "{folder}/shared.jsonl"}}
training: {{rounds: 2, clients_per_round: 8, batch_size: 4, max_examples: 4, clients_per_bucket: 8}}
evaluation: {{every: 0, declared_public: false}}
run: {{devices: 2}}
"""


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "clients.jsonl", NEAR, 120, 3, "canarytext{}")
    write_lines(tmp_path / "public.jsonl", NEAR, 30, 4)
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def carried_out(capsys, *arguments) -> str:
    """The statement that a command ends with."""
    assert main([*map(str, arguments), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    return record.get("privacy") or record["statement"]


def epsilons(statement: str) -> list[float]:
    return [float(found) for found in re.findall(r"epsilon = ([0-9.]+)", statement)]


def spent(ledger: Ledger, runs: set[str]) -> float:
    own = [charge for charge in ledger.charges if charge.run in runs]
    return guarantee_of(own, 1e-3).epsilon()


def test_fred_on_the_source_and_a_run_on_its_training_split_share_one_ledger(folder, capsys):
    """TRUST 29: a split keeps the clients of its source, so both are charged to the one ledger."""
    shared = folder / "shared.jsonl"
    fred = carried_out(
        capsys, "fred", "--private", folder / "clients.jsonl", "--candidates",
        folder / "public.jsonl", "--epsilon", 4, "--delta", 1e-3, "--embedder", "hashed:8",
        "--ledger", shared, "--out", folder / "fred",
    )  # fmt: skip
    first = {charge.run for charge in Ledger.read(shared).charges}
    run = carried_out(capsys, "run", folder / "run.yaml", "--out", folder / "run")
    ledger = Ledger.read(shared)
    second = {charge.run for charge in ledger.charges} - first
    assert (len(first), len(second)) == (1, 1)
    assert len(ledger) == 3 + 2
    assert not (folder / "run" / "ledger.jsonl").exists()
    total = ledger.spent(1e-3)
    for found, expected in (
        (epsilons(fred), [spent(ledger, first)]),
        (epsilons(run), [spent(ledger, second), total]),
    ):
        assert found == pytest.approx(expected, rel=1e-3)
    assert total > 1.1 * max(spent(ledger, first), spent(ledger, second))
    assert fred.endswith("if nothing else is released from these clients")


def test_a_run_without_privacy_that_no_budget_has_room_for_says_so(folder, capsys):
    """And not that its delta, which it has none of, is wrong."""
    carried_out(capsys, "run", folder / "run.yaml", "--out", folder / "first")
    text = (folder / "run.yaml").read_text()
    private = re.search(r"privacy: \{.*?\}", text, re.S)[0]
    ledger = folder / "shared.jsonl"
    without = f'privacy: {{private: false, clip_norm: 0.5, ledger: "{ledger}"}}'
    (folder / "without.yaml").write_text(text.replace(private, without))
    # The budget is recorded in the ledger.
    assert main(["run", str(folder / "without.yaml"), "--out", str(folder / "second")]) == 3
    assert "would exceed the budget" in capsys.readouterr().err
    assert len(Ledger.read(ledger).charges) == 2
