"""A path means the same file in each working folder, however its user writes the home folder."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl import files
from jaxpfl.cli import main
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.config.sections import PrivacyConfig
from jaxpfl.experiments.systems.workspace import ledger_path
from jaxpfl.models.checkpoints import folders, pretrained
from jaxpfl.privacy import Budget, Ledger
from jaxpfl.text import Vocabulary
from jaxpfl.text.tokenisers import public_words
from tests.trees import drawn

CLIENTS = jp.data.from_clients({f"c{i}": {"x": np.ones((1, 2), np.float32)} for i in range(4)})
PLAN = jp.Plan(1, jp.Clip(1.0), jp.Noise(8.0), jp.Poisson(4, 4), 1e-3)
MODEL = jp.models.from_functions(lambda _: {"w": jnp.zeros(2)}, lambda p, b: b["x"] @ p["w"])


def total(broadcast, examples, key):
    return examples.batches["x"].sum((0, 1))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder; each call to it goes to another working folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WHERE", str(tmp_path / "home"))
    monkeypatch.delenv("NOWHERE", raising=False)

    def go(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        return tmp_path / "home"

    go("home")
    go("a")
    return go


def test_home_and_variables_are_replaced(home):
    expected = home("a") / "x/y"
    for given in ("~/x/y", "$HOME/x/y", "${WHERE}/x/y", Path("~/x/y"), f"{expected}"):
        assert files.user_path(given) == expected
    for given in ("runs/x", "./~/x", "a~", "/data/$NOWHERE/x", "/~"):
        assert files.user_path(given) == Path(given)
    for given in ("$NOWHERE/x", "runs/${NOWHERE}", "~nobody-of-this-name/x"):
        with pytest.raises(InputError, match="home and environment variables"):
            files.user_path(given)


@pytest.mark.parametrize("name", ["~/l.jsonl", "$HOME/l.jsonl", Path("~/l.jsonl")])
def test_a_ledger_is_one_file_in_all_folders(home, name):
    """Releases in two folders are charged to one budget, by each function that charges."""
    budget = Budget(PLAN.epsilon() * 1.01, 1e-3)

    def release(budget=None):
        return jp.release(total, CLIENTS, PLAN, ledger=name, budget=budget)

    release(budget)
    home("b")
    with pytest.raises(BudgetExhausted):
        release()
    server = optax.sgd(1.0)
    algorithm = jp.algorithms.fed_avg(
        MODEL, client=optax.sgd(0.1), server=server, plan=PLAN, cohort=jp.CohortSpec(1, 1)
    )
    with pytest.raises(BudgetExhausted):
        jp.run(algorithm, CLIENTS, ledger=name, out="~/run")
    secure = jp.SecureSum(clients=4, clip_norm=1.0, noise_multiplier=8.0)
    with pytest.raises(BudgetExhausted):
        jp.secure_release(total, CLIENTS, secure, delta=1e-3, ledger=name)
    assert ledger_path(
        PrivacyConfig(epsilon=1.0, delta=1e-3, ledger=str(name)), Path("x")
    ).samefile(home("a") / "l.jsonl")
    Ledger.add_source(name, CLIENTS)
    assert len(Ledger.read(name)) == 1
    assert main(["budget", str(name), "--delta", "1e-3"]) == 0
    assert not os.listdir() and not (home("a") / "run").exists() and not os.listdir()


def test_a_ledger_has_one_key_by_whatever_link_it_is_named(home):
    there = home("a")
    budget = Budget(PLAN.epsilon() * 1.01, 1e-3)
    (there / "shared.jsonl").touch()
    os.symlink(there, "linked")
    os.symlink("linked/shared.jsonl", "file.jsonl")
    jp.release(total, CLIENTS, PLAN, ledger="file.jsonl", budget=budget)
    names = ("linked/shared.jsonl", "../home/shared.jsonl", "~/./shared.jsonl", "~/shared.jsonl/")
    for name in ("file.jsonl", *names):
        with pytest.raises(BudgetExhausted):
            jp.release(total, CLIENTS, PLAN, ledger=name)
    assert sorted(os.listdir(there)) == ["private", "shared.jsonl"]
    for name, what in (("linked", "a directory"), ("/dev/null", "a device")):
        with pytest.raises(InputError, match=what):
            jp.release(total, CLIENTS, PLAN, ledger=name)


@pytest.mark.parametrize(
    "open_",
    [
        jp.data.open,
        lambda name: shipped.find(f"{name}.yaml"),
        lambda name: public_words.public_words(f"{name}.json", None),
        lambda name: pretrained.load(name),
    ],
)
def test_a_file_that_is_missing_is_missing_somewhere(home, open_):
    home("b")
    with pytest.raises(InputError) as caught:
        open_("x.csv")
    assert os.getcwd() in str(caught.value)


def test_what_is_written_is_where_its_user_means(home, capsys):
    there = home("a")
    CLIENTS.save("~/clients")
    jp.data.Population.load("~/clients")
    vocabulary = Vocabulary.from_public(jp.data.from_clients({"a": {"text": ["a b c a"]}}), 5)
    vocabulary.save("$HOME/words.json")
    Vocabulary.load("~/words.json")
    model = jp.models.CNN("cnn", (8, 8, 1), 2, ((2, True),), 3)
    folders.save("~/model", model, drawn(model, 0))
    folders.load("~/model")
    rows = "".join(f"c{i},{i % 2},{i}.5\n" for i in range(40))
    Path("t.csv").write_text(f"client,y,x\n{rows}")
    assert main(["convert", "t.csv?client=client&features=x&label=y", "~/table"]) == 0
    assert main(["init", "t.csv", "--label", "y", "--features", "x", "--out", "~/t.yaml"]) == 0
    names = {"clients", "words.json", "model", "table", "t.yaml"}
    assert names <= {*os.listdir(there)} and os.listdir() == ["t.csv"]
    assert main(["run", "~/t.yaml", "--out", "$NOWHERE/run"]) == 2
    assert "home and environment variables" in capsys.readouterr().err
