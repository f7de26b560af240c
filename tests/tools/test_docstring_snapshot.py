"""The tool that makes the docstring corpora: what of a package's files becomes a sentence."""

import json
import sys
import textwrap
from importlib import metadata

import pytest

from tools import docstring_snapshot
from tools.docstring_snapshot import definitions, notice, sentences, snapshot

NUMPY_STYLE = """
    Compute the *weighted* mean, e.g. of `x`, along an axis. See :func:`numpy.mean` for more.

    .. versionadded:: 1.4
       This is never prose of anyone.

    Parameters
    ----------
    x : array_like, shape (n, m)
        The values to average. They may be
        of any real type.
    axis, keepdims : {0, 1}, optional
        The axis along which the mean is taken [1]_.

    Returns
    -------
    ndarray
        The mean of each of the columns.

    See Also
    --------
    numpy.median : The median is another thing entirely.

    Notes
    -----
    .. note:: The weights are normalised to one.

    The definition is::

        this is code that nobody should read

    where :math:`w_i` are the weights of it. It holds in all the cases.

    - The first point is about speed.
    - The second point is about memory.

    References
    ----------
    .. [1] Someone wrote a book about this.

    Examples
    --------
    >>> mean(x)
    the output of a doctest here

    Prose between the examples is dropped.
"""
NUMPY_PROSE = [
    "Compute the weighted mean, e.g. of x, along an axis.",
    "See numpy.mean for more.",
    "The values to average.",
    "They may be of any real type.",
    "The axis along which the mean is taken.",
    "The mean of each of the columns.",
    "The weights are normalised to one.",
    "The definition is:",
    "It holds in all the cases.",
    "The first point is about speed.",
    "The second point is about memory.",
]

GOOGLE_STYLE = """Runs the function on every device.

  Longer text goes here, over
  two lines of the docstring.

  Args:
    fun: the function to be run on devices.
      It must be pure and traceable.
    axis_name (str): a name for the mapped axis.

  Returns:
    A function with the same arguments as ``fun``.

  Example:
    words that only illustrate the example here

  Raises:
    ValueError: if the axis is not there.

  ```
  fenced code is not prose either
  ```
"""
GOOGLE_PROSE = [
    "Runs the function on every device.",
    "Longer text goes here, over two lines of the docstring.",
    "the function to be run on devices.",
    "It must be pure and traceable.",
    "a name for the mapped axis.",
    "A function with the same arguments as fun.",
    "if the axis is not there.",
]


@pytest.mark.parametrize(
    ("docstring", "prose"),
    [
        (NUMPY_STYLE, NUMPY_PROSE),
        (GOOGLE_STYLE, GOOGLE_PROSE),
        *((each, []) for each in ("", "\n", "Short one.", "x : int", ">>> a b c d", "=====", "\0")),
    ],
    ids=["numpy", "google", *map(str, range(7))],
)
def test_a_docstring_leaves_its_prose(docstring, prose):
    assert sentences(docstring) == prose


def test_definitions_are_public_documented_and_at_the_top_level():
    source = textwrap.dedent(
        '''
        """The module's own docstring is nobody's."""
        import os

        @decorated(x="""not a docstring""")
        def plain(a: str = "x:", *, b={"c": 1}) -> int:  # a comment: here
            """Plain's own words."""
            def inner():
                """Never this."""

        class Thing(Base):
            # why it is so

            r"""Thing's own \\words."""

            def method(self):
                """Not a client."""

        def quoted(): "Without the usual quotes."

        async def _hidden():
            """Never this."""

        def undocumented(x):
            return """never this"""

        def template():
            text: str = """never this"""

        def single(): \'\'\'Single quotes count.\'\'\'
        '''
    )
    assert dict(definitions(source)) == {
        "plain": "Plain's own words.",
        "Thing": "Thing's own \\words.",
        "single": "Single quotes count.",
    }
    broken = 'def f(:\n    """Broken."""\ndef g():\n    """Whole."""\ndef h():\n    """Cut'
    assert dict(definitions(broken)) == {"g": "Whole."}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose import raises."""
    folder = tmp_path / "some_package"
    (folder / "tests").mkdir(parents=True)
    trap = 'raise SystemExit\ndef f():\n    """These are four words."""\n'
    (folder / "__init__.py").write_text(trap)
    (folder / "module.py").write_text('def _f():\n    pass\ndef g():\n    """Hi."""\n')
    (folder / "tests" / "a.py").write_text('def h():\n    """Not for any reader."""\n')
    (tmp_path / "silent_package.py").write_text("def f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_packages_are_read_and_never_imported(package):
    """TRUST 39: nothing of a package runs. Private names and tests are left out."""
    assert snapshot(["some_package"]).to_pydict() == {
        "client": ["some_package.f"],
        "text": [["These are four words."]],
    }
    assert "some_package" not in sys.modules
    with pytest.raises(SystemExit, match="silent_package"):
        snapshot(["silent_package"])


def test_the_notice_names_releases_and_holds_their_licences():
    text = notice({name: metadata.distribution(name) for name in ("numpy", "rich", "flax")})
    for name in ("numpy", "rich", "flax"):
        assert f"{name} {metadata.version(name)}, {docstring_snapshot.PACKAGES[name]}" in text
    # An MIT and a BSD licence; Apache's is the project's own.
    assert "Copyright (c) 2020 Will McGugan" in text
    assert "NumPy Developers" in text
    assert "TERMS AND CONDITIONS" not in text


def test_the_shipped_notice_names_what_the_shipped_snapshot_holds():
    import pyarrow.parquet as parquet

    metadata_of_file = parquet.read_schema(
        docstring_snapshot.FOLDER / "docstrings.parquet"
    ).metadata
    releases = json.loads(metadata_of_file[b"packages"])
    text = (docstring_snapshot.FOLDER / "docstrings.NOTICE.txt").read_text("utf-8")
    assert list(releases) == list(docstring_snapshot.PACKAGES)
    for release in releases.values():
        assert f"{release['distribution']} {release['version']}, " in text
