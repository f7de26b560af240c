"""The docs have the tables of the stored audits, and none of these found a fault."""

import pytest

import tools.audit
from tools import audits


@pytest.mark.parametrize("kind", audits.PAGES)
def test_the_pages_have_the_tables_of_the_stored_rows(kind: str):
    page = audits.PAGES[kind].read_text(encoding="utf-8")
    assert audits.written(kind, audits.stored()) == page, "run python -m tools.audits --write"


def test_the_figure_shows_a_release_of_each_system():
    axes = audits.drawn(audits.stored()).axes[0]
    assert [each.get_text() for each in axes.get_yticklabels()] == list(audits.SHOWN)
    bounds, stated = (each.get_offsets()[:, 0] for each in axes.collections[1:])
    assert (bounds < stated).all()


@pytest.mark.long
def test_every_private_release_was_audited_and_none_exceeds_what_it_states():
    stored = {(row["system"], row["release"]): row for row in audits.stored() if "system" in row}
    for audit in audits.audits():
        row = stored[audit.system, audit.release]
        assert 0 <= row["bound"] <= row["epsilon"], audit
        assert row["rounds"] == audit.facts["rounds"]


def test_no_stored_bound_exceeds_what_is_stated_and_each_worse_release_was_flagged():
    for row in audits.stored():
        assert row["audit"] == "worse" or row["bound"] <= row["epsilon"]
    # In nine of ten audits.
    stored = {row["release"]: row for row in audits.stored() if row["audit"] == "worse"}
    assert stored["correct"]["flagged"] == 0
    for name in tools.audit.WORSE:
        assert stored[name]["flagged"] >= 0.9 * stored[name]["seeds"] > 0
