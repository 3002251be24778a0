"""Fetch the files of a data set, on request and never otherwise.

One table says where each file is published, how long it is and what it must hash to. A download goes to a neighbouring
".part" file of a random name, and takes its real name, in one rename, when length and checksum agree: a file that
exists is whole. A broken transfer is tried again from nothing; an address that answers with something else is not.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import cifar10

Progress = Callable[[str, int, int], None]
"""Takes a file's name, the bytes so far, and the bytes in all."""

CHUNK_NBYTES = 1 << 18
ATTEMPTS = 3
TIMEOUT_S = 30.0
"""Without a single byte for so long, an attempt is given up."""
_PASSING = (408, 425, 429)
"""Answers below 500 that may be another one soon: too slow, too early, too many."""


class _Broken(Exception):
    """The network ended a transfer; another attempt may succeed."""


class _Wrong(Exception):
    """The address answered, but not with the published file; another attempt would bring the same."""


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
            _unpack(path, folder / cifar10.SUBFOLDER)
    return folder


def fetch(remote: RemoteFile, folder: Path, progress: Progress | None = None) -> Path:
    """Fetches one file into `folder`, unless it is there and whole; returns its path. Errors as for `download`."""
    target = folder / remote.name
    if target.is_file() and not _difference(target, remote):
        return target
    with _writing(target):
        folder.mkdir(parents=True, exist_ok=True)
    failures: dict[str, Exception] = {}
    for url in remote.urls * ATTEMPTS:
        if not isinstance(failures.get(url), _Wrong):
            try:
                _transfer(url, target, remote, progress)
            except (_Broken, _Wrong) as error:
                failures[url] = error
            else:
                return target
    gave = "; ".join(f"{url}: {failure}" for url, failure in failures.items())
    raise DataError(
        f"{remote.name} could not be fetched ({gave}). Nothing was kept: check the connection, or get {remote.name} "
        f"from elsewhere and put it into {folder} by hand"
    )


def _transfer(url: str, target: Path, remote: RemoteFile, progress: Progress | None) -> None:
    """Makes one attempt to write `target` from the body of `url`."""
    with _part(target) as part:
        with _writing(target):
            file = part.open("xb")
        with file:
            for chunk in _body(url, remote.nbytes):
                with _writing(target):
                    file.write(chunk)
                    file.flush()
                if progress is not None:
                    progress(remote.name, min(file.tell(), remote.nbytes), remote.nbytes)
        if difference := _difference(part, remote):
            short = part.stat().st_size < remote.nbytes
            raise (_Broken if short else _Wrong)(f"this is not the published file: {difference}")


def _body(url: str, nbytes: int) -> Iterator[bytes]:
    """Yields the body of `url` as it comes, at most a chunk more than `nbytes`; each OSError is the network's."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is neither http nor https")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            done = 0
            while done <= nbytes and (chunk := response.read1(CHUNK_NBYTES)):  # read() would wait for a whole chunk
                done += len(chunk)
                yield chunk
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection open
        raise (_Broken if error.code >= 500 or error.code in _PASSING else _Wrong)(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(error)) from error


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Within it, an OSError says that `target` could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{target} could not be written ({error}): make room or choose another folder") from error


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """Gives what becomes `target`, in one rename, at the end; an error leaves nothing.

    The name is random: processes of two containers that share a folder may have the same id.
    """
    part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
        with _writing(target):
            os.replace(part, target)
    finally:
        with suppress(OSError):
            part.unlink()


def _difference(path: Path, remote: RemoteFile) -> str:
    """Returns what distinguishes the file at `path` from the published one; empty if nothing does."""
    nbytes = path.stat().st_size
    if nbytes != remote.nbytes:
        came = f"{nbytes:,} bytes" if nbytes < remote.nbytes else f"more than {remote.nbytes:,} bytes"
        return f"{came} came, expected {remote.nbytes:,}"
    with path.open("rb") as file:
        came = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if came == remote.sha256 else f"its SHA-256 is {came}, expected {remote.sha256}"


def _unpack(archive: Path, folder: Path) -> None:
    """Takes CIFAR-10's six files, and nothing else, out of its archive, which is the published one."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            for name in (*cifar10.TRAIN_FILES, cifar10.TEST_FILE):
                source = tar.extractfile(f"{cifar10.SUBFOLDER}/{name}")
                content = b"" if source is None else source.read()
                with _part(folder / name) as part, _writing(folder / name):
                    part.write_bytes(content)
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:  # of reading: those of writing are DataErrors
        raise DataError(f"{archive} cannot be unpacked ({error}): delete it and download it again") from error
