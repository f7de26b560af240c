"""Which round's adapters write the corpus, and after which prompts."""

import dataclasses
import json

import numpy as np
import pytest

from jaxpfl.algorithms.popri import PopriSettings, Written
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.engine import build
from jaxpfl.experiments.export import export
from jaxpfl.experiments.systems.synthetic_text import methods
from jaxpfl.experiments.systems.synthetic_text.methods import best_responses
from jaxpfl.experiments.systems.synthetic_text.run import median_to_medoid
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.preference.optimisation import PreferenceSettings

DISTANCES = [0.5, 0.2, 0.4]
OURS = (
    *("--popri.optimizer", "carried"),
    *("--popri.checkpoint", "nearest"),
    *("--popri.final_prompts", "best_responses"),
)


def test_the_best_response_of_each_prompt_unless_it_is_empty():
    scores = np.array([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0], [0.0, 0.0, 5.0]], np.float32)
    responses = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", ""]]
    written = Written(1, ["", "", ""], responses, scores, 1.0, 3, {})
    assert best_responses(written) == ["b", "d"]


def test_the_texts_of_pairs_are_the_best_and_the_rejected_of_each_prompt():
    """POPri's Figure 8; a prompt whose best text is empty has no pair."""
    scores = np.array([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0], [0.0, 0.0, 5.0]], np.float32)
    responses = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", ""]]
    written = Written(1, ["", "", ""], responses, scores, 1.0, 2, {})
    settings = PopriSettings(prompts=3, responses=3, rejected_rank=3, least_words=0)
    assert written.compared(settings) == {"fid_chosen": ["b", "d"], "fid_rejected": ["a", "e"]}
    groups = dataclasses.replace(settings, preference=PreferenceSettings(loss="grpo"))
    for none in (
        written.compared(groups),
        dataclasses.replace(written, pairs=0).compared(settings),
    ):
        assert none == {}


def test_the_distance_to_the_medoid():
    """Of 0, 1, 2 and 10 the distances from 1 or 2 add up to the least, of which 1 is the first."""
    assert median_to_medoid(np.array([[0.0], [1.0], [2.0], [10.0]])) == pytest.approx(1)


@pytest.mark.long
def test_the_nearest_round_writes_after_the_best_responses(synthetic_config, tmp_path, monkeypatch):
    """The round of the smallest distance writes, also where more texts are asked for afterwards."""
    measured, chosen, written_by = [], [], []
    by_scores, attached = methods.METHODS["popri"], methods.with_adapters

    def tuned(tuning, scores):
        def counted(texts):
            measured.append(texts)
            return DISTANCES[len(measured) - 1]

        author = by_scores(dataclasses.replace(tuning, distance=counted), scores)
        written_by.append((author.generator.digest(), author.samples))
        return author

    def with_adapters(generator, settings, params):
        chosen.append(attached(generator, settings, params))
        return chosen[-1]

    monkeypatch.setitem(methods.METHODS, "popri", tuned)
    monkeypatch.setattr(methods, "with_adapters", with_adapters)
    run = tmp_path / "run"
    carry_out.run(synthetic_config("popri", *OURS), run, progress=False)
    record = json.loads((run / "result.json").read_text())
    assert record["checkpoint"] == {"chosen": "nearest", "round": 1, "distances": DISTANCES}
    for entry in record["history"]:
        assert entry.keys() >= {"fid", "fid_chosen", "fid_rejected", "spread"}
        assert entry["spread"] > 0
    digests = [writer.digest() for writer in chosen]
    assert len(set(digests)) == len(digests) == 3
    digest, samples = written_by[0]
    assert digest == digests[1]
    # Of four prompts of the last round, whose responses nobody has chosen from the public samples.
    assert 1 <= len(samples) <= 4
    with np.load(run / "artifacts" / "round_2_responses" / "arrays.npz") as arrays:
        assert set(samples) <= set(arrays["texts"].reshape(-1).tolist())
    # Later texts, without the clients: the same writer, the same prompts, no measurement.
    monkeypatch.setattr(build, "read_clients", pytest.fail)
    monkeypatch.setattr(Ledger, "charge", pytest.fail)
    export(run, tmp_path / "more", texts=40, progress=False)
    assert written_by[-1] == written_by[0]
    assert len(measured) == 3
