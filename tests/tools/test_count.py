"""Lines are counted by what they are, and names by where they are assigned."""

from tools import architecture, count

SOURCE = '''"""A module.

With two paragraphs.
"""

# Why.
LIMIT = 3  # a comment beside code is code
"""A string after an assignment is code."""


def f(found):
    """A function."""
    text = """
# no comment
"""
    for each, (held, _) in found:
        with each as known:
            pass
    return [told for told in text]
'''


def test_every_line_is_of_one_kind():
    lines = count.count(SOURCE)
    assert lines == count.Lines(1, 19, 9, 4, 2, 4)
    assert sum(lines[2:]) == lines.physical


def test_targets_are_counted_and_parameters_are_not():
    targets = count.assigned(SOURCE)
    assert [targets[name] for name in count.SAY_NOTHING] == [0, 1, 1, 1, 0, 0, 1]


def test_a_tree_that_grows_is_a_fault(tmp_path, monkeypatch):
    folder = tmp_path / "jaxpfl" / "data"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("x = 1\n\n\ny = 2\n")
    monkeypatch.setattr(architecture, "MOST_IN_TREE", {"jaxpfl": (4, 2), "tests": (0, 0)})
    assert count.by_folder("jaxpfl", tmp_path)["jaxpfl/data"].code == 2
    assert architecture.large_trees(tmp_path) == []
    (folder / "two.py").write_text("# more\n")
    (fault,) = architecture.large_trees(tmp_path)
    assert "(5, 2)" in fault.sentence
    (folder / "two.py").unlink()
    (folder / "one.py").write_text("x = 1\nz = 3\n\ny = 2\n")
    assert "(4, 3)" in architecture.large_trees(tmp_path)[0].sentence
