"""From a server's address to a connection. The scheme says which transport."""

from __future__ import annotations

from thinwire.errors import ConfigError
from thinwire.transports import grpc
from thinwire.transports.base import Connection
from thinwire.transports.grpc import GrpcOptions


def connect(
    server: str | Connection, *, connect_timeout_s: float = 30.0, options: GrpcOptions | None = None
) -> Connection:
    """Returns a connection to `grpc://host:port`, waiting until the server is there; a Connection is taken as it is.

    Raises:
        ConfigError: an address of another form.
        DeadlineError: nobody answers at that address.
    """
    if isinstance(server, Connection):
        return server
    scheme, separator, rest = server.partition("://")
    if not separator or scheme != "grpc" or not rest:
        raise ConfigError(f"server={server!r}; expected grpc://host:port")
    return grpc.connect(rest, connect_timeout_s=connect_timeout_s, options=options)
