"""Processors are told apart by what they compute."""

import pytest

from jaxpfl import cores


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
