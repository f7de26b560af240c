"""Work on all cores of the host: the plain loop's results, and BLAS left as it was."""

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from jaxpfl import cores


@pytest.fixture(params=[1, 2, 5])
def number(request, monkeypatch):
    monkeypatch.setattr(cores, "number", lambda: request.param)
    return request.param


def threads_of_blas() -> list[int]:
    return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]


def test_results_come_in_the_order_of_the_items(number):
    def doubled(item):
        if item == 0:
            # Not the first one to end, where there are others.
            threading.Event().wait(0.05)
        return 2 * item

    assert cores.side_by_side(doubled, iter(range(7))) == list(range(0, 14, 2))
    assert cores.side_by_side(doubled, []) == []


def test_items_are_taken_side_by_side_on_as_many_threads_as_there_are_cores(number):
    together = threading.Barrier(number)  # would break, if fewer came at a time
    found = cores.side_by_side(lambda _: together.wait(60), range(number))
    assert sorted(found) == list(range(number))


def test_products_have_one_thread_inside_and_as_many_as_before_afterwards(number):
    before = threads_of_blas()
    assert before, "no BLAS was found"
    for inside in cores.side_by_side(lambda _: threads_of_blas(), range(3)):
        assert set(inside) == {1} or number == 1
    with cores.one_thread_a_product():
        assert set(threads_of_blas()) == {1}
    assert threads_of_blas() == before


def test_an_error_is_raised_and_blas_is_left_as_it_was(number):
    before = threads_of_blas()

    def fail(item):
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        cores.side_by_side(fail, range(3))
    assert threads_of_blas() == before


def test_a_call_inside_of_another_is_a_plain_loop(number):
    found = cores.side_by_side(
        lambda row: cores.side_by_side(lambda column: row * column, range(3)), range(4)
    )
    np.testing.assert_array_equal(found, np.outer(range(4), range(3)))


def told(tmp_path, monkeypatch, text):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cores, "_CPUINFO", tmp_path / "cpuinfo")
    return cores.processor()


X86 = "processor : 0\nmodel name : Some CPU\ncpu family : {}\ncpu MHz : {}\nflags : fpu {}\n\n"
ARM = "processor : 0\nBogoMIPS : 50\nFeatures : fp crc32 {}\nCPU part : 0xd0c\n\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X86.format(25, 2000, "avx2"), X86.format(26, 2000, "avx2")),
        (X86.format(25, 2000, "avx2"), X86.format(25, 2000, "avx2 avx512f")),
        (ARM.format("asimd"), ARM.format("asimd sve")),
    ],
)
def test_processors_of_one_name_are_told_apart(tmp_path, monkeypatch, one, other):
    assert told(tmp_path, monkeypatch, one) != told(tmp_path, monkeypatch, other)


def test_a_processor_is_itself_at_another_clock_rate_and_kernel(tmp_path, monkeypatch):
    one, other = X86.format(25, 2000, "avx2 fma"), X86.format(25, 3100, "new_bug fma avx2")
    assert told(tmp_path, monkeypatch, one + one) == told(tmp_path, monkeypatch, other)


def test_a_system_without_the_file_names_its_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_CPUINFO", tmp_path / "missing")
    assert set(cores.processor()) == {"model name"}
