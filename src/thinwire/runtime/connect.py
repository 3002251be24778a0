"""From a server's address to a connection. The scheme says which transport."""

from __future__ import annotations

from thinwire.errors import ConfigError
from thinwire.runtime.reconnecting import ReconnectingConnection
from thinwire.transports import grpc
from thinwire.transports.base import Connection
from thinwire.transports.grpc import GrpcOptions


def connect(
    server: str | Connection,
    *,
    connect_timeout_s: float = 30.0,
    reconnect_s: float = 0.0,
    options: GrpcOptions | None = None,
) -> Connection:
    """Returns a connection to `grpc://host:port`, waiting until the server is there; a Connection is taken as it is.

    Args:
        server: the address, or a connection.
        connect_timeout_s: how long the server may take to appear, in seconds.
        reconnect_s: for how long a connection that breaks is tried to be replaced, in seconds; 0: not at all.
        options: of the transport.

    Raises:
        ConfigError: an address of another form.
        DeadlineError: nobody answers at that address.
    """
    if isinstance(server, Connection):
        return server
    scheme, separator, rest = server.partition("://")
    if not separator or scheme != "grpc" or not rest:
        raise ConfigError(f"server={server!r}; expected grpc://host:port")
    if reconnect_s <= 0:
        return grpc.connect(rest, connect_timeout_s=connect_timeout_s, options=options)
    return ReconnectingConnection(
        lambda timeout_s: grpc.connect(rest, connect_timeout_s=timeout_s, options=options),
        connect_timeout_s=connect_timeout_s,
        reconnect_s=reconnect_s,
        max_message_nbytes=(options or GrpcOptions()).max_message_nbytes,
    )
