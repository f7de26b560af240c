"""The child's half of a comparison: see `benchmarks.peer`. It runs in each peer's interpreter."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(turn: Callable[[], object], **hello: Any) -> None:
    """Answers the start with `hello`, and every later line with the processor seconds of a turn."""
    print(json.dumps(hello), flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        turn()
        print(time.process_time() - began, flush=True)
