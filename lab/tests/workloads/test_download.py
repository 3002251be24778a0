"""The downloader against a real HTTP server on the loopback interface that serves good and bad files."""

from __future__ import annotations

import errno
import http.client
import io
import os
import ssl
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lab.tests.workloads.site import BODY, Site, files, full_disk, remote_file
from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import cifar10, download
from thinwire_lab.workloads.download import SOURCES, fetch

NAMES = (*cifar10.TRAIN_FILES, cifar10.TEST_FILE)
RECORDS = {f"{cifar10.SUBFOLDER}/{name}": bytes([i]) * cifar10.RECORD for i, name in enumerate(NAMES)}


def test_fetch_writes_a_whole_file_reports_progress_and_skips_it_the_next_time(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    remote = remote_file(site.url("/file.bin"))
    seen: list[tuple[str, int, int]] = []
    path = fetch(remote, tmp_path / "new" / "folder", lambda *step: seen.append(step))
    assert path.read_bytes() == BODY and files(path.parent) == ["file.bin"]
    assert seen[-1] == ("file.bin", len(BODY), len(BODY)) and len(seen) > 1
    assert fetch(remote, path.parent) == path and site.requests == ["/file.bin"]
    path.write_bytes(BODY[:-1] + b"\x00")
    assert fetch(remote, path.parent).read_bytes() == BODY, "a damaged file is replaced"


def test_fetch_retries_broken_transfers_and_gives_up_addresses_that_serve_another_file(
    site: Site, tmp_path: Path
) -> None:
    site.bodies |= {"/file.bin": BODY, "/wrong": BODY[:-1] + b"\x00", "/long": BODY + bytes(10_000_000)}
    for broken in (site.truncate, site.throttled):
        broken["/file.bin"] = 2
        site.requests.clear()
        assert fetch(remote_file(site.url("/file.bin")), tmp_path / str(len(files(tmp_path)))).read_bytes() == BODY
        assert len(site.requests) == 3
    site.requests.clear()
    good = remote_file(*map(site.url, ("/wrong", "/gone", "/file.bin")))
    assert fetch(good, tmp_path / "good").read_bytes() == BODY
    site.truncate["/file.bin"] = 1000
    urls = [site.url(path) for path in ("/wrong", "/long", "/gone", "/file.bin")]
    site.requests.clear()
    with pytest.raises(DataError) as caught:
        fetch(remote_file(*urls), tmp_path / "bad")
    assert site.requests == ["/wrong", "/long", "/gone", *["/file.bin"] * download.ATTEMPTS]
    for url, gave in zip(urls, ("its SHA-256 is", "more than 768,000", "404", "384,000 bytes"), strict=True):
        assert url in str(caught.value) and gave in str(caught.value)
    assert files(tmp_path / "bad") == []


def test_fetch_tells_errors_of_the_network_from_those_of_the_disk_and_of_the_caller(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.bodies["/file.bin"] = BODY
    remote, read, failures = remote_file(site.url("/file.bin")), http.client.HTTPResponse.read1, list[OSError]()

    def reads(response: http.client.HTTPResponse, nbytes: int) -> bytes:
        if response.length != len(BODY) and failures:  # it has begun
            raise failures.pop()
        return read(response, min(nbytes, 1000) if failures else nbytes)

    monkeypatch.setattr(http.client.HTTPResponse, "read1", reads)
    failures += [OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN)), ssl.SSLError("record layer failure")]
    assert fetch(remote, tmp_path / "network").read_bytes() == BODY and len(site.requests) == 3

    def closed(name: str, done: int, nbytes: int) -> None:
        raise BrokenPipeError("output is closed")

    with pytest.raises(BrokenPipeError, match="output is closed"):
        fetch(remote, tmp_path / "caller", closed)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="could not be written"):
        fetch(remote, tmp_path / "file" / "folder")
    full_disk(monkeypatch, "file.bin")
    with pytest.raises(DataError, match="No space left on device"):
        fetch(remote, tmp_path / "disk")
    assert len(site.requests) == 5 and not files(tmp_path / "disk") and not files(tmp_path / "caller")


def test_fetch_reports_an_address_without_a_server_and_refuses_local_files_and_unknown_names(tmp_path: Path) -> None:
    with Site() as server:
        url = server.url("/file.bin")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(remote_file(url), tmp_path)
    with pytest.raises(ConfigError, match="neither http nor https"):
        fetch(remote_file((tmp_path / "secret").as_uri()), tmp_path)
    with pytest.raises(ConfigError, match="'digits'"):
        download.download("digits", tmp_path)
    assert files(tmp_path) == [] and set(SOURCES) == {"mnist", "fashion-mnist", "cifar10"}


def test_two_processes_that_fetch_one_file_do_not_meet(site: Site, tmp_path: Path) -> None:
    """The second fetches while the first is half way; in two containers both may have one process id."""
    site.bodies["/file"] = BODY
    remote = remote_file(site.url("/file"))

    def half_way(name: str, done: int, nbytes: int) -> None:
        if done < nbytes and len(site.requests) == 1:
            fetch(remote, tmp_path)

    assert fetch(remote, tmp_path, half_way).read_bytes() == BODY
    assert files(tmp_path) == ["file.bin"] and site.requests == ["/file"] * 2


def _archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def _serve_cifar(site: Site, monkeypatch: pytest.MonkeyPatch, archive: bytes) -> None:
    site.bodies["/cifar.tar.gz"] = archive
    remote = remote_file(site.url("/cifar.tar.gz"), body=archive, name="cifar-10-binary.tar.gz")
    monkeypatch.setitem(SOURCES, "cifar10", (remote,))


def test_an_archive_is_unpacked_to_where_data_looks(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive({**RECORDS, "../outside": b"x", "readme.html": b"y"}))
    assert download.download("cifar10", tmp_path / "cifar10") == tmp_path / "cifar10"
    assert cifar10.cifar10(tmp_path / "cifar10").train_y.tolist() == [0, 1, 2, 3, 4]
    assert files(tmp_path) == ["cifar10"] and files(tmp_path / "cifar10" / cifar10.SUBFOLDER) == sorted(NAMES)
    for i, archive in enumerate((_archive(dict(list(RECORDS.items())[1:])), b"not an archive at all")):
        _serve_cifar(site, monkeypatch, archive)
        with pytest.raises(DataError, match="cannot be unpacked"):
            download.download("cifar10", tmp_path / str(i))


def test_an_unpacking_that_ends_early_leaves_no_partial_file(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive(RECORDS))
    with monkeypatch.context() as patch:
        full_disk(patch, NAMES[1])
        with pytest.raises(DataError, match=NAMES[1]) as caught:
            download.download("cifar10", tmp_path)
    assert "delete" not in str(caught.value), "the archive is whole"
    assert files(tmp_path / cifar10.SUBFOLDER) == [NAMES[0]]
    replace = os.replace

    def interrupted(source: Path, target: Any) -> None:
        if target.name == NAMES[2]:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download.download("cifar10", tmp_path)
    assert files(tmp_path / cifar10.SUBFOLDER) == list(NAMES[:2])
