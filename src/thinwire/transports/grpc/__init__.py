"""Sessions between machines: one bidirectional gRPC stream per worker and server.

The server runs on asyncio, which costs about half the processor time of gRPC's thread pool on streams; the
worker's end blocks, because training does.
"""

from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.options import GrpcOptions, Tls
from thinwire.transports.grpc.server import GrpcServer, serve

__all__ = ["GrpcOptions", "GrpcServer", "Tls", "connect", "serve"]
