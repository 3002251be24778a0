"""Downloads from a real HTTP server on the loopback interface with good and bad files."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from lab.tests.workloads.site import BODY, Site, files, remote_file
from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import download
from thinwire_lab.workloads.download import SOURCES, fetch
from thinwire_lab.workloads.images import CIFAR_FILES, CIFAR_FOLDER, RECORD, cifar10

RECORDS = {f"{CIFAR_FOLDER}/{name}": bytes([i]) * RECORD for i, name in enumerate(CIFAR_FILES)}


def test_fetch_skips_a_complete_file(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    remote = remote_file(site.url("/file.bin"))
    path = fetch(remote, tmp_path / "new" / "folder")
    assert path.read_bytes() == BODY and files(path.parent) == ["file.bin"]
    assert fetch(remote, path.parent) == path and site.requests == ["/file.bin"]
    path.write_bytes(BODY[:-1] + b"\x00")
    assert fetch(remote, path.parent).read_bytes() == BODY, "a damaged file is replaced"


def test_fetch_retries_and_reports_each_address(site: Site, tmp_path: Path) -> None:
    site.bodies |= {"/file.bin": BODY, "/wrong": BODY[:-1] + b"\x00", "/long": BODY + bytes(1000)}
    site.truncate["/file.bin"] = 2
    good = remote_file(*map(site.url, ("/wrong", "/gone", "/file.bin")))
    assert fetch(good, tmp_path / "good").read_bytes() == BODY and len(site.requests) == 9
    site.truncate["/file.bin"] = 1000
    urls = [site.url(path) for path in ("/wrong", "/long", "/gone", "/file.bin")]
    with pytest.raises(DataError) as caught:
        fetch(remote_file(*urls), tmp_path / "bad")
    for url, gave in zip(urls, ("invalid hash value", "invalid hash value", "404", "invalid hash value"), strict=True):
        assert url in str(caught.value) and gave in str(caught.value)
    assert files(tmp_path / "bad") == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="Not a directory"):
        fetch(good, tmp_path / "file" / "folder")


def test_fetch_unreachable_address_and_unknown_name_raise(tmp_path: Path) -> None:
    with Site() as server:
        url = server.url("/file.bin")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(remote_file(url), tmp_path)
    with pytest.raises(ConfigError, match="'digits'"):
        download.download("digits", tmp_path)
    assert files(tmp_path) == [] and set(SOURCES) == {"mnist", "fashion-mnist", "cifar10"}


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


def test_download_unpacks_cifar10_for_data(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _serve_cifar(site, monkeypatch, _archive({**RECORDS, "../outside": b"x", "readme.html": b"y"}))
    assert download.download("cifar10", tmp_path / "cifar10") == tmp_path / "cifar10"
    assert cifar10(tmp_path / "cifar10").train_y.tolist() == [0, 1, 2, 3, 4]
    assert files(tmp_path) == ["cifar10"] and files(tmp_path / "cifar10" / CIFAR_FOLDER) == sorted(CIFAR_FILES)
    for i, archive in enumerate((_archive(dict(list(RECORDS.items())[1:])), b"not an archive at all")):
        _serve_cifar(site, monkeypatch, archive)
        with pytest.raises(DataError, match="cannot be unpacked"):
            download.download("cifar10", tmp_path / str(i))
