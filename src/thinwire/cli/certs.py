"""`thinwire certs`: an authority, certificates and tokens, for tests and first steps."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli import options
from thinwire.cli.console import console, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import check_apart
from thinwire.errors import ConfigError

with lazily():
    from thinwire.security import certificates, starter

app = typer.Typer()

LOCAL = ("localhost", "127.0.0.1", "::1")


@app.command(epilog="Example: thinwire certs certs --workers 4 --host 10.0.0.1 --host server.example.org")
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, help="Where to; made if it is missing.")],
    workers: options.Workers = 4,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address by which workers reach the server; this machine's are in. Repeat."),
    ] = None,
    days: Annotated[float, typer.Option(min=1, max=36_500, help="For how long the certificates hold.")] = 365.0,
    json: options.Json = None,
) -> None:
    """Make a certificate authority, a server's and workers' certificates, and tokens. Nothing is overwritten."""
    given = [each.strip("[]") for each in host or ()]
    if "" in given:
        raise ConfigError("--host '': give a name or an address by which workers reach the server")
    check_apart(json, starter.files_in(folder, workers), "a certificate, a key or a token is made")
    hosts = list(dict.fromkeys([*given, socket.gethostname(), *LOCAL]))
    files = starter.make_starter(
        folder, certificates.Authority("thinwire test CA", days=days), workers=workers, hosts=hosts
    )
    place = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    server = ["thinwire", "server", "--listen", "0.0.0.0:7070", *starter.options_in(folder)]
    own = starter.in_starter(folder, 0)
    paths = ", ".join(f"{name}={str(getattr(own, name))!r}" for name in ("ca", "cert", "key", "token_file"))
    worker = (
        f"tw.distribute(model, optimizer, server='grpc://{place}:7070', rank=0, workers={workers}, "
        f"credentials=tw.Credentials({paths}))"
    )
    write_json(json, {"files": [str(file) for file in files], "hosts": hosts, "server": server, "worker": worker})
    console.print(
        f"wrote {len(files)} files to {folder}: the server's certificate is for {', '.join(hosts)}",
        markup=False,
        soft_wrap=True,
    )
    console.print(
        "copy to each machine its own files and ca.pem; ca.key signs certificates: keep it to yourself", soft_wrap=True
    )
    for line in (shlex.join(server), worker):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
