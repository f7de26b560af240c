"""What follows from one look's release: which list of texts is the nearest."""

import numpy as np

from jaxpfl.algorithms.frechet import moments
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.data import from_clients
from jaxpfl.experiments.engine.phases import Phases
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Setting
from jaxpfl.experiments.records.artifacts import Artifacts
from jaxpfl.experiments.systems.synthetic_text.questions import EMBEDDING, Look
from jaxpfl.privacy import Ledger
from jaxpfl.text.embed import embed, embedder
from tests.algorithms.test_one_look import released

NEAR = [f"the senate will vote on bill {number}" for number in range(40)]
FAR = [f"moths and zebras {number}, by a river in the north" for number in range(40)]


def test_the_nearest_texts_are_chosen_where_the_noise_hides_all_distances():
    """Also where there are lists without texts, which are as far as texts can be."""
    function = embedder("hashed:16")
    target = moments(np.asarray(function(NEAR)), 1.0)
    look = Look(FredPlan.without_privacy(), {EMBEDDING: "hashed:16"}, 100)
    for entry in (0.0, 0.5):
        found = look.judged({EMBEDDING: released(target, entry)}, [["", " "], FAR, NEAR], 1)
        assert found["chosen"] == 2
        assert found["distances"][0] == 4.0
    assert found["distances"][1:].tolist() == [0.0, 0.0]


def test_texts_are_chosen_across_corpora():
    """Clients who are like half of each of two corpora: that half of each is chosen."""
    function = embedder("hashed:16")
    corpora = {"first": [*NEAR[:20], *FAR[:20]] * 5, "second": [*NEAR[20:], *FAR[20:]] * 5}
    look = Look(FredPlan.without_privacy(), {EMBEDDING: "hashed:16"}, 100)
    target = released(moments(np.asarray(function(NEAR)), 1.0), 0.0)
    record, arrays = look.chosen(target, corpora, 100)
    texts = arrays["texts"].tolist()
    assert len(texts) == 100 and np.mean([text in NEAR for text in texts]) > 0.9
    assert set(record["examples"]) <= set(texts)
    assert record["distances"]["chosen"] < 0.2 * record["distances"]["mixture"]
    assert all(share > 0.3 for share in record["shares"].values())


def test_choices_read_the_one_release_and_ask_nobody(tmp_path):
    """TRUST 46: whatever follows from stored moments is free, also where there are no clients."""
    function = embedder("hashed:8")
    texts = {f"client {number}": {"text": [text]} for number, text in enumerate(NEAR)}
    clients = embed(from_clients(texts), function, progress=False)
    plan = FredPlan.calibrated(epsilon=50.0, delta=1e-3)
    look = Look(plan, {EMBEDDING: "hashed:8"}, len(clients))
    path = tmp_path / "ledger.jsonl"
    run = Run(tmp_path, look.algorithm, clients, Setting({}), ledger=path)
    with run:
        run.begin()
        stored = Artifacts(tmp_path / "artifacts", run.id, run.ledger)
        first = look.released(Phases(stored, run.releaser()))[EMBEDDING]
        again = look.released(Phases(stored))
    np.testing.assert_array_equal(first.moments.mean_D, again[EMBEDDING].moments.mean_D)
    assert look.judged(again, [FAR, NEAR], 1)["chosen"] == 1
    names = look.nearest(again[EMBEDDING], {"far": FAR, "near": NEAR})["names"]
    assert names.tolist() == ["near", "far"]
    assert len(Ledger.read(path).charges) == 3
