"""Clients' own data under a public name is refused, however it is named, read or copied."""

import json
import os
import re
import shutil
from functools import partial

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
from jaxpfl.experiments.engine.build import public_vocabulary
from jaxpfl.experiments.systems.federated_training.study import prepare
from tests.experiments.conftest import changed_config
from tests.refusals import refusal

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


def one_client(*texts: str) -> Population:
    return Population({"text": list(texts)}, np.array([0, len(texts)]), ["one"])


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


def test_words_are_not_counted_in_the_clients_own_texts(tmp_path, private):
    own, clients = str(tmp_path / "clients.jsonl"), PrivateContent(private)
    other = str(write(tmp_path / "other.jsonl", 1))
    words = public_vocabulary(other, None, clients, 20)
    words.save(tmp_path / "words.json")
    assert public_vocabulary(str(tmp_path / "words.json"), None, clients, 20) == words
    refusal(lambda: public_vocabulary(own, None, clients, 20), "data.vocabulary")


def test_a_part_of_it_and_a_corpus_around_it_are_refused(tmp_path, private):
    other = _texts(open_population(str(write(tmp_path / "other.jsonl", 1, rows=9))))
    mine = _texts(private)
    # The last: a fifth of theirs, among 13 times as much.
    parts = (mine[:5], mine[:40] + other[:20], sorted(mine, key=len), mine + other)
    for texts in (*parts, mine[:40] + other[:60], mine[:20] + other):
        assert refused(private, one_client(*texts))
    assert refused(private, one_client(*[text.upper() for text in mine]))
    # Texts of their own, of the same words, and a few quotations.
    for texts in (other, [*mine[:5], *other], [""]):
        assert not refused(private, one_client(*texts))
    assert not refused(one_client(""), one_client(*other))


def test_where_lines_end_and_whether_a_file_is_one_text_does_not_matter():
    """A part of the clients' lines, of seven words: most runs of five in a file cross an end."""
    words = np.random.default_rng(0).integers(0, 10**6, (160, 7)).astype(str)
    lines = [" ".join(row) for row in words]
    # The last: all of them, joined without line ends.
    parts = one_client(*lines[:40]), one_client("\n".join(lines[:40])), one_client(" ".join(lines))
    for private in (one_client(*lines), one_client("\n".join(lines))):
        assert all(refused(private, part) for part in parts)


def test_short_texts_among_long_ones_are_refused():
    """A quarter of the texts are clients', a twelfth of the words; a line that repeats is one."""
    rng = np.random.default_rng(0)

    def texts(number, words):
        return [" ".join(row) for row in rng.integers(0, 10**6, (number, words)).astype(str)]

    licence, private, public = texts(1, 40), texts(1_000, 9), texts(150, 36)
    clients = one_client(*private, *licence * 200)
    assert refused(clients, one_client(*private[:50], *public))
    assert refused(one_client(*private, *licence), one_client("\n".join(private[:50] + public)))
    assert not refused(clients, one_client(*private[:5], *public, *licence * 200))


def test_runs_of_words_do_not_go_across_texts():
    def runs(*texts):
        return set(contents(one_client(*texts), "text").all_runs.tolist())

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
        return from_clients({"a": {"image": images[rows], "label": labels[rows]}})

    assert refused(clients(slice(0, 20)), clients(slice(5, 30)))
    assert not refused(clients(slice(0, 20)), clients(slice(17, 40)))
    tokens = from_clients({"a": {"tokens": np.arange(20).reshape(4, 5)}})
    assert refused(tokens, tokens)
    assert not refused(tokens, clients(slice(0, 20)))


def test_evaluation_clients_are_compared_client_by_client(private):
    """Other clients may say what these say; the same clients may not be evaluated on."""
    parts = private.split({"train": 0.6, "test": 0.4}, seed=0)
    check = PrivateContent(parts["train"])
    check.refuse_clients(parts["test"], "evaluation")
    words = "evaluation holds the private clients' own data"
    for same in (parts["train"], private, parts["train"].select([0])):
        refusal(lambda same=same: check.refuse_clients(same, "evaluation"), words)


RNG = np.random.default_rng(1)


def people(letter):
    return {
        f"{letter}{k}": {"x": RNG.normal(size=(4, 3)), "y": RNG.normal(size=4)} for k in range(20)
    }


PEOPLE, OTHERS = people("c"), people("o")
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

    def said(**texts):
        return from_clients({name: {"text": text.split()} for name, text in texts.items()})

    private = said(a="hello one two three", b="hello four five", c="hello bye", d="")
    others = {"x": "hello six", "y": "one seven eight", "z": ""}
    found = PrivateContent(private).refuse_clients(said(**others), "evaluation")
    assert found.num_examples == 5
    found = PrivateContent(private).refuse_clients(said(**others, w="bye hello"), "evaluation")
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
        files = {"ledger": tmp_path / f"{name}.jsonl", "out": tmp_path / name}
        evaluator = jp.Evaluator(model, jp.DeclaredPublic(from_clients(public), "tests"))
        return jp.run(algorithm, from_clients(PEOPLE), **files, evaluation=evaluator)

    mixed, alone = run("mixed", {**OTHERS, "new": ONE}), run("alone", OTHERS)
    first = [
        json.loads((each.out / "metrics.jsonl").read_text().splitlines()[0])["evaluation"]
        for each in (mixed, alone)
    ]
    squares = np.mean([each["y"].astype(np.float32) ** 2 for each in OTHERS.values()])
    assert first[0] == first[1] and first[0]["loss"] == pytest.approx(squares, rel=1e-5)
    assert "without 4 examples" in mixed.evaluated_on and "without" not in alone.evaluated_on
    copies = {**PEOPLE, "o": OTHERS["o1"]}
    refusal(lambda: run("refused", copies), "tests holds the private clients' own data")
    assert not (tmp_path / "refused.jsonl").exists()


def test_a_config_that_calls_the_clients_public_is_refused(pipeline_config, tmp_path):
    folder, copy = pipeline_config.parent, tmp_path / "corpus.jsonl"
    clients = f"{folder}/clients.jsonl"
    shutil.copy(clients, copy)
    for old, new, what in (
        (f"{folder}/vocabulary.jsonl", clients, "data.public"),
        (f"{folder}/vocabulary.jsonl", f"{copy}?split=sentences", "data.public"),
        (f"{folder}/far.jsonl", str(copy), "fred.candidates.far"),
    ):
        config = changed_config(pipeline_config, (old, new))
        refusal(partial(prepare, config), f"{what} = {new!r} holds the private")


def test_a_corpus_for_public_models_that_is_a_copy_is_refused(synthetic_config, tmp_path):
    config = synthetic_config("popri")
    copy, path = tmp_path / "copy.jsonl", tmp_path / "popri.yaml"
    shutil.copy(config.data.source, copy)
    path.write_text(reader.to_yaml(config).replace(config.corpora["far"], str(copy)))
    run = partial(carry_out.run, registry.load(path), tmp_path / "run", progress=False)
    refusal(run, f"corpora.far = {str(copy)!r} holds")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
