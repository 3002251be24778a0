"""An authority, a server and workers 0 and 1 with certificates and tokens; made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from thinwire.security import Credentials
from thinwire.security.certificates import Authority
from thinwire.security.starter import in_starter, make_starter


@dataclass(frozen=True)
class Pki:
    """A folder that `make_starter` wrote, its authority, and one that is not trusted."""

    folder: Path
    authority: Authority
    stranger: Authority

    def server(self) -> Credentials:
        return in_starter(self.folder)

    def worker(self, rank: int) -> Credentials:
        return in_starter(self.folder, rank)

    @property
    def secrets(self) -> list[str]:
        return [line.split()[1] for line in (self.folder / "server.token").read_text().splitlines()]


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki") / "certs"
    authority = Authority("the training's")
    make_starter(folder, authority, workers=2, hosts=["127.0.0.1"])
    return Pki(folder, authority, Authority("another CA"))
