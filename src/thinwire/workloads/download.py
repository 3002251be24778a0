"""Fetch the files of a data set, on request and never otherwise.

Strategy: one table says where each file is published, how long it is and what it must hash to. A download
goes to a neighbouring ".part" file; only when length and every checksum agree does it take its real name,
in one rename, so a file that exists is whole. A broken transfer is tried again from nothing; wrong contents
are not, because trying again would not mend them. It refuses to know what the files mean.

Sizes and checksums are those of the published files. Fashion-MNIST's MD5 sums are in its README, CIFAR-10's
on its page; the SHA-256 sums are the ones that package collections pin for the same files.
"""

from __future__ import annotations

import hashlib
import http.client
import os
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


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One published file.

    Attributes:
        name: the name it takes on disk.
        urls: where to get it, tried in order.
        nbytes: its exact length; nothing longer is ever written.
        digests: what it must hash to, as "algorithm:hexadecimal"; all must agree.
    """

    name: str
    urls: tuple[str, ...]
    nbytes: int
    digests: tuple[str, ...]


_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_CIFAR = ("https://www.cs.toronto.edu/~kriz/",)


def _remote(bases: tuple[str, ...], name: str, nbytes: int, md5: str, sha256: str) -> RemoteFile:
    urls = tuple(base + name for base in bases)
    return RemoteFile(name=name, urls=urls, nbytes=nbytes, digests=(f"md5:{md5}", f"sha256:{sha256}"))


SOURCES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": (
        _remote(
            *(_MNIST, "train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _remote(
            *(_MNIST, "train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _remote(
            *(_MNIST, "t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _remote(
            *(_MNIST, "t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": (
        _remote(
            *(_FASHION, "train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        _remote(
            *(_FASHION, "train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        _remote(
            *(_FASHION, "t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        _remote(
            *(_FASHION, "t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    "cifar10": (
        _remote(
            *(_CIFAR, "cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
}


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
    """Fetches one file, unless it is there already and hashes to what it should.

    Args:
        remote: the file.
        folder: where it goes; made if missing.
        progress: as for `download`.

    Returns:
        The path of the file, whole and verified.

    Raises:
        DataError: it could not be fetched from any of its addresses, or is not the published file.
    """
    target = folder / remote.name
    if target.is_file() and not _difference(target, remote):
        return target
    part = folder / f"{remote.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS * len(remote.urls)):
            url = remote.urls[attempt % len(remote.urls)]
            try:
                _transfer(url, part, remote, progress)
                break
            except (http.client.HTTPException, urllib.error.URLError, TimeoutError, ConnectionError) as error:
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
    for digest in remote.digests:
        algorithm, _, expected = digest.partition(":")
        with path.open("rb") as file:
            came = hashlib.file_digest(file, algorithm).hexdigest()
        if came != expected:
            return f"its {algorithm} is {came}, expected {expected}"
    return ""


def _unpack(archive: Path, folder: Path) -> None:
    """Takes CIFAR-10's six files, and nothing else, out of its archive; names and sizes are ours, not its."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            for name in (*cifar10.TRAIN_FILES, cifar10.TEST_FILE):
                member = tar.getmember(f"{cifar10.SUBFOLDER}/{name}")
                source = tar.extractfile(member) if member.isfile() else None
                if source is None or member.size > cifar10.RECORD * cifar10.MAX_RECORDS:
                    raise DataError(f"{archive}: {member.name} is not a file of records: delete it and try again")
                part = folder / f"{name}.part"
                part.write_bytes(source.read())
                os.replace(part, folder / name)
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}): delete it and download it again") from error
