"""The downloader against a real HTTP server on the loopback interface that serves good and bad files."""

from __future__ import annotations

import errno
import http.client
import os
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.tests.workloads.site import BODY, Site, files, full_disk, remote_file
from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import download
from thinwire_lab.workloads.download import SOURCES, fetch


def _failing(monkeypatch: pytest.MonkeyPatch, failures: list[OSError]) -> None:
    """Makes reading a body raise each of `failures`, once it has begun, and then read on."""
    for name in ("read", "read1"):
        read = getattr(http.client.HTTPResponse, name)

        def reads(response: http.client.HTTPResponse, nbytes: int, read: Any = read) -> Any:
            if response.length != len(BODY) and failures:
                raise failures.pop()
            return read(response, min(nbytes, 1000) if failures else nbytes)

        monkeypatch.setattr(http.client.HTTPResponse, name, reads)


def test_a_good_file_arrives_whole_with_progress_and_is_not_fetched_twice(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    remote = remote_file(site.url("/file.bin"))
    seen: list[tuple[str, int, int]] = []
    path = fetch(remote, tmp_path / "new" / "folder", lambda *step: seen.append(step))
    assert path.read_bytes() == BODY and files(path.parent) == ["file.bin"]
    assert seen[-1] == ("file.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen) and len(seen) > 1
    assert fetch(remote, path.parent) == path
    assert site.requests == ["/file.bin"]


def test_a_damaged_file_on_disk_is_replaced(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    (tmp_path / "file.bin").write_bytes(BODY[:-1] + b"\x00")
    assert fetch(remote_file(site.url("/file.bin")), tmp_path).read_bytes() == BODY


def test_wrong_contents_are_refused_and_not_tried_again(site: Site, tmp_path: Path) -> None:
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
            fetch(remote_file(site.url("/file.bin")), tmp_path)
        assert message in str(caught.value)
        assert files(tmp_path) == [] and len(site.requests) == number, message


def test_a_broken_transfer_is_tried_again(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.truncate["/file.bin"] = 2
    assert fetch(remote_file(site.url("/file.bin")), tmp_path).read_bytes() == BODY
    assert len(site.requests) == 3


def test_an_address_that_is_asked_too_often_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.throttled["/file.bin"] = 1
    assert fetch(remote_file(site.url("/file.bin")), tmp_path).read_bytes() == BODY
    assert len(site.requests) == 2


def test_a_transfer_that_always_breaks_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.truncate["/file.bin"] = 1000
    with pytest.raises(DataError, match=r"could not be fetched .*after 384,000 of 768,000 bytes"):
        fetch(remote_file(site.url("/file.bin")), tmp_path)
    assert files(tmp_path) == [] and len(site.requests) == download.ATTEMPTS


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN])
def test_a_network_that_goes_away_amid_a_body_is_not_the_disk(
    number: int, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.bodies |= {"/one/file.bin": BODY, "/two/file.bin": BODY}
    remote = remote_file(site.url("/one/file.bin"), site.url("/two/file.bin"))
    _failing(monkeypatch, [OSError(number, os.strerror(number))])
    assert fetch(remote, tmp_path / "a").read_bytes() == BODY
    assert site.requests == ["/one/file.bin", "/two/file.bin"]
    _failing(monkeypatch, [OSError(number, os.strerror(number)) for _ in range(100)])
    with pytest.raises(DataError, match=f"could not be fetched .*{os.strerror(number)}"):
        fetch(remote, tmp_path / "b")
    assert files(tmp_path / "b") == [] and len(site.requests) == 2 + 2 * download.ATTEMPTS


def test_a_full_disk_is_not_the_network(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.bodies["/file.bin"] = BODY
    full_disk(monkeypatch, "file.bin")
    with pytest.raises(DataError, match=r"file\.bin could not be written .*No space left on device"):
        fetch(remote_file(site.url("/file.bin"), site.url("/other")), tmp_path)
    assert files(tmp_path) == [] and site.requests == ["/file.bin"]


def test_a_folder_that_cannot_be_made_is_not_the_network(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="could not be written"):
        fetch(remote_file(site.url("/file.bin")), tmp_path / "file" / "folder")
    assert site.requests == []


def test_what_progress_raises_is_nobody_elses_error(site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY

    def closed(name: str, done: int, nbytes: int) -> None:
        raise BrokenPipeError("nobody reads the output")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        fetch(remote_file(site.url("/file.bin")), tmp_path, closed)
    assert files(tmp_path) == [] and site.requests == ["/file.bin"]


def test_a_server_that_trickles_is_given_up_and_the_second_address_is_used(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SLOW_S", 0.2)
    site.bodies |= {"/slow/file.bin": BODY, "/file.bin": BODY}
    site.trickling.add("/slow/file.bin")
    slow, seen = site.url("/slow/file.bin"), list[int]()
    fetch(remote_file(slow, site.url("/file.bin")), tmp_path, lambda name, done, nbytes: seen.append(done))
    assert site.requests == ["/slow/file.bin", "/file.bin"]
    assert seen[0] < 40, "what comes is shown when it comes"
    (tmp_path / "file.bin").unlink()
    with pytest.raises(DataError, match=r"/slow/file\.bin: only \d+ bytes came in 0 s, \d+ of 768,000 in all"):
        fetch(remote_file(slow), tmp_path)
    assert files(tmp_path) == [] and len(site.requests) == 2 + download.ATTEMPTS


def test_a_fast_server_is_not_given_up_and_time_of_the_disk_does_not_count(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("thinwire_lab.workloads.download.time", SimpleNamespace(monotonic=lambda: now[0]))
    site.bodies["/file.bin"] = BODY

    def late(name: str, done: int, nbytes: int) -> None:
        now[0] += 2 * download.SLOW_S

    assert fetch(remote_file(site.url("/file.bin")), tmp_path, late).read_bytes() == BODY
    monkeypatch.setattr(download, "SLOW_S", 0.0)  # the bytes are counted after each read
    monkeypatch.setattr(download, "SLOW_NBYTES", 1)
    assert fetch(remote_file(site.url("/file.bin")), tmp_path / "other").read_bytes() == BODY
    assert site.requests == ["/file.bin"] * 2


def test_wrong_contents_at_one_address_leave_the_others(site: Site, tmp_path: Path) -> None:
    site.bodies |= {"/wrong/file.bin": b"<html>Log in</html>", "/file.bin": BODY}
    site.truncate["/file.bin"] = 1
    wrong, right = site.url("/wrong/file.bin"), site.url("/file.bin")
    assert fetch(remote_file(wrong, right), tmp_path).read_bytes() == BODY
    assert site.requests == ["/wrong/file.bin", "/file.bin", "/file.bin"], "wrong contents are not asked for again"


def test_when_no_address_has_it_the_error_says_what_each_gave(site: Site, tmp_path: Path) -> None:
    site.bodies |= {"/wrong": BODY[:-1] + b"\x00", "/short": BODY[:-2], "/cut": BODY}
    site.truncate["/cut"] = 1000
    urls = [site.url(path) for path in ("/wrong", "/short", "/gone", "/cut")]
    with pytest.raises(DataError) as caught:
        fetch(remote_file(*urls), tmp_path)
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
    assert files(tmp_path) == []


@pytest.mark.parametrize("framing", ["chunked", "none"])
def test_a_body_without_a_length(framing: str, site: Site, tmp_path: Path) -> None:
    site.bodies["/file.bin"] = BODY
    site.framing["/file.bin"] = framing
    site.truncate["/file.bin"] = 2
    remote = remote_file(site.url("/file.bin"))
    assert fetch(remote, tmp_path).read_bytes() == BODY
    assert len(site.requests) == 3, "where the connection ended too early it is tried again"
    site.bodies["/file.bin"] = BODY[:-1]
    with pytest.raises(DataError, match=r"767,999 (bytes came, expected|of) 768,000"):
        fetch(remote, tmp_path / "other")
    assert len(site.requests) == 3 + (1 if framing == "chunked" else download.ATTEMPTS)


def test_not_found_names_the_address_and_the_second_address_is_used(site: Site, tmp_path: Path) -> None:
    missing = site.url("/gone/file.bin")
    with pytest.raises(DataError) as caught:
        fetch(remote_file(missing), tmp_path)
    assert missing in str(caught.value) and "404" in str(caught.value) and "by hand" in str(caught.value)
    site.bodies["/here/file.bin"] = BODY
    assert fetch(remote_file(missing, site.url("/here/file.bin")), tmp_path).read_bytes() == BODY


def test_nobody_listening(tmp_path: Path) -> None:
    with Site() as server:
        url = server.url("/file.bin")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(remote_file(url), tmp_path)
    assert files(tmp_path) == []


def test_a_local_file_is_not_a_download(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(BODY)
    with pytest.raises(ConfigError, match="neither http nor https"):
        fetch(remote_file(secret.as_uri()), tmp_path / "folder")


def test_the_table_is_well_formed() -> None:
    assert set(SOURCES) == {"mnist", "fashion-mnist", "cifar10"}
    for remotes in SOURCES.values():
        for remote in remotes:
            assert remote.urls and all(url.endswith("/" + remote.name) for url in remote.urls)
            assert len(remote.sha256) == 64 and set(remote.sha256) <= set("0123456789abcdef")


def test_what_cannot_be_downloaded() -> None:
    with pytest.raises(ConfigError, match="no download called 'digits'; these can be downloaded: mnist"):
        download.download("digits", Path("unused"))


def test_two_processes_of_one_id_that_fetch_one_file_do_not_meet(site: Site, tmp_path: Path) -> None:
    """Two containers that share a folder: the second fetches while the first is half way."""
    site.bodies["/file"] = BODY
    remote = remote_file(site.url("/file"))

    def half_way(name: str, done: int, nbytes: int) -> None:
        if done < nbytes and len(site.requests) == 1:
            fetch(remote, tmp_path)

    assert fetch(remote, tmp_path, half_way).read_bytes() == BODY
    assert files(tmp_path) == ["file.bin"] and site.requests == ["/file"] * 2, "the second time it is there"


def test_a_broken_tls_connection_is_tried_again(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.bodies["/file"] = BODY
    _failing(monkeypatch, [ssl.SSLError("record layer failure")])
    assert fetch(remote_file(site.url("/file")), tmp_path).read_bytes() == BODY
    assert site.requests == ["/file"] * 2
