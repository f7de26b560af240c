"""Candidates: mixtures draw their shares, the same examples for all, public clients stay apart."""

import dataclasses
import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxpfl.algorithms import gaussian_moments
from jaxpfl.algorithms.fred import Score
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.config.sections import PrefinetuneConfig
from jaxpfl.experiments.systems.federated_training.candidates import Candidates
from jaxpfl.experiments.systems.federated_training.config import FredConfig
from jaxpfl.experiments.systems.federated_training.page import ranking
from jaxpfl.experiments.systems.federated_training.study import Study, prepare
from jaxpfl.text.embed import embed, embedder
from jaxpfl.text.tokenisers.vocabulary import Vocabulary
from tests.experiments.conftest import FAR, NEAR, changed_config


def _texts(values: Any, vocabulary: Vocabulary) -> list[str]:
    return [vocabulary.decode(row) for row in values["tokens"]]


@pytest.fixture(scope="module")
def prepared(pipeline_config) -> Any:
    return prepare(registry.load(pipeline_config))


def _corpus(candidates, name, vocabulary, examples=80):
    encode = partial(vocabulary.encode, sequence_length=8)
    settings = PrefinetuneConfig(examples=examples, valid=0.2)
    return candidates.corpus(name, settings, ("tokens",), encode)


def test_every_candidate_gives_as_many_examples_and_a_mixture_its_shares(prepared):
    candidates, vocabulary = prepared.candidates, prepared.vocabulary
    for name, share in (("near", 0.0), ("far", 1.0), ("mostly far", 0.7)):
        corpus = _corpus(candidates, name, vocabulary)
        assert [len(part["tokens"]) for part in (corpus.train, corpus.valid)] == [64, 16]
        for part, number in ((corpus.train, 64), (corpus.valid, 16)):
            far = sum(text.split()[0] in FAR for text in _texts(part, vocabulary))
            assert far == pytest.approx(share * number, abs=0.6)


def test_training_and_held_out_examples_are_different_rows():
    """Of rows that are all different, none is on both sides, and all are used."""
    from jaxpfl.data.population import Population

    texts = [f"row {number}" for number in range(100)]
    vocabulary = Vocabulary.from_texts(texts, 200, source="rows")
    rows = Population({"text": texts}, np.array([0, 100]), ["one"])
    fresh = Candidates({"near": "rows"}, {"near": {"near": 1.0}}, {"near": rows}, seed=0)
    corpus = _corpus(fresh, "near", vocabulary, examples=100)
    train, valid = (set(_texts(part, vocabulary)) for part in (corpus.train, corpus.valid))
    assert not train & valid
    assert train | valid == set(texts)
    again = _corpus(fresh, "near", vocabulary, examples=50)
    assert set(_texts(again.train, vocabulary)) != set(texts[:50])


def test_too_few_examples_are_refused_by_name(prepared, pipeline_config):
    """Before FreD is charged, for any candidate that it may choose."""
    message = r"'mostly far' needs 140 examples of .*far.jsonl.* 120"
    with pytest.raises(InputError, match=message):
        _corpus(prepared.candidates, "mostly far", prepared.vocabulary, examples=200)
    with pytest.raises(InputError, match="needs 200 examples of .* 120: lower prefinetune"):
        prepare(registry.load(pipeline_config, ["--prefinetune.examples", "200"]))


def test_moments_of_a_mixture_are_those_of_its_parts(prepared):
    candidates = dataclasses.replace(prepared.candidates, most=100)
    embeddings = candidates.embeddings(embedder("hashed:8"))
    found = candidates.moments(embeddings, 0.8)
    sizes = {name: found[name].count for name in ("near", "far")}
    assert sizes == {"near": 100, "far": 100}
    expected = gaussian_moments.mixture([found["near"], found["far"]], [0.3, 0.7])
    np.testing.assert_allclose(found["mostly far"].mean_D, expected.mean_D)
    np.testing.assert_allclose(found["mostly far"].covariance_DxD, expected.covariance_DxD)
    texts = candidates.sample("near", "text")
    sample = embed(texts, embedder("hashed:8"), progress=False)
    alone = gaussian_moments.moments(sample.columns["embedding"], 0.8)
    np.testing.assert_allclose(found["near"].mean_D, alone.mean_D, rtol=1e-6)


def test_fred_compares_texts_that_are_cut_alike(pipeline_config, tmp_path, monkeypatch):
    """Clients' and candidates', by one rule; prefinetuning reads the texts as they are."""
    embedded = []

    class Spy:
        name, column, dimension = "spy", "text", 8

        def __call__(self, texts):
            embedded.append(list(texts))
            return embedder("hashed:8")(texts)

    monkeypatch.setattr(Study, "embedder", Spy())
    more = ["--fred.cut", "words:7", "--prefinetune.other_candidates", "False"]
    study = prepare(registry.load(pipeline_config, [*more, "--fred.max_examples", "1"]))
    clients = study.embedded(progress=False)
    assert len(clients) == len(study.clients) and clients.num_examples == len(clients)
    record = carry_out.run(study.config, tmp_path / "run", progress=False).record
    assert {len(text.split()) for text in embedded[0]} == {7, 18 - 14}
    for texts in embedded[1:3]:
        # 30 documents of four lines of five words.
        assert sorted({len(text.split()) for text in texts}) == [6, 7] and len(texts) == 90
    assert record["fred"]["cut"] == "words:7" and record["fred"]["cautions"] == []
    assert "cut by one rule: words:7." in (tmp_path / "run" / "report.html").read_text()
    assert study.candidates.populations["near"].num_examples == 120


def test_the_page_says_where_texts_have_another_form(pipeline_config, tmp_path):
    near = str(pipeline_config.parent / "near.jsonl")
    config = changed_config(
        pipeline_config,
        (f'near: "{near}"', f'near: "{near}?split=sentences"'),
        ("other_candidates: true", "other_candidates: false"),
    )
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    (caution,) = outcome.record["fred"]["cautions"]
    assert "texts of near (median: 5 words) are sentences" in caution
    assert f"caution: {caution}" in outcome.lines
    assert "of near (median: 5 words) are sentences" in (outcome.out / "report.html").read_text()


def test_public_clients_are_a_corpus_and_take_no_other_part(pipeline_config):
    near = str(pipeline_config.parent / "near.jsonl")
    config = changed_config(
        pipeline_config,
        ("train: 0.7, valid: 0.15, test: 0.15", "train: 0.3, valid: 0.15, test: 0.15, public: 0.4"),
        (f'near: "{near}"', 'near: "split:public"'),
    )  # fmt: skip
    experiment = prepare(config)
    assert experiment.candidates is not None
    public = experiment.candidates.populations["near"]
    ids = [set(part.client_ids.to_pylist()) for part in (
        public, experiment.train, experiment.valid, experiment.test)]  # fmt: skip
    assert sum(map(len, ids)) == len(set.union(*ids)) == 300
    # FreD and the ledger are of the training clients alone.
    assert experiment.clients.client_ids.equals(experiment.train.client_ids)
    assert 90 < len(public) < 150


def test_without_a_public_corpus_the_vocabulary_is_the_candidates(pipeline_config):
    """TRUST 8: from text that is public; never from the clients."""
    public = str(pipeline_config.parent / "vocabulary.jsonl")
    config = changed_config(pipeline_config, (f', public: "{public}"', ""))
    vocabulary = prepare(config).vocabulary
    assert vocabulary is not None
    assert set(vocabulary.tokens[4:]) == set(NEAR + FAR)
    assert "near" in vocabulary.source
    assert not any("canary" in token for token in vocabulary.tokens)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  epsilon: 4.0\n", "", "fred.epsilon is required"),
        ("epsilon: 4.0", "epsilon: 8.0", "below privacy.epsilon"),
        ("near: 0.3, far: 0.7", "near: 0.3, far: 0.6", "must sum to 1"),
        ("near: 0.3, far: 0.7", "near: -0.3, far: 1.3", "mostly far.near"),
        ("near: 0.3, far: 0.7", "nearr: 0.3, far: 0.7", "'nearr'"),
        ("near: 0.3, far: 0.7", "mostly far: 1.0", "found 'mostly far'"),
        ('"mostly far": {', '"../up": {', "'../up'"),
        ("epsilon: 8.0, delta: 1e-3", "epsilon: 8.0, delta: 1e-3, sampling: fixed", "'fixed'"),
        ("epsilon: 8.0, delta: 1e-3, clip", "private: false, clip", "fred.epsilon"),
        ("every: 3, declared_public: true", "every: 0", "prefinetune.other_candidates"),
        ('far: "', 'far: "split:public" #', "data.split.public"),
        ("fred:\n", "fred:\n  cut: lines\n", "fred.cut: a rule"),
        ("fred:\n", "fred:\n  cut: 'tokens:8'\n", "fred.cut: tokens need"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(pipeline_config, old, new, words):
    """TRUST 9, 10, 11: for the sections of the pipeline."""
    with pytest.raises(InputError) as caught:
        changed_config(pipeline_config, (old, new))
    assert words in str(caught.value)
    assert "changed.yaml" in str(caught.value)


@pytest.mark.parametrize("name", ["", ".far", "up/far", "mostly_far"])
def test_every_candidate_has_a_folder_of_its_own(name):
    """Spaces become underscores in the names of folders."""
    FredConfig(candidates={"mostly far": "x", "far": "y"})
    with pytest.raises(InputError, match="fred.candidates") as caught:
        FredConfig(candidates={"mostly far": "x", name: "y"})
    assert repr(name) in str(caught.value)


def test_a_stage_without_the_others_is_refused_where_it_means_nothing(pipeline_config):
    text = pipeline_config.read_text()
    fred, prefinetune = text.index("fred:"), text.index("prefinetune:")
    for part, words in (
        ([(text[prefinetune:], "")], "fred needs a prefinetune section"),
        ([(text[fred:prefinetune], "")], "prefinetune needs a fred section"),
        ([('    far: "', '    # "'), ('    "mostly far":', "    #")], "at least two"),
    ):
        with pytest.raises(InputError, match=words):
            changed_config(pipeline_config, *part)


def test_rank_correlations_are_those_of_distances_and_losses():
    def metrics(loss):
        return {"loss": loss, "perplexity": np.exp(loss), "accuracy": 0.0}

    scores = [
        Score(name, float(d), float(d), float(d), float(d), False).row()
        for d, name in enumerate("abcd")
    ]
    before = {name: metrics(loss) for name, loss in zip("abcd", (1.0, 2.0, 4.0, 3.0), strict=True)}
    after = {name: metrics(loss) for name, loss in zip("abcd", (4.0, 3.0, 2.0, 1.0), strict=True)}
    # Ranks differ by 0, 0, 1, 1: 1 - 6 * 2 / (4 * 15) = 0.8.
    found = ranking(scores, {"before": before, "after": after})["spearman"]
    assert found == {"before": pytest.approx(0.8), "after": pytest.approx(-1.0)}
    two = ranking(scores, {"before": dict(list(before.items())[:2]), "after": {"a": metrics(1.0)}})
    assert two["spearman"] == {"before": None, "after": None}
    assert [row["before"] is not None for row in two["candidates"]] == [True, True, False, False]
    flat = ranking(scores, {"before": {name: metrics(1.0) for name in "abcd"}})
    assert "after" not in flat["candidates"][0]
    assert flat["spearman"]["before"] is None
    assert json.loads(json.dumps(flat))["candidates"][3]["rank"] == 4
