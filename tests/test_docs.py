"""The documents are true: links lead somewhere, examples run, notebooks hold no outputs."""

import ast
import json
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A generator, its adapters and their tuning are many programs to compile.
SLOW = ("popri.ipynb",)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_and_pictures_exist(page: Path):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{_name(page)} points to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_examples_are_valid_and_use_names_that_exist(page: Path):
    import jaxpfl

    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jp."):
                found = jaxpfl
                for name in ast.unparse(node).split(".")[1:]:
                    found = getattr(found, name)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=_name)
def test_notebook_is_stored_without_outputs(notebook: Path):
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "clear the outputs before committing"
            assert cell["execution_count"] is None, "clear the counts before committing"


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(n, marks=pytest.mark.slow if n.name in SLOW else ()) for n in NOTEBOOKS],
    ids=_name,
)
def test_notebook_runs_on_small_settings(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAXPFL_NOTEBOOK_SMALL", "1")
    # The tests' own backend draws nothing into a notebook.
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # A kernel without its own configuration: nothing is read from, or left in, the user's home.
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    document = nbformat.read(notebook, as_version=4)
    client = nbclient.NotebookClient(
        document,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [output for cell in document.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds, "the story has lost its pictures"
