"""A hub on 127.0.0.1 with one model, speaking the few requests that huggingface_hub makes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Contents of the server, and the requests that it received."""

    def __init__(self, folder: Path, repo_id: str):
        self.folder = folder
        self.repo_id = repo_id
        self.error: tuple[int, str, str] | None = None
        """Status, X-Error-Code and message with which every request is answered."""
        self.requests: list[str] = []
        self.url = ""


@contextmanager
def serve(folder: Path, repo_id: str) -> Iterator[Hub]:
    """Serve the files of a folder as a model."""
    hub = Hub(folder, repo_id)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, hub, body=True)

        def do_HEAD(self) -> None:
            answer(self, hub, body=False)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(request: BaseHTTPRequestHandler, hub: Hub, body: bool) -> None:
    """One response: an error, the model's list of files, or a file."""
    path = unquote(request.path.split("?")[0])
    hub.requests.append(f"{request.command} {path}")
    api, files = f"/api/models/{hub.repo_id}", f"/{hub.repo_id}/resolve/"
    if hub.error:
        status, code, message = hub.error
        send(request, status, b"{}", {"X-Error-Code": code, "X-Error-Message": message}, body)
    elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
        files = sorted(hub.folder.iterdir())
        info = {"id": hub.repo_id, "modelId": hub.repo_id, "sha": COMMIT, "private": False, "tags": [], "downloads": 0,
                "likes": 0, "siblings": [{"rfilename": p.name, "size": p.stat().st_size} for p in files]}
        send(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
    elif path == f"{api}/tree/{COMMIT}":
        tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": COMMIT} for p in hub.folder.iterdir()]
        send(request, 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
    elif path.startswith(api + "/revision/"):
        send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}, body)
    elif path.startswith(files) and (hub.folder / path.rsplit("/", 1)[1]).is_file():
        content = (hub.folder / path.rsplit("/", 1)[1]).read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        send(request, 200, content, headers, body)
    else:
        send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, body)


def send(request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
    """Write one response."""
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if body:
        request.wfile.write(content)
