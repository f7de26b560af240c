"""The audit of the arms of `chosen_texts`: by people, and able to fail."""

from itertools import chain

import numpy as np
import pytest

from benchmarks.macro.judged_texts import audited, of_people, unigram_bits
from jaxpfl.data import from_clients


def speeches(people: range) -> dict[str, list[list[str]]]:
    """By person, the texts of each of one to three speeches, all words of which are its own."""
    return {
        f"p{i:03}": [
            [f"p{i}s{j}t{k}a p{i}s{j}t{k}b " * 4 for k in range(2)] for j in range(1 + i % 3)
        ]
        for i in people
    }


def population(of: dict[str, list[list[str]]]):
    parts = {f"{p}/{j}": {"text": texts} for p, all in of.items() for j, texts in enumerate(all)}
    return from_clients(parts), np.array([name.split("/")[0] for name in parts])


def test_people_have_the_texts_of_all_their_clients():
    of = speeches(range(7))
    people = of_people(*population(of))
    assert {
        str(person): people.examples(i)["text"].to_pylist()
        for i, person in enumerate(people.client_ids)
    } == {person: [*chain(*all)] for person, all in of.items()}


def test_training_peoples_own_texts_fail_the_audit_and_strangers_pass():
    training, held_out, strangers = (
        of_people(*population(speeches(range(start, start + 60)))) for start in (0, 60, 120)
    )
    own, others = (side.columns["text"].to_pylist() for side in (training, strangers))
    by_own = audited(own, training, held_out)
    assert by_own["audit"] == "fails" and by_own["longest, training"] == 8
    assert by_own["shared"][8] == [60, 0] and by_own["longest, held_out"] == 0
    assert audited(others, training, held_out)["audit"] == "passes"


def test_bits_are_those_of_held_out_tokens_by_written_frequencies():
    written = [np.array([0, 0, 1], np.int32), np.array([], np.int32)]
    held_out = [np.array([0, 2], np.int32), np.array([1], np.int32)]
    # Counts with 0.02 more each: 2.02, 1.02, 0.02 and 0.02 of 3.08.
    expected = -np.log2(np.array([2.02, 0.02, 1.02]) / 3.08).mean()
    assert unigram_bits(written, held_out, vocab_size=4) == pytest.approx(expected)
