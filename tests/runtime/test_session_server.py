"""Numbered sessions over connections that break: who takes one up, who is refused, cut and forgotten."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tests.runtime.handlers import Hours, Notes, handling, joining
from tests.runtime.sessions import Cluster, Echo, number_in, numbered
from tests.server.conversation import make_plan
from thinwire.errors import ProtocolError, TransportError
from thinwire.packets import kind_of, pack
from thinwire.runtime.limits import JOIN_WITHIN_S, MAX_ENDED, MAX_JOIN_NBYTES, MAX_OPENING_NBYTES, allowance
from thinwire.runtime.session_server import SessionServer
from thinwire.schema import Acknowledged, Leave, Refused, SessionOpen
from thinwire.server.core import ServerCore
from thinwire.transports.base import Identity, wire_nbytes


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


def test_peers_that_do_not_join_in_time_are_cut() -> None:
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
    # Whatever is kept for one that is away may be sent at once when it comes back.
    reserved = allowance(make_plan(2)).kept_nbytes + MAX_OPENING_NBYTES
    assert notes.reserved == dict.fromkeys((2, 3, 4), reserved)


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


def test_the_handler_is_told_of_a_worker_that_does_not_come_back() -> None:
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


def test_lies_about_sessions_are_refused_and_plain_peers_reported() -> None:
    cluster = Cluster()
    plain = cluster.connect()
    plain.send(numbered(4))
    assert number_in(plain.receive(1)) == 8
    plain.abort()
    assert cluster.echo.ends == [(0, "the peer went away without saying so")]
    for said in (SessionOpen(session="x" * 65), SessionOpen(session="new", received=3)):
        liar = cluster.connect()
        liar.send(pack(said))
        answer = liar.receive(1)
        assert answer is not None and kind_of(answer) is Refused
        assert liar.receive(1) is None
    cluster = Cluster()
    for long in (SessionOpen(session="x" * MAX_OPENING_NBYTES), Acknowledged(count=0)):
        liar = cluster.connect()
        liar.send(pack(long, (bytes(MAX_OPENING_NBYTES),)))
        answer = liar.receive(1)
        assert answer is not None and f"{type(long).__name__} of ".encode() in answer
    assert not cluster.echo.received_numbers
    cluster = Cluster()
    worker = cluster.connect()
    for packet in (pack(SessionOpen(session="liar")), numbered(1), pack(Acknowledged(count=10**6))):
        worker.send(packet)
    told = [worker.receive(1) for _ in range(4)]
    assert kind_of(told[-1] or b"") is Refused
    [(_, error)] = cluster.echo.ends
    assert error is not None and "acknowledges 1000000 messages" in error


def test_a_peer_that_never_acknowledges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
