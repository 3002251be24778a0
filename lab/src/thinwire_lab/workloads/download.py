"""Fetch the files of a data set, on request and never otherwise.

One table says where each file is published, how long it is and what it must hash to. A download goes to a neighbouring
".part" file of a random name, and takes its real name, in one rename, when the checksum agrees: a file that exists is
whole.
"""

from __future__ import annotations

import hashlib
import http.client
import secrets
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads.images import CIFAR_FILES, CIFAR_FOLDER

Progress = Callable[[str, int, int], None]  # takes a file's name, the bytes so far, and the bytes in all

CHUNK_NBYTES = 1 << 18
ATTEMPTS = 3
TIMEOUT_S = 30.0  # without a single byte for so long, an attempt is given up


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One published file: its name on disk, addresses in the order of trial, exact length, and SHA-256."""

    name: str
    urls: tuple[str, ...]
    nbytes: int
    sha256: str


_ADDRESSES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
}

# Data set, file, length in bytes, SHA-256.
_FILES = """
mnist train-images-idx3-ubyte.gz 9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
mnist train-labels-idx1-ubyte.gz 28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
mnist t10k-images-idx3-ubyte.gz 1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
mnist t10k-labels-idx1-ubyte.gz 4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
fashion-mnist train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
fashion-mnist train-labels-idx1-ubyte.gz 29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
fashion-mnist t10k-images-idx3-ubyte.gz 4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
fashion-mnist t10k-labels-idx1-ubyte.gz 5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
cifar10 cifar-10-binary.tar.gz 170052171 c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
"""


SOURCES: dict[str, list[RemoteFile]] = {}
for _data, _name, _nbytes, _sha256 in map(str.split, _FILES.strip().splitlines()):
    _urls = tuple(address + _name for address in _ADDRESSES[_data])
    SOURCES.setdefault(_data, []).append(RemoteFile(name=_name, urls=_urls, nbytes=int(_nbytes), sha256=_sha256))


def download(name: str, folder: Path, progress: Progress | None = None) -> Path:
    """Fetches every file of a data set into `folder`, which it returns; files that are there and whole stay."""
    if name not in SOURCES:
        raise ConfigError(f"there is no download called {name!r}; these can be downloaded: {', '.join(SOURCES)}")
    for remote in SOURCES[name]:
        path = fetch(remote, folder, progress)
        if path.name.endswith(".tar.gz"):
            _unpack(path, folder)
    return folder


def fetch(remote: RemoteFile, folder: Path, progress: Progress | None = None) -> Path:
    """Fetches one file into `folder`, unless it is there and whole; returns its path. No partial file is left."""
    target = folder / remote.name
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == remote.sha256:
        return target
    failures: dict[str, str] = {}
    for url in remote.urls * ATTEMPTS:
        part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _transfer(url, part, remote, progress)
            part.replace(target)
        except (OSError, http.client.HTTPException) as error:
            failures[url] = str(error)
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection open
        else:
            return target
        finally:
            if part.is_file():
                part.unlink()
    gave = "; ".join(f"{url}: {failure}" for url, failure in failures.items())
    raise DataError(
        f"{remote.name} could not be fetched ({gave}). Nothing was kept: check the connection and the disk, or get "
        f"{remote.name} from elsewhere and put it into {folder} by hand"
    )


def _transfer(url: str, part: Path, remote: RemoteFile, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, part.open("xb") as file:
        while done <= remote.nbytes and (chunk := response.read1(CHUNK_NBYTES)):  # read() would wait for a whole chunk
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(remote.name, min(done, remote.nbytes), remote.nbytes)
    if digest.hexdigest() != remote.sha256:
        came = f"{done:,} bytes of SHA-256 {digest.hexdigest()}"
        raise OSError(f"this is not the published file: {came} came, expected {remote.nbytes:,} of {remote.sha256}")


def _unpack(archive: Path, folder: Path) -> None:
    """Takes CIFAR-10's six files, and nothing else, out of its archive, which is the published one."""
    try:
        with tarfile.open(archive) as tar:
            members = [tar.getmember(f"{CIFAR_FOLDER}/{name}") for name in CIFAR_FILES]
            tar.extractall(folder, members, filter="data")
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}): make room, or delete it and try again") from error
