"""`grpc.health.v1` beside a server: whether its loop still answers, on a port of its own, for probes that speak no TLS.

The answer comes from the loop that serves the workers, so a server that hangs gives none, though it still accepts
connections. Both messages are written out here (a name, and one number): they are all that protobuf is needed for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.extras import optional

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[bytes, bytes]
else:
    grpc = optional("grpc", "a parameter server")

SERVICE, METHOD = "grpc.health.v1.Health", "Check"
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
WHOLE_SERVER = b""  # HealthCheckRequest{service: ""}
_NBYTES = 1024
"""Of a request, at most."""
_ARGUMENTS = [
    ("grpc.max_receive_message_length", _NBYTES),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.so_reuseport", 0),
]


def health_server() -> grpc.aio.Server:
    """Returns a server of the running loop that says that it serves; ports are the caller's to add."""

    async def check(request: bytes, context: Context) -> bytes:
        if request != WHOLE_SERVER:
            await context.abort(grpc.StatusCode.NOT_FOUND, "one service is known here, the whole server: ''")
        return SERVING

    server = grpc.aio.server(options=_ARGUMENTS)
    method = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
    return server
