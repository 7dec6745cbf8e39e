"""Serve completions over HTTP with the standard library alone: `python examples/web_handler.py [MODEL] [--port 8000]`.

    curl -N localhost:8000 -d '{"prompt": "Once upon a time", "max_tokens": 32}'

The answer is plain text, sent piece by piece. Requests may come from several threads: an `LLM` takes them in turns.
A client that goes away ends its request, because closing a stream cancels it.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from edgeinfer import LLM
from edgeinfer.errors import EdgeInferError

MAX_BYTES = 1 << 20


def serve(llm: LLM, port: int) -> ThreadingHTTPServer:
    """Return a server on localhost; `serve_forever` runs it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                size = int(self.headers.get("Content-Length") or 0)
                options = json.loads(self.rfile.read(min(size, MAX_BYTES)))
                stream = llm.stream(options.pop("prompt"), **options)
            except (EdgeInferError, ValueError, KeyError, TypeError, AttributeError) as error:
                self.send_error(400, explain=f"{type(error).__name__}: {error}")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.end_headers()
            try:
                for piece in stream:
                    self.wfile.write(piece.encode())
            except ConnectionError:
                pass  # the client went away
            finally:
                stream.close()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    with LLM(chosen.model) as llm:
        serve(llm, chosen.port).serve_forever()
