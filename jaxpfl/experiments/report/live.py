"""`jaxpfl run --live`: the page of the run that is under way, from memory, on this machine alone.

The page is that of the records so far. How fast the run is follows from what clients hold: it is in
no file, and for the owner's eyes. Therefore the address has a secret, and a page of another site,
whose name may lead here, is refused for its name.
"""

import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from markupsafe import escape

from jaxpfl.experiments.report.page import page_html
from jaxpfl.experiments.report.run_page import RunFiles, run_page
from jaxpfl.progress import Progress

# Between two drawings, each of which takes a second from the run.
_SECONDS = 15
_STATUS = "<!-- where the run is -->"
_POLICY = "default-src 'unsafe-inline'; img-src data:; connect-src 'self'"


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serves the page of the run in `directory` while the context is open; yields its address."""
    drawing = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            requested = f"http://{self.headers.get('Host')}{self.path}"
            if not secrets.compare_digest(requested.encode(), address.encode()):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            with drawing:
                html = _drawn(directory, time.monotonic() // _SECONDS)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            status = escape(Progress.latest or "It begins.")
            self.wfile.write(html.replace(_STATUS, status).encode())

        def log_message(self, *_: object) -> None:
            """A terminal shows the run's progress."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # Errors of a request, as of a browser that left, must not disturb the run.
        server.handle_error = lambda request, client_address: None
        address = f"http://127.0.0.1:{server.server_port}/{secrets.token_urlsafe(16)}"
        sys.stderr.write(f"live page: {address}\n")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield address
        finally:
            server.shutdown()


@lru_cache(1)
def _drawn(directory: Path, _: float) -> str:
    """The page of the run in a directory that is not finished, else of the last one."""
    runs = sorted(path.parent for path in directory.rglob("run.json"))
    if not runs:
        return f"<!doctype html><meta http-equiv='refresh' content='2'><p>{_STATUS}"
    latest = ([run for run in runs if not (run / "result.json").exists()] or runs)[-1]
    return page_html(latest, run_page(RunFiles.read(latest)), live=_STATUS)
