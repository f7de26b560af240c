"""Clients' own data under a public name is refused, however it is named, read or copied."""

import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.data import Population, from_clients
from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.central.public_check import PrivateContent, contents
from jaxpfl.experiments.config import reader
from jaxpfl.experiments.systems.federated_training.study import prepare
from tests.experiments.conftest import changed_config

WORDS = [f"word{number}" for number in range(400)]


def write(path, seed, clients=30, rows=3):
    """Texts of three sentences of seven words each."""
    rng = np.random.default_rng(seed)
    with open(path, "w") as file:
        for number in range(clients):
            for _ in range(rows):
                drawn = rng.choice(WORDS, (3, 7))
                text = " ".join(" ".join(sentence).capitalize() + "." for sentence in drawn)
                file.write(json.dumps({"client": f"c{number}", "text": text}) + "\n")
    return path


@pytest.fixture
def private(tmp_path):
    return open_population(str(write(tmp_path / "clients.jsonl", 0)))


def refused(private: Population, corpus: Population) -> bool:
    try:
        PrivateContent(private).refuse(corpus, "data.public = 'x'")
    except InputError as error:
        assert "data.public = 'x' holds the private clients' own data" in str(error)
        # How much of it is private.
        assert not re.search(r"\d", str(error))
        return True
    return False


def _texts(population: Population) -> list[str]:
    return population.columns["text"].to_pylist()


def test_the_same_data_is_refused_under_any_name(tmp_path, private):
    path = tmp_path / "clients.jsonl"
    os.symlink(path, tmp_path / "link.jsonl")
    (tmp_path / "copy.jsonl").write_bytes(path.read_bytes())
    (tmp_path / "prose.txt").write_text("\n\n".join(_texts(private)))
    for source in (
        path,
        tmp_path / "link.jsonl",
        tmp_path / "sub" / ".." / "copy.jsonl",
        f"{path}?client=*",
        f"{path}?split=sentences",
        f"{path}?split=lines&min_examples=2",
        tmp_path / "prose.txt",
    ):
        (tmp_path / "sub").mkdir(exist_ok=True)
        assert refused(private, open_population(str(source))), source


def test_a_part_of_it_and_a_corpus_around_it_are_refused(tmp_path, private):
    other = _texts(open_population(str(write(tmp_path / "other.jsonl", 1, rows=9))))
    mine = _texts(private)

    def corpus(texts):
        return Population({"text": texts}, np.array([0, len(texts)]), ["one"])

    assert refused(private, corpus(mine[:5]))
    assert refused(private, corpus([*mine[:40], *other[:20]]))
    # All of theirs, among three times as much.
    assert refused(private, corpus([*mine, *other]))
    assert refused(private, corpus(sorted(mine, key=len)))
    assert refused(private, corpus([text.upper() for text in mine]))
    # Texts of their own, of the same words, and a few quotations.
    assert not refused(private, corpus(other))
    assert not refused(private, corpus([*mine[:20], *other]))
    assert not refused(private, corpus([""]))
    assert not refused(corpus([""]), corpus(other))


def test_where_lines_end_and_whether_a_file_is_one_text_does_not_matter():
    """A part of the clients' lines, of seven words: most runs of five in a file cross an end."""
    words = np.random.default_rng(0).integers(0, 10**6, (160, 7)).astype(str)
    lines = [" ".join(row) for row in words]

    def forms(lines):
        for texts in (lines, ["\n".join(lines)]):
            yield Population({"text": texts}, np.array([0, len(texts)]), ["one"])

    assert all(refused(private, part) for private in forms(lines) for part in forms(lines[:40]))
    # All of them, joined without line ends.
    alone = next(forms([" ".join(lines)]))
    assert all(refused(private, alone) for private in forms(lines))


def test_runs_of_words_do_not_go_across_texts():
    def runs(*texts):
        population = Population({"text": list(texts)}, np.array([0, len(texts)]), ["one"])
        return set(contents(population, "text")[1].tolist())

    assert len(runs("a b c d e f g")) == 3
    assert runs("a b c d e", "b c d e f", "c d e f g") == runs("a b c d e f g")
    assert len(runs("a b c", "d e f")) == 2
    assert runs("a b c", "d e f") == runs("d e f", "A, b? c!", "a b c")
    assert not runs("a b c") & runs("a b", "c")


def test_images_and_tokens_are_compared_by_example():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 4, 4, 1), np.uint8)
    labels = np.zeros(40, np.int32)

    def clients(rows):
        held = {"image": images[rows], "label": labels[rows]}
        return from_clients({"a": held})

    assert refused(clients(slice(0, 20)), clients(slice(5, 30)))
    assert not refused(clients(slice(0, 20)), clients(slice(15, 40)))
    tokens = from_clients({"a": {"tokens": np.arange(20).reshape(4, 5)}})
    assert refused(tokens, tokens)
    assert not refused(tokens, clients(slice(0, 20)))


def test_evaluation_clients_are_compared_client_by_client(private):
    """Other clients may say what these say; the same clients may not be evaluated on."""
    parts = private.split({"train": 0.6, "test": 0.4}, seed=0)
    check = PrivateContent(parts["train"])
    check.refuse_clients(parts["test"], "evaluation")
    for same in (parts["train"], private, parts["train"].select([0])):
        with pytest.raises(InputError, match="evaluation holds the private clients' own data"):
            check.refuse_clients(same, "evaluation")


RNG = np.random.default_rng(1)
PEOPLE = {f"c{k}": {"x": RNG.normal(size=(4, 3)), "y": RNG.normal(size=4)} for k in range(20)}
OTHERS = {f"o{k}": {"x": RNG.normal(size=(4, 3)), "y": RNG.normal(size=4)} for k in range(20)}


def _joined(*clients):
    return {name: np.concatenate([each[name] for each in clients]) for name in clients[0]}


def _rows(client, rows):
    return {name: each[rows] for name, each in client.items()}


ONE = PEOPLE["c7"]
HIDDEN = {
    "under another name": ({"new": ONE}, 4),
    "in another order": ({"new": _rows(ONE, [2, 0, 3, 1])}, 4),
    "with examples twice": ({"new": _rows(ONE, [0, 0, 1, 2, 3])}, 5),
    "among the examples of another": ({"new": _joined(OTHERS["o0"], ONE, OTHERS["o1"])}, 4),
    "beside a part of itself": ({"new": _joined(OTHERS["o0"], _rows(ONE, [1, 3]))}, 2),
    "a part alone": ({"new": _rows(ONE, [1])}, 1),
    "each example as a client": ({f"n{k}": _rows(ONE, [k]) for k in range(4)}, 4),
    "several in one": ({"new": _joined(*OTHERS.values(), ONE, PEOPLE["c8"])}, 8),
    "in float32": ({"new": {name: each.astype(np.float32) for name, each in ONE.items()}}, 4),
}


@pytest.mark.parametrize(("hidden", "copied"), HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("columns", ["xy", "y"])
def test_one_private_client_in_evaluation_data_is_left_out(hidden, copied, columns):
    """However it is hidden among others, who stay as they are."""

    def population(clients):
        kind = np.float32 if any(e["x"].dtype == np.float32 for e in hidden.values()) else float
        return from_clients(
            {i: {n: each[n].astype(kind) for n in columns} for i, each in clients.items()}
        )

    private, others = population(PEOPLE), population(OTHERS | hidden)
    if any(e["x"].dtype == np.float32 for e in hidden.values()):
        private = from_clients({i: {n: e[n] for n in columns} for i, e in PEOPLE.items()})
    found = PrivateContent(private).refuse_clients(others, "evaluation")
    assert found.num_examples == others.num_examples - copied
    assert len(found) == len(others)
    ours = {row.tobytes() for row in private.columns["y"].astype(np.float32)}
    assert not ours & {row.tobytes() for row in found.columns["y"].astype(np.float32)}
    alone = population(OTHERS)
    assert PrivateContent(private).refuse_clients(alone, "evaluation") is alone


def test_what_many_hold_is_no_copy_and_empty_clients_are_none():
    """A greeting of several private clients, a quotation, and clients without examples."""

    def said(*texts):
        return {"text": list(texts)}

    private = from_clients(
        {
            "a": said("hello", "one", "two", "three"),
            "b": said("hello", "four", "five"),
            "c": said("hello", "bye"),
            "d": {"text": []},
        }
    )
    others = {"x": said("hello", "six"), "y": said("one", "seven", "eight"), "z": {"text": []}}
    found = PrivateContent(private).refuse_clients(from_clients(others), "evaluation")
    assert found.num_examples == 5
    same = from_clients(others | {"w": said("bye", "hello")})
    found = PrivateContent(private).refuse_clients(same, "evaluation")
    assert found.num_examples == 5 and found.examples(3)["text"].tolist() == []


def test_a_run_is_scored_without_the_clients_who_train_and_says_so(tmp_path):
    """The scores are those on the others alone; a deception by more than half is refused."""
    model = jp.models.from_functions(
        lambda _: {"w": jnp.zeros(3)},
        lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2,
        columns=("x", "y"),
    )
    plan = jp.Plan(1, jp.Clip(1.0), jp.Noise(2.0), jp.Poisson(20, 20), 1e-3)
    settings = {"client": optax.sgd(0.1), "server": optax.sgd(1.0), "plan": plan}
    algorithm = jp.algorithms.fed_avg(model, cohort=jp.CohortSpec(4, 4), **settings)

    def run(name, public):
        declared = jp.DeclaredPublic(from_clients(public), "tests")
        return jp.run(
            algorithm, from_clients(PEOPLE), ledger=tmp_path / f"{name}.jsonl",
            out=tmp_path / name, evaluation=jp.Evaluator(model, declared),
        )  # fmt: skip

    mixed, alone = run("mixed", {**OTHERS, "new": ONE}), run("alone", OTHERS)
    first = [
        json.loads((each.out / "metrics.jsonl").read_text().splitlines()[0])["evaluation"]
        for each in (mixed, alone)
    ]
    squares = np.mean([each["y"].astype(np.float32) ** 2 for each in OTHERS.values()])
    assert first[0] == first[1] and first[0]["loss"] == pytest.approx(squares, rel=1e-5)
    assert "without 4 examples" in mixed.evaluated_on and "without" not in alone.evaluated_on
    with pytest.raises(InputError, match="tests .* holds the private clients' own data"):
        run("refused", {**PEOPLE, "o": OTHERS["o1"]})
    assert not (tmp_path / "refused.jsonl").exists()


def test_a_config_that_calls_the_clients_public_is_refused(pipeline_config, tmp_path):
    folder = pipeline_config.parent
    clients = f"{folder}/clients.jsonl"
    copy = tmp_path / "corpus.jsonl"
    copy.write_text(Path(clients).read_text())
    for old, new, what in (
        (f"{folder}/vocabulary.jsonl", clients, "data.public"),
        (f"{folder}/vocabulary.jsonl", f"{copy}?split=sentences", "data.public"),
        (f"{folder}/far.jsonl", str(copy), "fred.candidates.far"),
    ):
        with pytest.raises(InputError, match=re.escape(f"{what} = {new!r} holds the private")):
            prepare(changed_config(pipeline_config, (old, new)))


def test_a_corpus_for_public_models_that_is_a_copy_is_refused(synthetic_config, tmp_path):
    config = synthetic_config("popri")
    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(config.data.source).read_text())
    path = tmp_path / "popri.yaml"
    path.write_text(reader.to_yaml(config).replace(config.corpora["far"], str(copy)))
    with pytest.raises(InputError, match=re.escape(f"corpora.far = {str(copy)!r} holds")):
        carry_out.run(registry.load(path), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
