"""A real HTTP server on the loopback interface that serves good and bad files, and disks that are full."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from thinwire_lab.workloads.download import RemoteFile

BODY = bytes(range(256)) * 3000


class Site(ThreadingHTTPServer):
    """Paths to bodies; requests are counted, and a path may be cut short for its first requests.

    Attributes:
        framing: how a path says where its body ends, if not by a Content-Length: "chunked", or "none" at all.
        throttled: for how many requests a path says that there are too many.
        trickling: the paths that send a byte now and then, for two seconds.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, bytes] = {}
        self.truncate: dict[str, int] = {}
        self.throttled: dict[str, int] = {}
        self.framing: dict[str, str] = {}
        self.trickling: set[str] = set()
        self.requests: list[str] = []
        self.stopping = threading.Event()

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
        if self.server.throttled.get(self.path, 0) > 0:
            self.server.throttled[self.path] -= 1
            self.send_error(429)
            return
        self.send_response(200)
        framing = self.server.framing.get(self.path, "length")
        if framing == "length":
            self.send_header("Content-Length", str(len(body)))
        elif framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:1000], body[1000:])) + b"0\r\n\r\n"
        self.end_headers()
        if self.server.truncate.get(self.path, 0) > 0:
            self.server.truncate[self.path] -= 1
            body = body[: len(body) // 2]
        with contextlib.suppress(ConnectionError):  # a client that has seen enough hangs up
            for _ in range(40 if self.path in self.server.trickling else 0):
                self.wfile.write(body[:1])
                body = body[1:]
                self.server.stopping.wait(0.05)
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test's output clean."""


def remote_file(*urls: str, body: bytes = BODY, name: str = "file.bin") -> RemoteFile:
    return RemoteFile(name=name, urls=urls, nbytes=len(body), sha256=hashlib.sha256(body).hexdigest())


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the disk full for files whose name begins so, once they are made."""
    real = Path.open

    def opens(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = real(path, mode, *args, **kwargs)
        if not path.name.startswith(name) or mode == "rb":
            return opened
        opened.close()
        return real(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "open", opens)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
