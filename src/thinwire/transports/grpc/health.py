"""`grpc.health.v1` beside a server: tests whether its loop answers, on a separate port, for probes without TLS.

The answer comes from the loop that serves the workers, so a server that hangs does not answer, though it still accepts
connections. Both messages, a name and a number, are written out here, so that protobuf is not needed.
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
"""Largest request, in bytes."""
_ARGUMENTS = [
    ("grpc.max_receive_message_length", _NBYTES),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.so_reuseport", 0),
]


def health_server() -> grpc.aio.Server:
    """Returns a health server on the running loop; the caller adds its ports."""

    async def check(request: bytes, context: Context) -> bytes:
        if request != WHOLE_SERVER:
            await context.abort(grpc.StatusCode.NOT_FOUND, "one service is known here, the whole server: ''")
        return SERVING

    server = grpc.aio.server(options=_ARGUMENTS)
    method = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
    return server
