"""Archives that the downloader unpacks: what they lack, disks that are full, and who meets whom."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from lab.tests.workloads.site import Site, files, full_disk, remote_file
from thinwire.errors import DataError
from thinwire_lab.workloads import cifar10, download
from thinwire_lab.workloads.download import SOURCES


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
    assert files(tmp_path) == ["cifar10"]
    assert files(tmp_path / "cifar10" / cifar10.SUBFOLDER) == sorted(NAMES)


def test_archives_that_lack_a_file_are_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and other members cannot be met: the archive has the published SHA-256."""
    rest = dict(list(RECORDS.items())[1:])
    for i, archive in enumerate((_archive(rest), b"not an archive at all")):
        _serve_cifar(site, monkeypatch, archive)
        with pytest.raises(DataError, match="cannot be unpacked"):
            download.download("cifar10", tmp_path / str(i))


def test_a_disk_that_is_full_while_unpacking_leaves_the_archive_alone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive(RECORDS))
    full_disk(monkeypatch, NAMES[1])
    with pytest.raises(DataError, match=rf"{NAMES[1]} could not be written .*No space left") as caught:
        download.download("cifar10", tmp_path)
    assert "delete" not in str(caught.value) and "download it again" not in str(caught.value)
    assert files(tmp_path) == [cifar10.SUBFOLDER, "cifar-10-binary.tar.gz"]
    assert files(tmp_path / cifar10.SUBFOLDER) == [NAMES[0]]


def test_a_file_in_the_place_of_the_unpacked_folder(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_cifar(site, monkeypatch, _archive(RECORDS))
    (tmp_path / cifar10.SUBFOLDER).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{cifar10.SUBFOLDER} could not be written"):
        download.download("cifar10", tmp_path)


def test_an_interruption_while_unpacking_leaves_no_partial_file(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert files(tmp_path / cifar10.SUBFOLDER) == list(NAMES[:2])


def test_unpackings_of_one_process_id_do_not_meet(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
