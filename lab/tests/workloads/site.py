"""A real HTTP server on the loopback interface that serves good and bad files."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from thinwire_lab.workloads.download import RemoteFile

BODY = bytes(range(256)) * 3000


class Site(ThreadingHTTPServer):
    """Paths to bodies; requests are noted. A path is cut short for its first requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, bytes] = {}
        self.truncate: Counter[str] = Counter()
        self.requests: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        body = self.server.bodies.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.truncate[self.path] > 0:
            self.server.truncate[self.path] -= 1
            body = body[: len(body) // 2]
        with contextlib.suppress(ConnectionError):  # a client that has seen enough hangs up
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test's output clean."""


def remote_file(*urls: str, body: bytes = BODY, name: str = "file.bin") -> RemoteFile:
    return RemoteFile(name=name, urls=urls, sha256=hashlib.sha256(body).hexdigest())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
