"""The planted defects of tests/defects fit the code, and docs/trust_tests.md lists them all.

That each is caught is for `make defects`, which takes minutes.
"""

import re

import pytest
import yaml

from tools import defects

ROOT = defects.ROOT
PROMISES = defects.read()


def test_names_are_different():
    names = [promise.defect.name for promise in PROMISES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("promise", PROMISES, ids=[each.defect.name for each in PROMISES])
def test_a_defect_can_be_planted_and_its_test_is_there(promise):
    sound = (ROOT / promise.defect.file).read_text()
    planted = defects.planted(promise.defect, sound)
    assert planted != sound
    if promise.defect.file.endswith(".py"):
        compile(planted, promise.defect.file, "exec")
    elif promise.defect.file.endswith(".yaml"):
        yaml.safe_load(planted)
    file, name = promise.test.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_the_page_has_the_table_of_all_promises():
    page = defects.PAGE.read_text()
    assert defects.written(page, PROMISES) == page, "run tools/defects.py --write"


def test_the_page_in_words_has_a_row_of_each_case():
    page = (ROOT / "docs" / "trust.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    in_words = {int(case) for row in rows for case in row.split(", ")}
    in_words.add(59)  # of the tests themselves: a sentence below the tables
    assert in_words == {promise.case for promise in PROMISES}
