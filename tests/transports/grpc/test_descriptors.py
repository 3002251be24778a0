"""A server's process has fewer file descriptors than it takes connections: strangers do not use them all up."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

SERVES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc.server import serve
server = serve(lambda sender: None, "0.0.0.0:0", options=GrpcOptions(insecure=True))
print(server.address, flush=True)
sys.stdin.readline()
files = [open(sys.executable, "rb") for _ in range(16)]
print("still opens files", flush=True)
server.stop(0)
"""


def test_strangers_leave_a_server_the_descriptors_of_its_files() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stdin is not None and server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(160)]
            with contextlib.suppress(TimeoutError):  # until it has looked at all: the last one is hung up on
                strangers[-1].settimeout(5)
                strangers[-1].recv(1)
            out, err = server.communicate("go on\n", timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert out == "still opens files\n", err
    assert "too few files open for 4,096 connections, and takes 64: whoever reaches its port" in err
