"""The downloader against a real HTTP server on the loopback interface that serves good and bad files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import ssl
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from thinwire.errors import ConfigError, DataError
from thinwire.workloads import cifar10, download
from thinwire.workloads.download import SOURCES, RemoteFile, fetch

BODY = bytes(range(256)) * 3000


class _Site(ThreadingHTTPServer):
    """Paths to bodies; requests are counted, and a path may be cut short for its first requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, bytes] = {}
        self.truncate: dict[str, int] = {}
        self.requests: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: _Site

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        body = self.server.bodies.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.truncate.get(self.path, 0) > 0:
            self.server.truncate[self.path] -= 1
            body = body[: len(body) // 2]
        with contextlib.suppress(ConnectionError):  # a client that has seen enough hangs up
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test's output clean."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Site]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with _Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _remote(*urls: str, body: bytes = BODY, name: str = "file.bin") -> RemoteFile:
    return RemoteFile(name=name, urls=urls, nbytes=len(body), sha256=hashlib.sha256(body).hexdigest())


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_good_file_arrives_whole_with_progress_and_is_not_fetched_twice(site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    remote = _remote(site.url("/file.bin"))
    seen: list[tuple[str, int, int]] = []
    path = fetch(remote, tmp_path / "new" / "folder", lambda *step: seen.append(step))
    assert path.read_bytes() == BODY and _files(path.parent) == ["file.bin"]
    assert seen[-1] == ("file.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen) and len(seen) > 1
    assert fetch(remote, path.parent) == path
    assert site.requests == ["/file.bin"]


def test_a_damaged_file_on_disk_is_replaced(site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    (tmp_path / "file.bin").write_bytes(BODY[:-1] + b"\x00")
    assert fetch(_remote(site.url("/file.bin")), tmp_path).read_bytes() == BODY


def test_wrong_contents_are_refused_and_not_tried_again(site: _Site, tmp_path: Path) -> None:
    for number, (served, message) in enumerate(
        (
            (BODY[:-1] + b"\x00", "is not the published file: its SHA-256 is"),
            (BODY[:-1], "767,999 bytes came, expected 768,000"),
            (BODY + b"\x00" * 10_000_000, "more than 768,000 bytes came, expected 768,000"),
        ),
        1,
    ):
        site.bodies["/file.bin"] = served
        with pytest.raises(DataError) as caught:
            fetch(_remote(site.url("/file.bin")), tmp_path)
        assert message in str(caught.value)
        assert _files(tmp_path) == [] and len(site.requests) == number, message


def test_a_broken_transfer_is_tried_again(site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.truncate["/file.bin"] = 2
    assert fetch(_remote(site.url("/file.bin")), tmp_path).read_bytes() == BODY
    assert len(site.requests) == 3


def test_a_transfer_that_always_breaks_leaves_nothing(site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.truncate["/file.bin"] = 1000
    with pytest.raises(DataError, match=r"could not be fetched .*after 384,000 of 768,000 bytes"):
        fetch(_remote(site.url("/file.bin")), tmp_path)
    assert _files(tmp_path) == [] and len(site.requests) == download.ATTEMPTS


def test_not_found_names_the_address_and_the_second_address_is_used(site: _Site, tmp_path: Path) -> None:
    missing = site.url("/gone/file.bin")
    with pytest.raises(DataError) as caught:
        fetch(_remote(missing), tmp_path)
    assert missing in str(caught.value) and "404" in str(caught.value) and "by hand" in str(caught.value)
    site.bodies["/here/file.bin"] = BODY
    assert fetch(_remote(missing, site.url("/here/file.bin")), tmp_path).read_bytes() == BODY


def test_nobody_listening(tmp_path: Path) -> None:
    with _Site() as server:
        url = server.url("/file.bin")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(_remote(url), tmp_path)
    assert _files(tmp_path) == []


def test_a_local_file_is_not_a_download(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(BODY)
    with pytest.raises(ConfigError, match="neither http nor https"):
        fetch(_remote(secret.as_uri()), tmp_path / "folder")


def _archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


NAMES = (*cifar10.TRAIN_FILES, cifar10.TEST_FILE)
RECORDS = {f"{cifar10.SUBFOLDER}/{name}": bytes([i]) * cifar10.RECORD for i, name in enumerate(NAMES)}


def _serve_cifar(site: _Site, monkeypatch: pytest.MonkeyPatch, archive: bytes) -> None:
    site.bodies["/cifar.tar.gz"] = archive
    remote = _remote(site.url("/cifar.tar.gz"), body=archive, name="cifar-10-binary.tar.gz")
    monkeypatch.setitem(SOURCES, "cifar10", (remote,))


def test_an_archive_is_unpacked_to_where_data_looks(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive({**RECORDS, "../outside": b"x", "readme.html": b"y"}))
    assert download.download("cifar10", tmp_path / "cifar10") == tmp_path / "cifar10"
    assert cifar10.cifar10(tmp_path / "cifar10").train_y.tolist() == [0, 1, 2, 3, 4]
    assert _files(tmp_path) == ["cifar10"]
    assert _files(tmp_path / "cifar10" / cifar10.SUBFOLDER) == sorted(NAMES)


def test_archives_that_lack_a_file_are_refused(site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and other members cannot be met: the archive has the published SHA-256."""
    rest = dict(list(RECORDS.items())[1:])
    for i, archive in enumerate((_archive(rest), b"not an archive at all")):
        _serve_cifar(site, monkeypatch, archive)
        with pytest.raises(DataError, match="cannot be unpacked"):
            download.download("cifar10", tmp_path / str(i))


def test_the_table_is_well_formed() -> None:
    assert set(SOURCES) == {"mnist", "fashion-mnist", "cifar10"}
    for remotes in SOURCES.values():
        for remote in remotes:
            assert remote.urls and all(url.endswith("/" + remote.name) for url in remote.urls)
            assert len(remote.sha256) == 64 and set(remote.sha256) <= set("0123456789abcdef")


def test_what_cannot_be_downloaded() -> None:
    with pytest.raises(ConfigError, match="no download called 'digits'; these can be downloaded: mnist"):
        download.download("digits", Path("unused"))


def test_two_processes_that_fetch_one_file_do_not_meet(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.bodies["/file"] = BODY
    remote, here = _remote(site.url("/file")), os.getpid()

    def half_way(name: str, done: int, nbytes: int) -> None:
        if done < nbytes and os.getpid() == here:
            monkeypatch.setattr(os, "getpid", lambda: here + 1)
            fetch(remote, tmp_path)
            monkeypatch.undo()

    assert fetch(remote, tmp_path, half_way).read_bytes() == BODY
    assert _files(tmp_path) == ["file.bin"] and site.requests == ["/file"] * 2, "the second time it is there"


def test_a_broken_tls_connection_is_tried_again(site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.bodies["/file"] = BODY
    failures = [ssl.SSLError("record layer failure")]

    def progress(name: str, done: int, nbytes: int) -> None:
        if failures:  # where reading the next part of the body would raise it
            raise failures.pop()

    assert fetch(_remote(site.url("/file")), tmp_path, progress).read_bytes() == BODY
    assert site.requests == ["/file"] * 2
