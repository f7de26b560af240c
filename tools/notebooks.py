"""Runs the notebooks and stores their outputs, so that a reader sees them without running anything.

    python tools/notebooks.py [NAME ...]      all of notebooks/, or those named, at full size

What is stored is what a reader needs: results and pictures. Progress, temporary paths and times of
execution are left out, pictures have at most 256 colours. The metadata holds a hash of the code
that made the outputs, which `is_current` compares with the code that is there.
"""

import argparse
import base64
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
_KEY = "outputs_are_of"


def code_hash(notebook: Any) -> str:
    """A hash of a notebook's code cells."""
    code = [_text(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def is_current(path: Path) -> bool:
    """Whether the stored outputs are of the code that the notebook has."""
    notebook = json.loads(path.read_text("utf-8"))
    return notebook["metadata"].get(_KEY) == code_hash(notebook)


def execute(path: Path) -> None:
    """Runs a notebook in an empty folder, and stores its outputs in it."""
    import nbclient
    import nbformat

    # Whatever draws elsewhere, pictures go into the notebook.
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=None,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [_cleaned(each) for each in cell.outputs if not _is_progress(each)]
    notebook.metadata[_KEY] = code_hash(notebook)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def _is_progress(output: Any) -> bool:
    # A bar is empty once it is done.
    return output.get("name") == "stderr" or output.get("data", {}).get("text/html") == ""


def _cleaned(output: Any) -> Any:
    for holder, key in [(output, "text"), *((output.get("data", {}), kind) for kind in _TEXTS)]:
        if key in holder:
            # A folder that is gone, and had a random name.
            holder[key] = re.sub(
                rf"{re.escape(tempfile.gettempdir())}/([a-z]+-)?\w+", "RUNS", _text(holder[key])
            )
    if "image/png" in output.get("data", {}):
        output["data"]["image/png"] = _small(output["data"]["image/png"])
    return output


_TEXTS = ("text/plain", "text/html", "text/markdown")


def _small(encoded: str) -> str:
    """A picture with at most 256 colours, and nothing besides."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    target = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(target, "png", optimize=True)
    return base64.b64encode(target.getvalue()).decode()


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def main() -> None:
    """Runs the notebooks."""
    parser = argparse.ArgumentParser(description="Runs the notebooks and stores their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as quickstart; default: all")
    arguments = parser.parse_args()
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if unknown := set(arguments.names) - set(paths):
        parser.error(f"there is no notebook {min(unknown)}; there are {', '.join(paths)}")
    for name in arguments.names or paths:
        print(f"running {name}", file=sys.stderr)
        execute(paths[name])


if __name__ == "__main__":
    main()
