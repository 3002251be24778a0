"""The server core behind a transport, and its end of sessions: who is answered, waited for, refused and forgotten."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec
import pytest

from tests.packets.bytes_of import packet
from tests.runtime.sessions import Cluster, Echo, number_in, numbered
from tests.server.conversation import Shard, make_plan
from thinwire.errors import ProtocolError, TransportError
from thinwire.packets import kind_of, pack, parse
from thinwire.runtime.limits import JOIN_WITHIN_S, MAX_ENDED, MAX_JOIN_NBYTES, MAX_OPENING_NBYTES, allowance
from thinwire.runtime.serving import ServerHandler, serving
from thinwire.runtime.session_server import SessionServer
from thinwire.schema import (
    Acknowledged,
    Join,
    Leave,
    Message,
    Refused,
    SessionAccepted,
    SessionOpen,
    TableSpec,
    Values,
    Welcome,
)
from thinwire.server.core import ServerCore
from thinwire.transports.base import ANYBODY, Identity, Sender, wire_nbytes
from thinwire.transports.memory import MemoryServer

# ---- effects carried out


class Notes(Sender):
    """Writes down what a handler does. Peers are who `identities` says."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.ended: list[tuple[int, Message | None]] = []
        self.identities: dict[int, Identity] = {}
        self.limits: dict[int, tuple[int, Callable[[], None]]] = {}

    def identity(self, peer: int) -> Identity:
        return self.identities.get(peer, ANYBODY)

    def send(self, peer: int, packet: bytes) -> None:
        self.sent.append((peer, packet))

    def close(self, peer: int, packet: bytes | None = None) -> None:
        self.ended.append((peer, None if packet is None else parse(packet)[0]))

    def call(self, callback: Callable[[], None]) -> None:
        callback()

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None]) -> None:
        self.limits[peer] = nbytes, exceeded


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


# ---- strangers


def test_nothing_but_a_join_is_decoded_before_a_worker_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, notes, core, _ = make()
    decoded: list[bytes] = []
    monkeypatch.setattr("thinwire.runtime.serving.parse", lambda packet, limits: decoded.append(packet))
    for said, why in (
        (pack(Values(tables=(), versions=())), "Values came before Join"),
        (pack(Leave()), "Leave came before Join"),
        (pack(Join(rank=0, plan=make_plan(1))) + bytes(MAX_JOIN_NBYTES), "a first message of more than 1048576 bytes"),
    ):
        handler.received(7, said)
        peer, message = notes.ended[-1]
        assert peer == 7 and isinstance(message, Refused) and why in message.reason
    assert not decoded and core.failed is None


def test_packets_about_the_session_are_short() -> None:
    cluster = Cluster()
    for said in (SessionOpen(session="x" * MAX_OPENING_NBYTES), Acknowledged(count=0)):
        liar = cluster.connect()
        liar.send(pack(said, (bytes(MAX_OPENING_NBYTES),)))
        answer = liar.receive(1)
        assert answer is not None and f"{type(said).__name__} of ".encode() in answer
    assert not cluster.echo.received_numbers


def test_a_peer_joins_with_the_rank_that_it_proved() -> None:
    handler, notes, core, _ = make(0)
    notes.identities = {5: Identity("worker-1", 1), 6: Identity("worker-1", 1), 7: Identity("anybody")}
    for peer, rank in ((5, 0), (6, 1), (7, 0)):
        handler.received(peer, pack(Join(rank=rank, plan=make_plan(2))))
    [(peer, message)] = notes.ended
    assert peer == 5 and isinstance(message, Refused)
    assert message.reason == "rank 0: this worker's certificate or token is for rank 1; use that rank's own"
    assert [peer for peer, _ in notes.sent] == [6, 7] and core.failed is None


def test_a_session_is_taken_up_by_the_peer_that_began_it_alone() -> None:
    notes = Notes()
    notes.identities = {0: Identity("worker-0", 0), 1: Identity("worker-1", 1), 3: Identity("worker-0", 0)}
    sessions = SessionServer(Echo, notes, 30.0)
    opening = pack(SessionOpen(session="a sniffed name"))
    for peer in range(4):
        sessions.opened(peer)
        sessions.received(peer, opening)
    refused = Refused(reason="this session is another worker's: go on with the certificate and rank that began it")
    assert notes.ended == [(1, refused), (2, refused), (0, None)], "peer 3 replaces peer 0"
    assert [peer for peer, _ in notes.sent] == [0, 3]
    sessions.received(3, numbered(1))
    assert [number_in(packet) for peer, packet in notes.sent[2:] if peer == 3] == [2, 3]


def test_an_earlier_connection_whose_packets_come_late_does_not_take_a_session_back() -> None:
    notes = Notes()
    sessions = SessionServer(Echo, notes, 30.0)
    for peer, number in ((0, 1), (1, 0), (2, 1), (3, 2)):
        sessions.opened(peer)
        sessions.received(peer, pack(SessionOpen(session="one", connection=number)))
    sessions.received(1, numbered(1))
    assert notes.ended == [(1, None), (0, None), (2, None)]
    assert [peer for peer, _ in notes.sent] == [0, 2, 3], "what came late is not heard"
    sessions.received(3, numbered(1))
    assert [number_in(packet) for peer, packet in notes.sent[3:] if peer == 3] == [2, 3]


def handling(core: ServerCore) -> Callable[[Sender], ServerHandler]:
    return lambda sender: ServerHandler(core, sender, lambda: None)


class Hours:
    """A clock whose time passes when a test says so."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        later = self.time + delay_s, callback
        self.waiting.append(later)
        return lambda: self.waiting.remove(later) if later in self.waiting else None

    def pass_by(self, seconds: float) -> None:
        self.time += seconds
        for when, callback in list(self.waiting):
            if when <= self.time:
                self.waiting.remove((when, callback))
                callback()


def test_who_does_not_join_in_time_is_cut_and_who_joined_is_not() -> None:
    notes, clock = Notes(), Hours()
    sessions = SessionServer(handling(ServerCore()), notes, 1000.0, clock)
    opening = pack(SessionOpen(session="late"))
    for peer, said in enumerate(((), (opening,), (joining(0),), (pack(SessionOpen(session="joined")), joining(1)))):
        sessions.opened(peer)
        for each in said:
            sessions.received(peer, each)
    clock.pass_by(JOIN_WITHIN_S)
    late = Refused(reason="no Join came within 120 s")
    assert notes.ended == [(0, late), (1, late)]
    sessions.closed(3, "broke")
    sessions.opened(4)
    sessions.received(4, pack(SessionOpen(session="joined", received=1)))
    clock.pass_by(JOIN_WITHIN_S)
    assert notes.ended == [(0, late), (1, late)], "a session that is taken up again has joined"
    assert notes.limits[4][0] == notes.limits[3][0] == allowance(make_plan(2)).packet_nbytes
    assert notes.limits[0][0] == notes.limits[1][0] == MAX_JOIN_NBYTES


def joining(rank: int) -> bytes:
    return pack(Join(rank=rank, plan=make_plan(2)))


def test_a_packet_of_more_than_the_plan_allows_ends_its_workers_session_unread() -> None:
    _, notes, core, _ = make()
    most, exceeded = notes.limits[1]
    assert most == allowance(make_plan(2)).packet_nbytes
    exceeded()
    reason = f"worker 1: a packet of more than {most} bytes came, which is what the plan's shapes allow"
    assert core.failed == reason and (1, Refused(reason=reason)) in notes.ended


def test_what_a_head_declares_is_held_against_the_plan() -> None:
    most = allowance(make_plan(2)).head
    for frames, message in ((most.frames + 1, b""), (0, bytes(most.message_nbytes + 1))):
        handler, _, core, _ = make()
        handler.received(1, packet(kind=4, message=message, frames=(b"",) * frames))
        assert core.failed is not None and f"at most {most.frames} frames and {most.message_nbytes}" in core.failed


def test_a_large_models_join_is_let_in_where_the_server_says_so() -> None:
    tables = tuple(TableSpec(name=f"layers.{index}." + "x" * 200, shape=(1,)) for index in range(6000))
    large = pack(Join(rank=0, plan=msgspec.structs.replace(make_plan(1), tables=tables)))
    for most, answer in ((MAX_JOIN_NBYTES, Refused), (2 * MAX_JOIN_NBYTES, Welcome)):
        with MemoryServer(serving(ServerCore(), max_join_nbytes=most)) as server, server.connect() as connection:
            connection.send(large)
            said = connection.receive(10)
            assert said is not None and kind_of(said) is answer
            assert answer is Welcome or b"serving(max_join_nbytes=" in said


def test_sessions_that_never_joined_leave_nothing_behind() -> None:
    notes = Notes()
    sessions = SessionServer(handling(ServerCore()), notes, 30.0)
    for peer in range(3 * MAX_ENDED):
        sessions.opened(peer)
        sessions.received(peer, pack(SessionOpen(session=f"{peer:032x}")))
        if peer % 2:
            sessions.received(peer, pack(Leave()))  # which is refused; the reason may be asked for again
        sessions.closed(peer, "dropped" if peer % 2 == 0 else None)
    assert not sessions._numbered and len(sessions._named) == MAX_ENDED


class Ticks:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.time, self.later = 0.0, list[Callable[[], None]]()

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        self.later.append(callback)
        return lambda: None


def test_the_core_is_told_the_time_while_workers_are_here() -> None:
    clock, notes, times = Ticks(), Notes(), list[float]()
    core = ServerCore(min_workers=1, straggler_grace_s=1.0)
    core.waited = lambda now: times.append(now) or []  # type: ignore[method-assign,func-returns-value]
    handler = ServerHandler(core, notes, lambda: None, clock=clock)
    assert not clock.later
    for rank in range(2):
        handler.received(rank, pack(Join(rank=rank, plan=make_plan(2))))
    for clock.time in (1.0, 2.0, 3.0):
        [tick] = clock.later
        clock.later.clear()
        if clock.time == 3.0:
            handler.closed(0, None)
            handler.closed(1, None)
        tick()
    assert times == [1.0, 2.0, 3.0] and not clock.later


# ---- sessions


def test_the_handler_is_told_of_one_that_does_not_come_back() -> None:
    cluster = Cluster(grace_s=0.05)
    worker = cluster.worker()
    worker.send(numbered(1))
    told = threading.Event()
    note_end = cluster.echo.closed

    def closed(peer: int, error: str | None) -> None:
        note_end(peer, error)
        told.set()

    cluster.echo.closed = closed  # type: ignore[method-assign]
    cluster.cut()
    assert told.wait(10)
    assert cluster.echo.ends == [(0, "cut; it did not come back within 0.05 s")]
    assert number_in(worker.receive(5)) == 2  # it had come before the cut
    assert number_in(worker.receive(5)) == 3
    with pytest.raises(ProtocolError, match="does not know the session: it was restarted, or it no longer waited"):
        worker.receive(5)


def test_peers_that_do_not_open_a_session_are_reported_at_once_and_lies_are_refused() -> None:
    cluster = Cluster()
    plain = cluster.connect()
    plain.send(numbered(4))
    assert number_in(plain.receive(1)) == 8
    plain.abort()
    assert cluster.echo.ends == [(0, "the peer went away without saying so")]
    for said in (SessionOpen(session=""), SessionOpen(session="x" * 65), SessionOpen(session="new", received=3)):
        liar = cluster.connect()
        liar.send(pack(said))
        answer = liar.receive(1)
        assert answer is not None and kind_of(answer) is Refused
        assert liar.receive(1) is None


def test_who_never_acknowledges_does_not_fill_the_servers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.runtime.session_server.MAX_KEPT_NBYTES", 10 * wire_nbytes(numbered(10)))
    cluster = Cluster()
    silent = cluster.connect()
    silent.send(pack(SessionOpen(session="silent")))
    with contextlib.suppress(TransportError):  # the session may be over before all is sent
        for number in range(10, 20):
            silent.send(numbered(number))
    last = None
    while (answer := silent.receive(5)) is not None:
        last = answer
    assert last is not None and kind_of(last) is Refused and b"it did not acknowledge" in last
    [(peer, error)] = cluster.echo.ends
    assert peer == 0 and error is not None and "it did not acknowledge" in error
    worker = cluster.worker()  # others go on
    worker.send(numbered(1))
    assert number_in(worker.receive(5)) == 2


def test_nothing_is_kept_of_sessions_that_ended() -> None:
    cluster = Cluster(grace_s=0.0)
    for number in range(20):
        worker = cluster.worker()
        worker.send(numbered(number))
        assert number_in(worker.receive(5)) == 2 * number
        if number % 2:
            worker.abort()
        else:
            worker.send(pack(Leave()))
            worker.close()
        plain = cluster.connect()
        plain.send(numbered(1))
        plain.close()
    assert sorted(peer for peer, _ in cluster.echo.ends) == list(range(40)), "no number returns"
    cluster.connect().send(pack(SessionOpen(session="one more")))
    assert len(cluster.sessions._numbered) == len(cluster.sessions._named) == len(cluster.sessions._of_peer) == 1


def test_the_last_packet_may_be_asked_for_again_for_as_long_as_a_worker_may_come_back() -> None:
    cluster = Cluster(grace_s=30.0)
    first = cluster.connect()
    first.send(pack(SessionOpen(session="one")))
    cluster.server.post(lambda: cluster.echo.sender.close(0, pack(Refused(reason="enough"))))
    again = cluster.connect()
    again.send(pack(SessionOpen(session="one", received=0)))
    assert again.receive(1) == pack(Refused(reason="enough")) and again.receive(1) is None
    fresh = cluster.connect()
    fresh.send(pack(SessionOpen(session="two")))
    assert fresh.receive(1) == pack(SessionAccepted(received=0, grace_s=30.0))
