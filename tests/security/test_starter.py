"""What `make_starter` makes, and that OpenSSL adds to it as docs/security.md says."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.security.conftest import Pki
from tests.transports.conftest import Recorder, echo
from thinwire.errors import ConfigError
from thinwire.security.starter import files_in, in_starter, make_starter
from thinwire.transports import Sender
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.server import serve

WAIT_S = 20.0


def test_a_starter_is_for_its_owner_and_overwrites_nothing(pki: Pki, tmp_path: Path) -> None:
    files = sorted(pki.folder.iterdir())
    assert files == sorted(files_in(pki.folder, 2)) and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(pki.folder.stat().st_mode) == 0o700
    before = [file.read_bytes() for file in files]
    with pytest.raises(ConfigError, match=r"holds ca.key, ca.pem, server.key … already, and nothing is overwritten"):
        make_starter(pki.folder, pki.authority, workers=2, hosts=["127.0.0.1"])
    assert before == [file.read_bytes() for file in files]
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        make_starter(tmp_path / "new", pki.authority, workers=1, hosts=["größe"])
    assert not (tmp_path / "new").exists()


def test_folders_that_cannot_be_or_fill_up_are_named(pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file" / "folder", "Not a directory"), (tmp_path / ("x" * 300), "name too long")):
        with pytest.raises(ConfigError, match=f"{folder} cannot be written: .*{why}; choose another folder"):
            make_starter(folder, pki.authority, workers=1, hosts=["a"])
    folder, made = tmp_path / "certs", list[Path]()

    def filling(path: Path, *given: Any) -> int:
        made.append(path)
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *given)

    opened = os.open
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", filling)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device; choose another folder"):
            make_starter(folder, pki.authority, workers=1, hosts=["127.0.0.1"])
    assert len(made) == 3 and not [*folder.iterdir()]
    assert make_starter(folder, pki.authority, workers=1, hosts=["127.0.0.1"])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="signs with openssl")
def test_one_more_worker_is_signed_as_the_page_says(pki: Pki, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    [block] = re.findall(r"^```sh [^\n]*\n(openssl .*?)^```", page, re.M | re.S)
    certs = tmp_path / "certs"
    make_starter(certs, pki.authority, workers=1, hosts=["127.0.0.1"])
    subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", block], cwd=tmp_path, check=True, capture_output=True)
    made: list[Recorder] = []

    def factory(sender: Sender) -> Recorder:
        made.append(Recorder(sender, echo))
        return made[0]

    with serve(factory, "127.0.0.1:0", options=in_starter(certs).server()) as server:
        options = in_starter(certs, 4).worker(4)
        with connect(server.address, connect_timeout_s=WAIT_S, options=options) as connection:
            connection.send(b"1")
            assert connection.receive(WAIT_S) == b"1"
            assert made[0].sender.identity(0).rank == 4
