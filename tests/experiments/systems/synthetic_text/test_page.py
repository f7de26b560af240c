"""The page of a study of synthetic text, made of an invented record."""

import pytest

from jaxpfl.experiments.report.page import page_html
from jaxpfl.experiments.systems.synthetic_text.page import page

RECORD = {
    "method": "popri", "one_look": False, "stamp": "", "privacy": "(epsilon = 8, this run)",
    "trained_on": "training clients of x", "tested_on": "test clients of x (declared public)",
    "validated_on": "validation clients of x (declared public)",
    "metrics": {"accuracy": 0.3, "public_accuracy": 0.2}, "cost": {"down": 1, "up": 1},
    "public_models": {}, "table": [
        {"model": name, "private": True, "accuracy": 0.3, "perplexity": 9.0, "loss": 2.0}
        for name in ("the public model", "this run")
    ],
    "history": [{"round": round, "fid": 0.5, "texts": ["a"]} for round in (1, 2)],
    "plane": {"synthetic": [[0.0, 0.0]], "validation": [[0.0, 1.0]]},
}  # fmt: skip


NEAREST, JUDGED = (
    {"chosen": by, "round": 1, "distances": [1.0, 2.0]} for by in ("nearest", "judged")
)


@pytest.mark.parametrize(
    ("checkpoint", "decides"), [({"round": 2}, "nothing"), (NEAREST, "the round")]
)
def test_it_is_said_which_measure_the_method_saw_and_what_it_decides(tmp_path, checkpoint, decides):
    """TRUST 60: a distance by the reward's own embedder falls whether texts improve or not."""
    shown = page_html(tmp_path, page(tmp_path, {**RECORD, "checkpoint": checkpoint}))
    assert "The method saw this measure" in shown and f"which decides {decides}," in shown
    shown = page_html(tmp_path, page(tmp_path, {**RECORD, "checkpoint": JUDGED}))
    assert "by moments that no reward saw" in shown
    shown = page_html(tmp_path, page(tmp_path, {**RECORD, "method": "generator"}))
    assert "The method saw" not in shown


def test_pairs_and_medoid_have_pictures_where_a_method_has_them(tmp_path):
    """POPri's Figures 8 and 4; of a round without pairs there is no point."""
    pairs = {"fid_chosen": 0.4, "fid_rejected": 0.6}
    history = [{**entry, "spread": 0.2} for entry in RECORD["history"]]
    drawn = [name for name, *_ in page(tmp_path, RECORD).sections[1].figures]
    assert drawn == ["fid", "plane"]
    history[0] |= pairs
    shown = page(tmp_path, {**RECORD, "history": history}).sections[1]
    figures = {name: figure for name, _, figure in shown.figures}
    assert list(figures) == ["fid", "fid_chosen", "spread", "plane"]
    (panel,) = figures["fid_chosen"].axes
    assert [line.get_xydata().tolist() for line in panel.lines] == [[[1, 0.4]], [[1, 0.6]]]
