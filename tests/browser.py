"""Pages in Chromium, whose program JAXPFL_CHROMIUM names; NODE_PATH has puppeteer-core."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("JAXPFL_CHROMIUM")


def seen(page: Path, what: str) -> dict[str, Any]:
    command = ["node", str(Path(__file__).with_suffix(".cjs")), str(page), what]
    found = json.loads(subprocess.run(command, capture_output=True, timeout=120, check=True).stdout)
    assert not found["asked"] and not found["errors"], found
    return found
