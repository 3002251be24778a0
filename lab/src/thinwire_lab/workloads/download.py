"""Downloads the files of a data set, on request alone.

One table has each file's addresses and checksum. `torch.hub` downloads to a temporary file and renames it when the
checksum agrees: a file that exists is complete.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from torch.hub import download_url_to_file

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads.images import CIFAR_FILES, CIFAR_FOLDER

ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One published file: its name on disk, addresses in the order of trial, and SHA-256."""

    name: str
    urls: tuple[str, ...]
    sha256: str


_ADDRESSES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
}

# Data set, file, SHA-256.
_FILES = """
mnist train-images-idx3-ubyte.gz 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
mnist train-labels-idx1-ubyte.gz 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
mnist t10k-images-idx3-ubyte.gz 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
mnist t10k-labels-idx1-ubyte.gz f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
fashion-mnist train-images-idx3-ubyte.gz 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
fashion-mnist train-labels-idx1-ubyte.gz a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
fashion-mnist t10k-images-idx3-ubyte.gz 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
fashion-mnist t10k-labels-idx1-ubyte.gz 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
cifar10 cifar-10-binary.tar.gz c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
"""


SOURCES: dict[str, list[RemoteFile]] = {}
for _data, _name, _sha256 in map(str.split, _FILES.strip().splitlines()):
    _urls = tuple(address + _name for address in _ADDRESSES[_data])
    SOURCES.setdefault(_data, []).append(RemoteFile(name=_name, urls=_urls, sha256=_sha256))


def download(name: str, folder: Path) -> Path:
    """Downloads every missing or damaged file of a data set into `folder`, and returns the folder."""
    if name not in SOURCES:
        raise ConfigError(f"there is no download called {name!r}; these can be downloaded: {', '.join(SOURCES)}")
    for remote in SOURCES[name]:
        path = fetch(remote, folder)
        if path.name.endswith(".tar.gz"):
            _unpack(path, folder)
    return folder


def fetch(remote: RemoteFile, folder: Path) -> Path:
    """Downloads one file into `folder`, unless it is there and complete; returns its path. No partial file stays."""
    target = folder / remote.name
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == remote.sha256:
        return target
    failures: dict[str, str] = {}
    for url in remote.urls * ATTEMPTS:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            download_url_to_file(url, str(target), hash_prefix=remote.sha256, progress=sys.stderr.isatty())
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another checksum
            failures[url] = str(error)
            if isinstance(error, HTTPError):
                error.close()  # it holds the connection open
        else:
            return target
    gave = "; ".join(f"{url}: {failure}" for url, failure in failures.items())
    raise DataError(
        f"{remote.name} could not be fetched ({gave}). Nothing was kept: check the connection and the disk, or get "
        f"{remote.name} from elsewhere and put it into {folder} by hand"
    )


def _unpack(archive: Path, folder: Path) -> None:
    """Unpacks CIFAR-10's six files from its archive."""
    try:
        with tarfile.open(archive) as tar:
            members = [tar.getmember(f"{CIFAR_FOLDER}/{name}") for name in CIFAR_FILES]
            tar.extractall(folder, members, filter="data")
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}): make room, or delete it and try again") from error
