"""What only the in-memory transport promises; the rest is in test_contract.py."""

from __future__ import annotations

from thinwire.transports import Sender
from thinwire.transports.memory import MemoryServer


class Log:
    """A handler that answers every packet and writes down the order of everything."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.lines: list[str] = []

    def opened(self, peer: int) -> None:
        self.lines.append(f"open {peer}")

    def received(self, peer: int, packet: bytes) -> None:
        self.lines.append(f"begin {peer}:{packet[0]}")
        self.sender.send(peer, packet)
        self.sender.call(lambda: self.lines.append(f"called by {peer}:{packet[0]}"))
        if packet[0] == 9:
            self.sender.close(peer)
        self.lines.append(f"end {peer}:{packet[0]}")

    def closed(self, peer: int, error: str | None) -> None:
        self.lines.append(f"close {peer} {error}")


def test_handlers_are_called_in_the_order_of_the_program() -> None:
    logs: list[Log] = []

    def factory(sender: Sender) -> Log:
        logs.append(Log(sender))
        return logs[0]

    server = MemoryServer(factory)
    first, second = server.connect(), server.connect()
    first.send(b"\x01")
    second.send(b"\x09")
    first.close()
    assert logs[0].lines == [
        "open 0",
        "open 1",
        "begin 0:1",
        "end 0:1",
        "called by 0:1",
        "begin 1:9",
        "end 1:9",
        "called by 1:9",
        "close 1 None",
        "close 0 None",
    ]
    assert second.receive(timeout_s=0) == b"\x09"
    assert second.receive(timeout_s=0) is None
