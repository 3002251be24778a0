"""The downloader against a real HTTP server on the loopback interface that serves good and bad files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import io
import os
import ssl
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import ConfigError, DataError
from thinwire.workloads import cifar10, download
from thinwire.workloads.download import SOURCES, RemoteFile, fetch

BODY = bytes(range(256)) * 3000


class _Site(ThreadingHTTPServer):
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
    server: _Site

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
            server.stopping.set()
            server.shutdown()
            thread.join()


def _remote(*urls: str, body: bytes = BODY, name: str = "file.bin") -> RemoteFile:
    return RemoteFile(name=name, urls=urls, nbytes=len(body), sha256=hashlib.sha256(body).hexdigest())


def _failing(monkeypatch: pytest.MonkeyPatch, failures: list[OSError]) -> None:
    """Makes reading a body raise each of `failures`, once it has begun, and then read on."""
    for name in ("read", "read1"):
        read = getattr(http.client.HTTPResponse, name)

        def reads(response: http.client.HTTPResponse, nbytes: int, read: Any = read) -> Any:
            if response.length != len(BODY) and failures:
                raise failures.pop()
            return read(response, min(nbytes, 1000) if failures else nbytes)

        monkeypatch.setattr(http.client.HTTPResponse, name, reads)


def _full(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the disk full for files whose name begins so, once they are made."""
    real = Path.open

    def opens(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = real(path, mode, *args, **kwargs)
        if not path.name.startswith(name) or mode == "rb":
            return opened
        opened.close()
        return real(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "open", opens)


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


def test_an_address_that_is_asked_too_often_is_asked_again(site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.throttled["/file.bin"] = 1
    assert fetch(_remote(site.url("/file.bin")), tmp_path).read_bytes() == BODY
    assert len(site.requests) == 2


def test_a_transfer_that_always_breaks_leaves_nothing(site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.truncate["/file.bin"] = 1000
    with pytest.raises(DataError, match=r"could not be fetched .*after 384,000 of 768,000 bytes"):
        fetch(_remote(site.url("/file.bin")), tmp_path)
    assert _files(tmp_path) == [] and len(site.requests) == download.ATTEMPTS


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN])
def test_a_network_that_goes_away_amid_a_body_is_not_the_disk(
    number: int, site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.bodies |= {"/one/file.bin": BODY, "/two/file.bin": BODY}
    remote = _remote(site.url("/one/file.bin"), site.url("/two/file.bin"))
    _failing(monkeypatch, [OSError(number, os.strerror(number))])
    assert fetch(remote, tmp_path / "a").read_bytes() == BODY
    assert site.requests == ["/one/file.bin", "/two/file.bin"]
    _failing(monkeypatch, [OSError(number, os.strerror(number)) for _ in range(100)])
    with pytest.raises(DataError, match=f"could not be fetched .*{os.strerror(number)}"):
        fetch(remote, tmp_path / "b")
    assert _files(tmp_path / "b") == [] and len(site.requests) == 2 + 2 * download.ATTEMPTS


def test_a_full_disk_is_not_the_network(site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.bodies["/file.bin"] = BODY
    _full(monkeypatch, "file.bin")
    with pytest.raises(DataError, match=r"file\.bin could not be written .*No space left on device"):
        fetch(_remote(site.url("/file.bin"), site.url("/other")), tmp_path)
    assert _files(tmp_path) == [] and site.requests == ["/file.bin"]


def test_a_folder_that_cannot_be_made_is_not_the_network(site: _Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="could not be written"):
        fetch(_remote(site.url("/file.bin")), tmp_path / "file" / "folder")
    assert site.requests == []


def test_what_progress_raises_is_nobody_elses_error(site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY

    def closed(name: str, done: int, nbytes: int) -> None:
        raise BrokenPipeError("nobody reads the output")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        fetch(_remote(site.url("/file.bin")), tmp_path, closed)
    assert _files(tmp_path) == [] and site.requests == ["/file.bin"]


def test_a_server_that_trickles_is_given_up_and_the_second_address_is_used(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SLOW_S", 0.2)
    site.bodies |= {"/slow/file.bin": BODY, "/file.bin": BODY}
    site.trickling.add("/slow/file.bin")
    slow, seen = site.url("/slow/file.bin"), list[int]()
    fetch(_remote(slow, site.url("/file.bin")), tmp_path, lambda name, done, nbytes: seen.append(done))
    assert site.requests == ["/slow/file.bin", "/file.bin"]
    assert seen[0] < 40, "what comes is shown when it comes"
    (tmp_path / "file.bin").unlink()
    with pytest.raises(DataError, match=r"/slow/file\.bin: only \d+ bytes came in 0 s, \d+ of 768,000 in all"):
        fetch(_remote(slow), tmp_path)
    assert _files(tmp_path) == [] and len(site.requests) == 2 + download.ATTEMPTS


def test_a_fast_server_is_not_given_up_and_time_of_the_disk_does_not_count(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("thinwire.workloads.download.time", SimpleNamespace(monotonic=lambda: now[0]))
    site.bodies["/file.bin"] = BODY

    def late(name: str, done: int, nbytes: int) -> None:
        now[0] += 2 * download.SLOW_S

    assert fetch(_remote(site.url("/file.bin")), tmp_path, late).read_bytes() == BODY
    monkeypatch.setattr(download, "SLOW_S", 0.0)  # the bytes are counted after each read
    monkeypatch.setattr(download, "SLOW_NBYTES", 1)
    assert fetch(_remote(site.url("/file.bin")), tmp_path / "other").read_bytes() == BODY
    assert site.requests == ["/file.bin"] * 2


def test_wrong_contents_at_one_address_leave_the_others(site: _Site, tmp_path: Path) -> None:
    site.bodies |= {"/wrong/file.bin": b"<html>Log in</html>", "/file.bin": BODY}
    site.truncate["/file.bin"] = 1
    wrong, right = site.url("/wrong/file.bin"), site.url("/file.bin")
    assert fetch(_remote(wrong, right), tmp_path).read_bytes() == BODY
    assert site.requests == ["/wrong/file.bin", "/file.bin", "/file.bin"], "wrong contents are not asked for again"


def test_when_no_address_has_it_the_error_says_what_each_gave(site: _Site, tmp_path: Path) -> None:
    site.bodies |= {"/wrong": BODY[:-1] + b"\x00", "/short": BODY[:-2], "/cut": BODY}
    site.truncate["/cut"] = 1000
    urls = [site.url(path) for path in ("/wrong", "/short", "/gone", "/cut")]
    with pytest.raises(DataError) as caught:
        fetch(_remote(*urls), tmp_path)
    message = str(caught.value)
    for url, gave in zip(
        urls,
        (
            "this is not the published file: its SHA-256 is",
            "this is not the published file: 767,998 bytes came",
            "HTTP Error 404",
            "the connection ended after 384,000 of 768,000 bytes",
        ),
        strict=True,
    ):
        assert f"{url}: {gave}" in message
    assert f"get file.bin from elsewhere and put it into {tmp_path} by hand" in message
    assert site.requests == ["/wrong", "/short", "/gone", "/cut"] + ["/cut"] * (download.ATTEMPTS - 1)
    assert _files(tmp_path) == []


@pytest.mark.parametrize("framing", ["chunked", "none"])
def test_a_body_without_a_length(framing: str, site: _Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.framing["/file.bin"] = framing
    site.truncate["/file.bin"] = 2
    remote = _remote(site.url("/file.bin"))
    assert fetch(remote, tmp_path).read_bytes() == BODY
    assert len(site.requests) == 3, "where the connection ended too early it is tried again"
    site.bodies["/file.bin"] = BODY[:-1]
    with pytest.raises(DataError, match=r"767,999 (bytes came, expected|of) 768,000"):
        fetch(remote, tmp_path / "other")
    assert len(site.requests) == 3 + (1 if framing == "chunked" else download.ATTEMPTS)


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


def test_a_disk_that_is_full_while_unpacking_leaves_the_archive_alone(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive(RECORDS))
    _full(monkeypatch, NAMES[1])
    with pytest.raises(DataError, match=rf"{NAMES[1]} could not be written .*No space left") as caught:
        download.download("cifar10", tmp_path)
    assert "delete" not in str(caught.value) and "download it again" not in str(caught.value)
    assert _files(tmp_path) == [cifar10.SUBFOLDER, "cifar-10-binary.tar.gz"]
    assert _files(tmp_path / cifar10.SUBFOLDER) == [NAMES[0]]


def test_a_file_in_the_place_of_the_unpacked_folder(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive(RECORDS))
    (tmp_path / cifar10.SUBFOLDER).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{cifar10.SUBFOLDER} could not be written"):
        download.download("cifar10", tmp_path)


def test_an_interruption_while_unpacking_leaves_no_partial_file(
    site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive(RECORDS))
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.name == NAMES[2]:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download.download("cifar10", tmp_path)
    assert _files(tmp_path / cifar10.SUBFOLDER) == list(NAMES[:2])


def test_unpackings_of_one_process_id_do_not_meet(site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers that share a folder: their processes may have the same id."""
    _serve_cifar(site, monkeypatch, _archive(RECORDS))
    replace, parts = os.replace, list[Path]()

    def noted(source: Path, target: Path) -> None:
        parts.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    for _ in range(2):
        download.download("cifar10", tmp_path)
    assert len(set(parts)) == len(parts) == 1 + 2 * len(NAMES), "the archive is fetched once"


def test_the_table_is_well_formed() -> None:
    assert set(SOURCES) == {"mnist", "fashion-mnist", "cifar10"}
    for remotes in SOURCES.values():
        for remote in remotes:
            assert remote.urls and all(url.endswith("/" + remote.name) for url in remote.urls)
            assert len(remote.sha256) == 64 and set(remote.sha256) <= set("0123456789abcdef")


def test_what_cannot_be_downloaded() -> None:
    with pytest.raises(ConfigError, match="no download called 'digits'; these can be downloaded: mnist"):
        download.download("digits", Path("unused"))


def test_two_processes_of_one_id_that_fetch_one_file_do_not_meet(site: _Site, tmp_path: Path) -> None:
    """Two containers that share a folder: the second fetches while the first is half way."""
    site.bodies["/file"] = BODY
    remote = _remote(site.url("/file"))

    def half_way(name: str, done: int, nbytes: int) -> None:
        if done < nbytes and len(site.requests) == 1:
            fetch(remote, tmp_path)

    assert fetch(remote, tmp_path, half_way).read_bytes() == BODY
    assert _files(tmp_path) == ["file.bin"] and site.requests == ["/file"] * 2, "the second time it is there"


def test_a_broken_tls_connection_is_tried_again(site: _Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.bodies["/file"] = BODY
    _failing(monkeypatch, [ssl.SSLError("record layer failure")])
    assert fetch(_remote(site.url("/file")), tmp_path).read_bytes() == BODY
    assert site.requests == ["/file"] * 2
