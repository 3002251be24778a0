"""A folder with all that a first secured training needs: an authority, certificates and tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.security.admission import worker_name
from thinwire.security.certificates import Authority
from thinwire.security.credentials import Credentials
from thinwire.security.tokens import new_token

SERVER = "server"


def make_starter(folder: Path, authority: Authority, *, workers: int, hosts: Sequence[str]) -> list[Path]:
    """Writes an authority, a server's and workers' certificates and tokens; every file is for its owner alone.

    Args:
        folder: made if it is missing.
        authority: signs the certificates.
        workers: how many.
        hosts: names and IP addresses by which workers reach the server.

    Returns:
        The files.

    Raises:
        ConfigError: a file is there already, the folder cannot be written, or a host is no name.
    """
    files = {"ca.pem": authority.issued.certificate, "ca.key": authority.issued.key}
    try:
        ends = {SERVER: authority.issue(SERVER, hosts, "server")}
    except ValueError as error:
        raise ConfigError(f"hosts {', '.join(hosts)}: one is neither a host name nor an IP address: {error}") from error
    tokens = [new_token() for _ in range(workers)]
    for rank, token in enumerate(tokens):
        name = worker_name(rank)
        ends[name] = authority.issue(name, [name], "worker")
        files[f"{name}.token"] = f"rank={rank} {token}\n".encode()
    for name, issued in ends.items():
        files |= {f"{name}.pem": issued.certificate, f"{name}.key": issued.key}
    files["server.token"] = b"".join(files[f"{worker_name(rank)}.token"] for rank in range(workers))
    if there := sorted(name for name in files if (folder / name).exists()):
        raise ConfigError(
            f"{folder} holds {', '.join(there[:3])}{' …' if len(there) > 3 else ''} already, and nothing is "
            "overwritten; choose another folder"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
    return [folder / name for name in files]


def in_starter(folder: Path, rank: int | None = None) -> Credentials:
    """Returns the credentials of worker `rank`, or the server's, in a folder that `make_starter` wrote."""
    name = SERVER if rank is None else worker_name(rank)
    return Credentials(
        ca=folder / "ca.pem",
        cert=folder / f"{name}.pem",
        key=folder / f"{name}.key",
        token_file=folder / f"{name}.token",
    )


def options_in(folder: Path, rank: int | None = None) -> list[str]:
    """Returns the options of `thinwire worker` that name worker `rank`'s files, or of `thinwire server` the server's.

    >>> options_in(Path("certs"), 1)[-2:]
    ['--token-file', 'certs/worker-1.token']
    """
    own = in_starter(folder, rank)
    named = {"--tls-cert": own.cert, "--tls-key": own.key, "--tls-ca": own.ca, "--token-file": own.token_file}
    return [str(word) for option in named.items() for word in option]
