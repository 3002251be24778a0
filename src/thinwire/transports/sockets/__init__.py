"""Sessions between ranks: packets over TLS on plain sockets, by one thread for all of a process's connections.

gRPC moves a message through several threads at each end; where every rank sends every other one a message of some
kilobytes each step, that is more than what is done with them. Here one thread reads, decrypts and passes on.
"""

from thinwire.transports.sockets.client import connect
from thinwire.transports.sockets.loop import Loop
from thinwire.transports.sockets.options import SocketOptions
from thinwire.transports.sockets.server import SocketServer, serve

__all__ = ["Loop", "SocketOptions", "SocketServer", "connect", "serve"]
