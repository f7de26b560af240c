"""Pages in a headless browser, where there is one.

JAXPFL_CHROMIUM names Chromium's program, and NODE_PATH a folder that has puppeteer-core.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def seen(page: Path, what: str) -> dict[str, Any]:
    """What `browser.cjs` saw on a page; skips the test without a browser."""
    if not os.environ.get("JAXPFL_CHROMIUM") or shutil.which("node") is None:
        pytest.skip("no browser: needs node, puppeteer-core on NODE_PATH, and JAXPFL_CHROMIUM")
    command = ["node", str(Path(__file__).with_suffix(".cjs")), str(page), what]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert not found["asked"] and not found["errors"], found
    return found
