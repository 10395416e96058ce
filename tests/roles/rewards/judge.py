"""A judge that somebody else runs: an HTTP server that speaks as OpenAI, and answers by a function of what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], str | int | dict[str, Any]]
"""What is said to a request's body, the status that refuses it, or all that is answered."""


@contextmanager
def judging(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its url, and what it was asked so far."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._tell(200, {"data": [{"id": "stub"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            said = answer(body)
            if isinstance(said, int):
                self._tell(said, {"error": {"message": "no"}})
                return
            if isinstance(said, dict):
                self._tell(200, said)
                return
            usage = {"prompt_tokens": 7, "completion_tokens": 2}
            self._tell(200, {"choices": [{"message": {"role": "assistant", "content": said}}], "usage": usage})

        def _tell(self, status: int, told: Any) -> None:
            text = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
