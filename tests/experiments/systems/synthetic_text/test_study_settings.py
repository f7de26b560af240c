"""Settings of a study of synthetic text: what is refused, and what of the clients is read."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data.selection import at_most
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.experiments.systems.synthetic_text import study as synthetic_text
from jaxpfl.experiments.systems.synthetic_text.questions import question_of
from jaxpfl.experiments.systems.synthetic_text.run import TextStudy
from jaxpfl.experiments.systems.workspace import Workspace
from jaxpfl.text.embed import embedder

LARGER = "--simulated.population 100000 --simulated.delta 1e-6 --simulated.clients_per_round 1000"
LOOK = "--popri.clients_send moments"
FINAL = "--corpus.pool [public,written]"
REFUSED = [
    ("popri", "--vocab_size 256", "vocab_size must be above 256, found 256"),
    ("popri", "--generator.heads 3", "hidden_size must be a multiple of heads = 3"),
    ("popri", "--evaluation.declared_public False --evaluation.every 0", "declared"),
    ("popri", "--privacy.adaptive True", "privacy.adaptive must be false"),
    ("popri", "--privacy.sampling cyclic --privacy.noise banded", "must be 'poisson' or 'fixed'"),
    ("fed_avg", "--privacy.noise banded", "needs sampling = 'cyclic'"),
    ("popri", "--privacy.delta 0.45", "delta = 0.45 is not below 1 / population"),
    ("popri", "--training.clients_per_round 61", "exceeds the population"),
    ("popri", "--embedder hashd:32", "did you mean 'hashed'"),
    ("popri", "--data.split.valid 0 --data.split.test 0.4", "data.split.valid"),
    ("public", "--data.split.valid 0.4 --data.split.test 0", "data.split.test"),
    ("private_evolution", "--popri.format.shots 5", "evolution selects 4 .*popri.format.shots"),
    ("popri", "--popri.clients_send votes", "popri.clients_send"),
    ("public", LARGER, "whose clients send nothing"),
    ("popri", "--popri.samples [nowhere]", "popri.samples must be among"),
    (
        "popri",
        f"{LOOK} --privacy.sampling fixed",
        "must be 'poisson' with popri.clients_send 'moments'",
    ),
    ("popri", f"{LOOK} --privacy.accountant rdp", "privacy.accountant must be absent or 'pld'"),
    ("popri", "--popri.checkpoint judged", "popri.checkpoint needs popri.clients_send 'moments'"),
    ("popri", f"{LOOK} --popri.checkpoint judged --embedder hashed:128", "another embedder"),
    ("popri", f"{LOOK} --popri.checkpoint judged --popri.judge hashd:8", "did you mean 'hashed'"),
    ("popri", "--popri.tune.top_p [0.5,1]", "popri.tune needs popri.clients_send 'moments'"),
    ("popri", f"{LOOK} --popri.tune.top_p [0.5]", "at least two values .* found one choice"),
    ("popri", f"{LOOK} --popri.tune.top_p [0.5,2]", "popri.tune.top_p must be greater than 0"),
    ("popri", f"{LOOK} --popri.tune.samples [near,nowhere]", "popri.tune.samples must be among"),
    (
        "popri",
        f"{LOOK} --popri.corpus nearest --popri.tune.samples [near,far]",
        "popri.tune.samples must be absent with popri.corpus 'nearest'",
    ),
    ("popri", "--popri.corpus chosen", "popri.corpus needs popri.clients_send 'moments'"),
    (
        "popri",
        f"{LOOK} --popri.corpus chosen --popri.tune.samples [near,far]",
        "popri.tune.samples must be absent with popri.corpus 'chosen'",
    ),
    ("steered", f"{FINAL} --corpus.chosen 9", "popri.clients_send 'moments', found .* 'steered'"),
    ("popri", f"{LOOK} {FINAL}", "corpus.pool must be .public, written. where corpus.chosen"),
    ("popri", f"{LOOK} --corpus.chosen 9", "corpus.pool must be .public, written."),
    ("fed_avg", "--corpora null", "are pretrained on them"),
    ("popri", "--generator.int8 True", "generator.int8 needs generator.path, found none"),
    ("generator", "--generator.api http://here", "generator.api needs generator.model, found none"),
    ("steered", "--privacy.sampling fixed", "must be 'poisson' with method 'steered'"),
    ("steered", "--privacy.accountant rdp", "absent or 'pld' with method 'steered'"),
    ("steered", "--steering.layers []", "steering.layers must be a list of one or more"),
    ("steered", "--steering.strength -1", "steering.strength"),
    ("popri", "--corpus.cut tokens:8", "popri.format.stop must be '' .* found '.n'"),
    ("popri", "--corpus.cut lines", "corpus.cut: .* must be messages, .* found 'lines'"),
]


@pytest.mark.parametrize(("method", "changes", "message"), REFUSED)
def test_configs_that_are_refused_say_why(synthetic_config, tmp_path, method, changes, message):
    """TRUST 9, 10, 12, SPEC C.3 (delta = 0.45): before a directory or a ledger is touched."""
    with pytest.raises(InputError, match=message):
        config = synthetic_config(method, *changes.split())
        carry_out.run(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_the_clients_are_no_public_corpus(synthetic_config, monkeypatch):
    """However it is spelled."""
    mapping = to_mapping(synthetic_config("popri"))
    path = Path(mapping["data"]["source"])
    monkeypatch.setenv("SPEECHES", str(path.parent))
    monkeypatch.chdir(path.parent)
    hub = "?revision=" + "0" * 40
    for own, public in (
        (str(path), f"{path}?client=*"),
        (str(path), f"$SPEECHES/{path.name}"),
        (str(path), path.name),
        (f"huggingface:owner/one{hub}", f"huggingface:owner/one{hub}&client=id"),
    ):
        mapping["data"]["source"], mapping["corpora"]["mine"] = own, public
        with pytest.raises(InputError, match="corpora.mine is data.source"):
            from_mapping(mapping, "here")
    mapping["corpora"]["mine"] = f"huggingface:owner/other{hub}"
    from_mapping(mapping, "here")


def test_examples_can_be_spans_of_the_clients_texts(synthetic_config, tmp_path):
    """As in LargeFedBench: what a text has beyond its first tokens is an example too."""
    counts = []
    for rule in ("tokens:8", "messages"):
        changes = ("--corpus.cut", rule, "--evaluation.max_examples", "999")
        config = synthetic_config("public", *changes)
        record = carry_out.run(config, tmp_path / rule, progress=False).record
        counts.append(record["metrics"]["count"])
    # Texts of six words or so are more than eight tokens.
    assert counts[0] > 1.5 * counts[1]
    whole = synthetic_text.prepare(config)
    spans = dataclasses.replace(config, corpus=dataclasses.replace(config.corpus, cut="tokens:8"))
    cut = TextStudy(dataclasses.replace(whole, config=spans), Workspace(spans, tmp_path))
    tokeniser = cut.models.public.tokeniser
    test = whole.held_out["test"]
    held = [test.examples(client)["text"].to_pylist() for client in range(len(test))]
    lengths = [len(row) for row in tokeniser.encode([" ".join(texts) for texts in held])]
    assert cut.test.num_examples == sum(-(-length // 8) for length in lengths)
    assert cut.clients.fingerprint == whole.clients.fingerprint
    assert len(cut.clients) == len(whole.clients)


def test_clients_score_by_at_most_so_many_of_their_texts(synthetic_config, tmp_path):
    """In one memory, as in a sweep: what is remembered is never that of other settings."""
    memory = {}
    whole, cut = (), ("--corpus.cut", "tokens:8", "--popri.format.stop", "")
    removed = ("--data.remove", "ka")
    settings = [(1, whole), (2, whole), (2, cut), (1, cut), (1, removed)]
    for number, (limit, changed) in enumerate(settings):
        changes = ("--training.max_examples", str(limit), *changed)
        study = synthetic_text.prepare(synthetic_config("popri", *changes))
        texts = TextStudy(study, Workspace(study.config, tmp_path / str(number), memory=memory))
        asked = texts.embedded(question_of(texts.models, study.plan))
        few = texts.clients.keeping(at_most(texts.clients, limit, study.config.data.split_seed))
        assert max(few.sizes()) == limit < max(texts.clients.sizes())
        vectors = np.asarray(embedder(study.config.embedder)(few.columns["text"].to_pylist()))
        np.testing.assert_array_equal(asked.columns["embedding"], vectors)
        np.testing.assert_array_equal(asked.offsets, few.offsets)


def test_votes_have_the_cap_as_their_clip_norm(synthetic_config):
    assert synthetic_text.prepare(synthetic_config("private_evolution")).plan.clip_norm == 2.0
    assert synthetic_text.prepare(synthetic_config("popri")).plan.clip_norm == 1.0
