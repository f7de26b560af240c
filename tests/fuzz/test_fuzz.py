"""TRUST 39: whatever a file holds, it is read, or refused with the library's own error.

Each reader gets some damaged files. With JAXPFL_FUZZ_INPUTS=10_000_000 it is so many of all readers
together: `-n 2` has two readers side by side, and names one whose process dies.
"""

import os
import resource

import pytest

from tests.fuzz.mutants import mutant
from tests.fuzz.targets import TARGETS, made, run_input


def inputs(share: float) -> range:
    """The numbers of a reader's inputs; with a share of 1 one takes some ten milliseconds."""
    if "JAXPFL_FUZZ_INPUTS" in os.environ:
        shares = sum(target.share for target in TARGETS.values())
        count = round(int(os.environ["JAXPFL_FUZZ_INPUTS"]) * share / shares)
    else:
        count = max(3, min(120, round(6 * share)))
    return range(1, count + 1)


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_read_or_refused(name, tmp_path):
    """TRUST 6, 39: never another exception, and no memory beyond what the file is worth."""
    target = TARGETS[name]
    seed = made(target, tmp_path)
    target.sign(tmp_path)
    target.read(tmp_path)  # the file itself is sound
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in inputs(target.share):
        try:
            run_input(target, tmp_path, mutant(seed, name, number))
        except Exception as error:
            raise AssertionError(f"input {number} of {name!r} is not refused") from error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_a_mutant_is_a_function_of_its_number():
    seed = b'{"a": [1, 2], "b": "c"}'
    first = [mutant(seed, "x", number) for number in range(200)]
    assert first == [mutant(seed, "x", number) for number in range(200)]
    assert first[0] == seed and len(set(first)) > 150
