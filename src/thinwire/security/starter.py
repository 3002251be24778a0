"""Makes a folder with the credentials of a first secured training: an authority, certificates and tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError
from thinwire.security.admission import worker_name
from thinwire.security.credentials import Credentials
from thinwire.security.tokens import new_token

if TYPE_CHECKING:  # its module imports cryptography
    from thinwire.security.certificates import Authority

SERVER = "server"


def make_starter(folder: Path, authority: Authority, *, workers: int, hosts: Sequence[str]) -> list[Path]:
    """Writes an authority, and certificates and tokens of a server and workers; only the owner may read the files.

    Args:
        folder: made if it is missing.
        authority: signs the certificates.
        workers: number of workers.
        hosts: names and IP addresses by which workers reach the server.

    Returns:
        The files.

    Raises:
        ConfigError: a file exists, the folder cannot be written, or a host is not a valid name.
    """
    try:
        issued = [authority.issued, authority.issue(SERVER, hosts, "server")]
    except ValueError as error:
        raise ConfigError(f"hosts {', '.join(hosts)}: one is neither a host name nor an IP address: {error}") from error
    issued += [authority.issue(name, [name], "worker") for name in map(worker_name, range(workers))]
    tokens = [f"rank={rank} {new_token()}\n".encode() for rank in range(workers)]
    contents = [part for each in issued for part in (each.certificate, each.key)] + [b"".join(tokens), *tokens]
    written = list[Path]()
    files = dict(zip(files_in(folder, workers), contents, strict=True))
    try:
        if there := sorted(file.name for file in files if file.exists()):
            raise ConfigError(
                f"{folder} holds {', '.join(there[:3])}{' …' if len(there) > 3 else ''} already, and nothing is "
                "overwritten; choose another folder"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, content in files.items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                written.append(path)
                file.write(content)
    except OSError as error:
        for path in written:  # for example a full disk; leftover files would make the next call fail
            path.unlink(missing_ok=True)
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
    return list(files)


def files_in(folder: Path, workers: int) -> list[Path]:
    """Returns the files that `make_starter` writes for `workers` workers.

    >>> [file.name for file in files_in(Path("certs"), 1)]
    ['ca.pem', 'ca.key', 'server.pem', 'server.key', 'worker-0.pem', 'worker-0.key', 'server.token', 'worker-0.token']
    """
    ends = [SERVER, *map(worker_name, range(workers))]
    pairs = [folder / f"{name}.{kind}" for name in ("ca", *ends) for kind in ("pem", "key")]
    return pairs + [folder / f"{name}.token" for name in ends]


def in_starter(folder: Path, rank: int | None = None) -> Credentials:
    """Returns the credentials of worker `rank`, or the server's, in a folder from `make_starter`."""
    own = folder / (SERVER if rank is None else worker_name(rank))
    cert, key, token = (own.with_name(f"{own.name}.{ending}") for ending in ("pem", "key", "token"))
    return Credentials(ca=folder / "ca.pem", cert=cert, key=key, token_file=token)


def options_in(folder: Path, rank: int | None = None) -> list[str]:
    """Returns command-line options that name the files of worker `rank`, or of the server.

    >>> options_in(Path("certs"), 1)[-2:]
    ['--token-file', 'certs/worker-1.token']
    """
    own = in_starter(folder, rank)
    named = {"--tls-cert": own.cert, "--tls-key": own.key, "--tls-ca": own.ca, "--token-file": own.token_file}
    return [str(word) for option in named.items() for word in option]
