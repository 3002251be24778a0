"""The downloader against a real HTTP server on the loopback interface that serves good and bad files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import cifar10, download
from thinwire_lab.workloads.download import SOURCES, RemoteFile, fetch

BODY = bytes(range(256)) * 3000
NAMES = (*cifar10.TRAIN_FILES, cifar10.TEST_FILE)


class Site(ThreadingHTTPServer):
    """Paths to bodies; requests are noted. The first answers of a path are cut short."""

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


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def remote_file(*urls: str, body: bytes = BODY, name: str = "file.bin") -> RemoteFile:
    return RemoteFile(name=name, urls=urls, nbytes=len(body), sha256=hashlib.sha256(body).hexdigest())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_file_is_fetched_once_and_a_damaged_one_again(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    remote = remote_file(site.url("/file.bin"))
    seen: list[tuple[str, int, int]] = []
    path = fetch(remote, tmp_path / "new" / "folder", lambda *step: seen.append(step))
    assert path.read_bytes() == BODY and files(path.parent) == ["file.bin"]
    assert seen[-1] == ("file.bin", len(BODY), len(BODY)) and len(seen) > 1
    assert fetch(remote, path.parent) == path and site.requests == ["/file.bin"]
    path.write_bytes(BODY[:-1] + b"\x00")
    assert fetch(remote, path.parent).read_bytes() == BODY


def test_broken_transfers_are_tried_again_and_addresses_of_another_file_given_up(site: Site, tmp_path: Path) -> None:
    site.bodies |= {"/file.bin": BODY, "/wrong": BODY[:-1] + b"\x00", "/long": BODY + bytes(10_000_000)}
    site.truncate["/file.bin"] = 2
    good = remote_file(*map(site.url, ("/wrong", "/gone", "/file.bin")))
    assert fetch(good, tmp_path / "good").read_bytes() == BODY and len(site.requests) == 5
    site.truncate["/file.bin"] = 1000
    urls = [site.url(path) for path in ("/wrong", "/long", "/gone", "/file.bin")]
    site.requests.clear()
    with pytest.raises(DataError) as caught:
        fetch(remote_file(*urls), tmp_path / "bad")
    assert site.requests == ["/wrong", "/long", "/gone", *["/file.bin"] * download.ATTEMPTS]
    for url, gave in zip(urls, ("its SHA-256 is", "more than 768,000", "404", "384,000 bytes"), strict=True):
        assert url in str(caught.value) and gave in str(caught.value)
    assert files(tmp_path / "bad") == []


def test_what_cannot_be_fetched_or_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="could not be written"):
        fetch(remote_file(site.url("/file.bin")), tmp_path / "file" / "folder")
    with pytest.raises(ConfigError, match="neither http nor https"):
        fetch(remote_file((tmp_path / "secret").as_uri()), tmp_path)
    with pytest.raises(ConfigError, match="'digits'"):
        download.download("digits", tmp_path)


def test_an_archive_is_unpacked_to_where_data_looks(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {f"{cifar10.SUBFOLDER}/{name}": bytes([i]) * cifar10.RECORD for i, name in enumerate(NAMES)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, body in {**records, "../outside": b"x"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    for number, archive in enumerate((buffer.getvalue(), b"not an archive at all")):
        site.bodies["/cifar.tar.gz"] = archive
        remote = remote_file(site.url("/cifar.tar.gz"), body=archive, name="cifar-10-binary.tar.gz")
        monkeypatch.setitem(SOURCES, "cifar10", (remote,))
        folder = tmp_path / str(number)
        if number:
            with pytest.raises(DataError, match="cannot be unpacked"):
                download.download("cifar10", folder)
        else:
            assert download.download("cifar10", folder) == folder
            assert cifar10.cifar10(folder).train_y.tolist() == [0, 1, 2, 3, 4]
            assert files(tmp_path) == ["0"] and files(folder / cifar10.SUBFOLDER) == sorted(NAMES)
