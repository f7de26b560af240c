import dataclasses
import re

import numpy as np

from jaxpfl.text.generation.few_shot import POPRI, FewShot
from jaxpfl.text.preference.groups import preferences

SAMPLES = [f"text number {i}" for i in range(7)]


def test_prompt_of_the_paper():
    prompt = POPRI.prompt(["one ", "two", "three"])
    lines = [line for line in prompt.splitlines() if line]
    assert lines == [
        "List of 6 diverse original text samples:",
        *("Original Text Sample 1", "one", "Original Text Sample 2", "two"),
        *("Original Text Sample 3", "three", "Original Text Sample 4"),
    ]


def test_responses_end_before_the_next_heading():
    assert POPRI.response(" new text \n\nOriginal Text Sample 5\nmore") == "new text"
    assert POPRI.response("all of it") == "all of it"
    assert POPRI.response("Original Text Sample 5") == ""
    lines = FewShot(head="", heading="", after="\n", stop="\n")
    assert lines.response("a line\nanother") == "a line"
    assert lines.prompt(["a", "b", "c"]) == "a\nb\nc\n"
    assert FewShot(stop="", flatten=False).response(" a\nb ") == "a\nb"


def test_a_text_is_one_line():
    lines = FewShot(shots=1, head="", heading="", after="\n", stop="END")
    assert lines.response(" a\n\nb\tc END\n d") == "a b c"
    assert lines.prompt(["a\nb "]) == "a b\n"
    assert dataclasses.replace(lines, flatten=False).prompt(["a\nb "]) == "a\nb\n"


def test_draws_are_without_replacement_and_new_in_every_round():
    def drawn(round, seed=0, number=40):
        prompts = POPRI.prompts(SAMPLES, number, seed=seed, round=round)
        return [re.findall("text number ([0-9])", prompt) for prompt in prompts]

    first = drawn(0)
    assert all(len(set(row)) == 3 for row in first)
    assert len({tuple(row) for row in first}) > 20
    assert {one for row in first for one in row} == set("0123456")
    assert drawn(0) == first
    # Addressed: a prompt does not depend on how many others are drawn.
    assert drawn(0, number=5) == first[:5]
    assert drawn(1) != first and drawn(0, seed=1) != first


def test_preferences_by_rank():
    scores = np.array([[0.1, 0.9, 0.5, 0.7], [4.0, 3.0, 2.0, 1.0]])
    for rank, expected in ((2, [3, 1]), (4, [0, 3])):
        _, chosen_K, rejected_K = preferences(scores, rank, scores > 0)
        np.testing.assert_array_equal(chosen_K, [1, 0])
        np.testing.assert_array_equal(rejected_K, expected)
    # Equal scores rank by place.
    assert [
        each.tolist() for each in preferences(np.zeros((1, 10)), 5, np.ones((1, 10), bool))
    ] == [[0], [0], [4]]
