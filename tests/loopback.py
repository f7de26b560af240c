"""An OpenAI-compatible server on loopback, whose answers a test decides."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@contextmanager
def completions(answer: Callable[[Any, int], tuple[int, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the address, and the requests so far: path, key, body.

    `answer` takes a body and how many have come with it, and returns a status and what is sent: a
    text, bytes as they are, other JSON; None breaks off within the answer.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            status, found = answer(body, len(asked))
            if isinstance(found, str):
                found = {"choices": [{"index": 0, "text": found, "finish_reason": "stop"}]}
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) + (found is None)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
