"""Sessions between machines: one bidirectional gRPC stream per worker and server.

The server runs on asyncio, which costs about half the processor time of gRPC's thread pool on streams; the worker's end
blocks, because training does. `connect` is in `client` and `serve` in `server`, which import grpcio; the modules that
both share need only the standard library.
"""

from thinwire.transports.grpc.options import GrpcOptions
from thinwire.transports.trust import Tls

__all__ = ["GrpcOptions", "Tls"]
