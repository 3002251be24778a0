"""A TCP proxy on this machine that can cut its connections."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards bytes to an address, and cuts every connection after a number of bytes."""

    def __init__(self, target: str, cuts: list[int]) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._cuts = list(cuts)
        self._passed = 0
        self.done = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._open += [near, far]
            for source, sink, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass, args=(source, sink, up), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if up and self._due(len(data)):
                    self.cut()
                    return
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _due(self, nbytes: int) -> bool:
        with self._lock:
            self._passed += nbytes
            if not self._cuts or self._passed < self._cuts[0]:
                return False
            self._cuts.pop(0)
            self._passed = 0
            self.done += 1
            return True

    def cut(self) -> None:
        """Breaks every connection, as a network does: bytes under way are lost."""
        with self._lock:
            open_, self._open = self._open, []
        for each in open_:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        """Closes the proxy and its connections."""
        self._listener.close()
        self.cut()
