"""The server core behind a transport: effects carried out, bad packets answered, the end told once."""

from __future__ import annotations

from collections.abc import Callable

from tests.packets.bytes_of import packet
from tests.server.conversation import Shard, make_plan
from thinwire.packets import kind_of, pack, parse
from thinwire.runtime.serving import ServerHandler, serving
from thinwire.schema import Join, Leave, Message, Refused, Values, Welcome
from thinwire.server.core import ServerCore
from thinwire.transports.base import Sender
from thinwire.transports.memory import MemoryServer


class Notes(Sender):
    """Writes down what a handler does."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.ended: list[tuple[int, Message | None]] = []

    def send(self, peer: int, packet: bytes) -> None:
        self.sent.append((peer, packet))

    def close(self, peer: int, packet: bytes | None = None) -> None:
        self.ended.append((peer, None if packet is None else parse(packet)[0]))

    def call(self, callback: Callable[[], None]) -> None:
        callback()


def make(workers: int = 2) -> tuple[ServerHandler, Notes, ServerCore, list[int]]:
    notes, core, ends = Notes(), ServerCore(), list[int]()
    handler = ServerHandler(core, notes, lambda: ends.append(1))
    for rank in range(workers):
        handler.opened(rank)
        handler.received(rank, pack(Join(rank=rank, plan=make_plan(workers))))
    return handler, notes, core, ends


def test_a_join_is_answered() -> None:
    _, notes, core, ends = make()
    assert [(peer, parse(packet)[0]) for peer, packet in notes.sent] == [
        (0, Welcome(send_values=True)),
        (1, Welcome(send_values=False)),
    ]
    assert core.plan == make_plan(2) and not ends


def test_one_packet_object_goes_to_all() -> None:
    """So that it is serialised once, whatever the number of workers."""
    handler, notes, _, _ = make(3)
    shard = Shard(make_plan(3))
    values = next(told for told in shard.told[1] if told[1])
    handler.received(0, pack(*values))
    receivers = [(peer, packet) for peer, packet in notes.sent if kind_of(packet) is Values]
    assert [peer for peer, _ in receivers] == [1, 2]
    assert receivers[0][1] is receivers[1][1]


def test_a_packet_that_is_no_message_is_answered_and_the_session_ended() -> None:
    handler, notes, core, _ = make()
    handler.opened(7)
    handler.received(7, packet(kind=200))
    [(peer, message)] = notes.ended
    assert peer == 7 and isinstance(message, Refused) and "message kind 200 is unknown" in message.reason
    handler.closed(7, None)
    assert core.failed is None


def test_the_others_hear_what_was_wrong_with_a_workers_bytes() -> None:
    handler, notes, core, ends = make()
    handler.received(1, packet(kind=4, message=b"\xc1"))
    assert core.failed is not None
    assert core.failed.startswith("worker 1: a message of kind 4 could not be read: ")
    assert sorted(notes.ended) == [(0, Refused(reason=core.failed)), (1, Refused(reason=core.failed))]
    handler.closed(1, None)
    assert ends == [1] and "could not be read" in core.failed


def test_the_end_is_told_once() -> None:
    handler, notes, core, ends = make(1)
    shard = Shard(make_plan(1))
    handler.received(0, pack(Values(tables=(0, 1), versions=(0, 0)), tuple(t.snapshot() for t in shard.core.tables)))
    assert not ends
    handler.received(0, pack(Leave()))
    handler.closed(0, None)
    handler.received(0, pack(Leave()))
    assert core.finished and ends == [1] and notes.ended[0] == (0, None)


def test_without_a_callback_it_serves_all_the_same() -> None:
    core = ServerCore()
    with MemoryServer(serving(core)) as server, server.connect() as connection:
        connection.send(pack(Join(rank=0, plan=make_plan(1))))
        answer = connection.receive(10)
        assert answer is not None and parse(answer)[0] == Welcome(send_values=True)
    assert core.failed is not None and "worker 0 went away" in core.failed
