"""Texts as token ids on the disk: the same rows as from the text, for every vocabulary."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpfl.cli import main
from jaxpfl.data import Cohort, CohortSpec, Population, from_clients
from jaxpfl.data import open as open_population
from jaxpfl.data.columns import text_array
from jaxpfl.data.folders import convert
from jaxpfl.errors import InputError
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.experiments.systems.federated_training.study import prepare
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text import Vocabulary
from jaxpfl.text.tokenisers.public_words import public_words
from jaxpfl.text.tokenisers.vocabulary import SPLITTINGS, spaces
from tests.data.tff_files import example, write_file
from tests.refusals import refusal

WORDS = ["a", "b", "jquery-1.9", "é", "."]


def vocabulary(splitting: str = "spaces", words: list[str] = WORDS) -> Vocabulary:
    ranked = [(word, len(words) - place) for place, word in enumerate(words)]
    return Vocabulary.from_ranked(ranked, 4 + len(words), 0, source="list", splitting=splitting)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use jquery-1.9 .js", ["use", "jquery-1.9", ".js"]),
        ("Don't PANIC", ["Don't", "PANIC"]),
        ("  a  b ", ["a", "b"]),
        ("a\u00a0b c\td\0e", ["a\u00a0b", "cde"]),
        ("", []),
        ("\ud800 x", ["\ufffd", "x"]),
    ],
)
def test_words_between_spaces(text, expected):
    assert spaces(text) == expected
    assert len(list(SPLITTINGS["words"]("jquery-1.9"))) == 5


PIECES = st.sampled_from([*"ab-.19 é\t\0\x7f\u2028", "jquery-1.9"])
TEXTS = st.lists(st.lists(PIECES).map("".join), min_size=1, max_size=6)


@pytest.mark.parametrize("splitting", SPLITTINGS)
@given(TEXTS, st.integers(1, 9))
def test_stored_ids_are_read_as_the_text_is(splitting, texts, length):
    words = vocabulary(splitting)
    column = text_array(["before", *texts])[1:]
    ids = words.sequences(column)
    clients = from_clients({"a": {"text": texts}, "b": {"text": []}})
    stored = clients.with_columns({"tokens": ids})
    found = np.asarray(words.encode(stored, length).columns["tokens"])
    assert np.array_equal(found, words.encode(clients, length).columns["tokens"])


def test_a_large_vocabulary_has_wider_ids():
    words = vocabulary("spaces", [f"w{n}" for n in range(70_000)])
    ids = words.sequences(text_array(["w69999 w0"]))
    assert ids.dtype == np.uint32 and ids.to_list()[0].tolist() == [1, 70_003, 4, 2]


@pytest.fixture
def posts(tmp_path) -> str:
    """A file of Stack Overflow with 40 users, as TFF writes it, as a source."""
    fixed = {"creation_date": b"2010", "score": 1, "tags": b"sql", "title": b"t", "type": b"answer"}
    generator = np.random.default_rng(0)
    held = {
        f"user {n}": [
            example({**fixed, "tokens": " ".join(generator.choice([*WORDS, "x"], 6)).encode()})
            for _ in range(n % 7)
        ]
        for n in range(40)
    }
    return f"{write_file(tmp_path / 'posts.sqlite', held)}?dataset=stackoverflow"


@pytest.fixture
def counts(tmp_path) -> Path:
    """TFF's word counts, packed as TFF packs them."""
    content = "".join(f"{word} {9 - n}\n" for n, word in enumerate([*WORDS, "rare"])).encode()
    path = tmp_path / "stackoverflow.word_count.tar.bz2"
    with tarfile.open(path, "w:bz2") as archive:
        member = tarfile.TarInfo("stackoverflow.word_count")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return path


def test_a_command_writes_tokens_that_train_as_the_text_does(posts, counts, tmp_path, capsys):
    """TRUST 29: with the fingerprint of the text, so that both are charged to one ledger."""
    out = tmp_path / "tokens"
    command = ["convert", posts, str(out), "--vocabulary", str(counts)]
    assert main(command) == 2 and "how many ids" in capsys.readouterr().err
    assert main([*command, "--vocab-size", "9"]) == 0
    text, tokens = open_population(posts), open_population(out)
    assert list(tokens.columns) == ["tokens"] and tokens.fingerprint == text.fingerprint
    assert (tokens.name, tokens.unit, tokens.splitting) == (text.name, text.unit, "spaces")
    assert sorted(path.name for path in out.iterdir()) == [
        "0.edges",
        "0.values",
        "client_ids.edges",
        "client_ids.values",
        "manifest.json",
        "offsets.values",
        "vocabulary.json",
    ]
    manifest = json.loads((out / "manifest.json").read_text())
    encoding = manifest["columns"]["tokens"]["encoding"]
    assert encoding["vocabulary"] == counts.name and encoding["splitting"] == "spaces"
    assert encoding["vocabulary_sha256"] == public_words(str(out), None).sha256

    def built(source: str, words: str):
        data = {"source": source, "vocabulary": words}
        data["split"] = {"train": 0.7, "valid": 0.2, "test": 0.1}
        model = {"name": "cifg_lm", "vocab_size": 9, "sequence_length": 4, "hidden": 8}
        privacy = {"noise_multiplier": 1.0, "delta": 1e-3}
        training = {"rounds": 1, "clients_per_round": 4}
        mapping = {"data": data, "model": model, "privacy": privacy, "training": training}
        config = from_mapping({**mapping, "evaluation": {"every": 0}}, "the test")
        assert isinstance(config, Config)
        return prepare(config).train

    both = [built(posts, str(counts)), built(str(out), str(out))]
    spec = CohortSpec(batch_size=2, max_examples=4)
    chosen = np.arange(len(both[0]))
    buckets = (Cohort(clients, chosen, spec, seed=1, round=1) for clients in both)
    for found, expected in zip(*buckets, strict=True):
        assert np.array_equal(found.batches["tokens"], expected.batches["tokens"])
    with Ledger(tmp_path / "ledger.jsonl", text) as ledger:
        assert ledger.covers(tokens)


def test_another_vocabulary_is_refused(posts, counts, tmp_path):
    words = public_words(str(counts), 9)
    convert(posts, tmp_path / "tokens", words, progress=False)
    tokens = open_population(tmp_path / "tokens")
    words.encode(tokens, 3)
    for other in (public_words(str(counts), 8), vocabulary("words"), vocabulary("spaces", ["b"])):
        with pytest.raises(InputError, match="was tokenised with the 9 words"):
            other.encode(tokens, 3)


def test_only_texts_are_tokenised(tmp_path):
    with pytest.raises(InputError, match="must have a column 'text'"):
        convert("digits?clients=3", tmp_path / "out", vocabulary(), progress=False)
    assert not list(tmp_path.iterdir())


def test_sources_of_public_words(posts, counts, tmp_path, monkeypatch):
    words = public_words(str(counts), 8)
    assert words.tokens[4:] == tuple(WORDS[:4]) and words.splitting == "spaces"
    assert words.counts == (0, 0, 0, 5 + 4, 9, 8, 7, 6)
    words.save(tmp_path / "words.json")
    monkeypatch.setenv("WORDS", str(tmp_path))
    assert public_words("$WORDS/words.json", None) == words
    assert Vocabulary.load(tmp_path / "words.json").sha256 == words.sha256
    # Text of the same data set is split as it came.
    counted = public_words(posts, 10)
    assert counted.splitting == "spaces" and set(counted.tokens[4:]) == {*WORDS, "x"}
    assert counted.counts[2] == open_population(posts).num_examples
    refusal(lambda: words.log_prior(), "unigram_prior")
    for source, size in (
        ("$WORDS/words.json", 7),
        (str(counts), 99),
        (str(tmp_path / "no.json"), 9),
    ):
        with pytest.raises(InputError):
            public_words(source, size)


def test_tokens_are_no_public_corpus_of_their_own_text(posts, counts, tmp_path):
    """TRUST: they have no column in common, so that contents cannot be compared."""
    from jaxpfl.experiments.central.public_check import PrivateContent

    convert(posts, tmp_path / "tokens", public_words(str(counts), 9), progress=False)
    text, tokens = open_population(posts), open_population(tmp_path / "tokens")
    for corpus, clients in ((text, tokens), (tokens, tokens), (tokens, text)):
        with pytest.raises(InputError, match="public and private"):
            PrivateContent(clients).refuse(corpus, "x")
    ids = tokens.columns["tokens"]
    other = Population({"tokens": ids[: len(ids) // 4]}, [0, len(ids) // 4], ["a"])
    refusal(lambda: PrivateContent(tokens).refuse(other, "x"), "public and private")
    with pytest.raises(InputError, match="public and private"):
        PrivateContent(tokens).refuse_clients(tokens.select([3, 2]), "x")
