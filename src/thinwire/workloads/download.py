"""Fetch the files of a data set, on request and never otherwise.

One table says where each file is published, how long it is and what it must hash to. A download goes to a neighbouring
".part" file of its process; only when length and checksum agree does it take its real name, in one rename, so that a
file that exists is whole. A broken transfer is tried again from nothing; wrong contents are not, because trying again
would not mend them.

Sizes and checksums are those of the published files, as package collections pin them. A library such as pooch has no
mirrors and no limit of length, fetches wrong contents again, and brings six packages.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError, DataError
from thinwire.workloads import cifar10

Progress = Callable[[str, int, int], None]

CHUNK_NBYTES = 1 << 18
ATTEMPTS = 3
TIMEOUT_S = 30.0
_BROKEN = (http.client.HTTPException, urllib.error.URLError, ssl.SSLError, TimeoutError, ConnectionError)


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One published file.

    Attributes:
        name: the name it takes on disk.
        urls: where to get it, tried in order.
        nbytes: its exact length; nothing longer is ever written.
        sha256: what it must hash to, in hexadecimal.
    """

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
    """Fetches every file of a data set into `folder`; files that are there and whole stay.

    Args:
        name: a key of `SOURCES`.
        folder: where the files go; made if missing. `data(name)` looks in `cache_folder() / name`.
        progress: called with (file name, bytes so far, bytes in all) as a download proceeds.

    Returns:
        `folder`.

    Raises:
        ConfigError: nothing is published under that name.
        DataError: a file could not be fetched, or is not the published one. No partial file is left.
    """
    if name not in SOURCES:
        raise ConfigError(f"there is no download called {name!r}; these can be downloaded: {', '.join(SOURCES)}")
    for remote in SOURCES[name]:
        path = fetch(remote, folder, progress)
        if path.name.endswith(".tar.gz"):
            _unpack(path, folder / cifar10.SUBFOLDER)
    return folder


def fetch(remote: RemoteFile, folder: Path, progress: Progress | None = None) -> Path:
    """Fetches one file into `folder`, unless it is there already and hashes to what it should; returns its path.

    Raises:
        DataError: it could not be fetched from any of its addresses, or is not the published file.
    """
    target = folder / remote.name
    if target.is_file() and not _difference(target, remote):
        return target
    part = folder / f"{remote.name}.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for url in remote.urls * ATTEMPTS:
            try:
                _transfer(url, part, remote, progress)
                break
            except _BROKEN as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it holds the connection open
                failure = error
        else:
            raise DataError(
                f"{' and '.join(remote.urls)} could not be fetched ({failure}): check the connection, or put "
                f"{remote.name} into {folder} by hand"
            ) from failure
        if difference := _difference(part, remote):
            raise DataError(
                f"{url} is not the published file: {difference}. Nothing was kept; get {remote.name} from "
                f"elsewhere and put it into {folder}"
            )
        os.replace(part, target)
    except OSError as error:
        raise DataError(f"{target} could not be written ({error})") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _transfer(url: str, part: Path, remote: RemoteFile, progress: Progress | None) -> None:
    """One attempt: the body of `url` into `part`, at most one chunk beyond the published length."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is neither http nor https")
    done = 0
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, part.open("wb") as file:
        while done <= remote.nbytes and (chunk := response.read(CHUNK_NBYTES)):
            file.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(remote.name, min(done, remote.nbytes), remote.nbytes)
        announced = response.headers.get("Content-Length")
    if announced is not None and announced.isdecimal() and done < min(int(announced), remote.nbytes):
        raise ConnectionError(f"the connection ended after {done:,} of {int(announced):,} bytes")


def _difference(path: Path, remote: RemoteFile) -> str:
    """What distinguishes the file at `path` from the published one; empty if nothing does."""
    nbytes = path.stat().st_size
    if nbytes != remote.nbytes:
        came = f"{nbytes:,} bytes" if nbytes < remote.nbytes else f"more than {remote.nbytes:,} bytes"
        return f"{came} came, expected {remote.nbytes:,}"
    with path.open("rb") as file:
        came = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if came == remote.sha256 else f"its SHA-256 is {came}, expected {remote.sha256}"


def _unpack(archive: Path, folder: Path) -> None:
    """Takes CIFAR-10's six files, and nothing else, out of its archive, which is the published one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            for name in (*cifar10.TRAIN_FILES, cifar10.TEST_FILE):
                source = tar.extractfile(f"{cifar10.SUBFOLDER}/{name}")
                if source is None:
                    raise DataError(f"{archive}: {name} is not a file: delete it and try again")
                part = folder / f"{name}.{os.getpid()}.part"
                part.write_bytes(source.read())
                os.replace(part, folder / name)
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}): delete it and download it again") from error
