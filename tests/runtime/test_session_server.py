"""Numbered sessions over connections that break: resumed, refused, cut and forgotten peers."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

from tests.runtime.handlers import Hours, Notes, handling, joining
from tests.runtime.sessions import Cluster, Echo, number_in, numbered
from tests.server.conversation import make_plan
from thinwire.errors import ProtocolError, SessionLostError, TransportError
from thinwire.packets import kind_of, pack
from thinwire.runtime.limits import JOIN_WITHIN_S, MAX_ENDED, MAX_JOIN_NBYTES, MAX_OPENING_NBYTES, allowance
from thinwire.runtime.session import (
    ACKNOWLEDGE_MESSAGES,
    ACKNOWLEDGE_NBYTES,
    LEAVING_S,
    Dial,
    Pause,
    ReplayBuffer,
    WorkerSession,
)
from thinwire.runtime.session_server import SessionServer
from thinwire.schema import Acknowledged, Leave, Refused, SessionAccepted, SessionOpen
from thinwire.server.core import ServerCore
from thinwire.transports.base import Identity, wire_nbytes


def test_session_resumes_only_for_its_peer() -> None:
    notes = Notes()
    notes.identities = {0: Identity("worker-0", 0), 1: Identity("worker-1", 1), 3: Identity("worker-0", 0)}
    sessions = SessionServer(Echo, notes, 30.0)
    opening = pack(SessionOpen(session="a sniffed name"))
    for peer in range(4):
        sessions.opened(peer)
        sessions.received(peer, opening)
    refused = Refused(reason="this session is another worker's: continue with the certificate and rank that began it")
    assert notes.ended == [(1, refused), (2, refused), (0, None)], "peer 3 replaces peer 0"
    assert [peer for peer, _ in notes.sent] == [0, 3]
    sessions.received(3, numbered(1))
    assert [number_in(packet) for peer, packet in notes.sent[2:] if peer == 3] == [2, 3]


def test_session_server_cuts_peers_that_do_not_join() -> None:
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


def test_session_without_join_leaves_no_state() -> None:
    notes = Notes()
    sessions = SessionServer(handling(ServerCore()), notes, 30.0)
    for peer in range(3 * MAX_ENDED):
        sessions.opened(peer)
        sessions.received(peer, pack(SessionOpen(session=f"{peer:032x}")))
        if peer % 2:
            sessions.received(peer, pack(Leave()))  # which is refused; the reason may be asked for again
        sessions.closed(peer, "dropped" if peer % 2 == 0 else None)
    assert not sessions._numbered and len(sessions._named) == MAX_ENDED


def test_session_server_refuses_invalid_openings() -> None:
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


def test_session_server_refuses_peer_without_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
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
    worker = cluster.worker()  # other workers continue
    worker.send(numbered(1))
    assert number_in(worker.receive(5)) == 2


# ---- what one end keeps


def test_replay_buffer_acknowledges_and_refuses_impossible_counts() -> None:
    buffer = ReplayBuffer()
    buffer.append(b"packet")
    buffer.acknowledge(1)
    for count in (0, 2, -1):
        with pytest.raises(ProtocolError, match=f"acknowledges {count} messages; between 1 and 1 are possible"):
            buffer.acknowledge(count)
    assert buffer.nbytes == 0 and buffer.unacknowledged == ()
    buffer = ReplayBuffer()
    for _ in range(2):
        assert [buffer.record(b"x") for _ in range(ACKNOWLEDGE_MESSAGES)] == [False] * 63 + [True]
        assert buffer.record(bytes(ACKNOWLEDGE_NBYTES))
    assert buffer.received == 2 * (ACKNOWLEDGE_MESSAGES + 1)


# ---- how a worker comes back

CUT = TransportError("cut")


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def session(self, reconnect_s: float = 10.0) -> WorkerSession:
        return WorkerSession("name", "there", reconnect_s=reconnect_s, now=lambda: self.now)


def in_vain(session: WorkerSession, time: Time, pauses: list[float]) -> None:
    """Reconnects to a server that does not answer."""
    procedure = session.reconnect(CUT)
    effect = next(procedure)
    while True:
        if isinstance(effect, Pause):
            time.now += effect.seconds
            pauses.append(effect.seconds)
        assert isinstance(effect, Pause | Dial)
        dials = isinstance(effect, Dial)
        effect = procedure.throw(TransportError("refused")) if dials else procedure.send(None)


def test_worker_session_pauses_grow_until_deadline() -> None:
    for left, patience in ((False, 20.0), (True, LEAVING_S)):
        time, pauses = Time(), [0.0]
        session = time.session(20.0)
        if left:
            session.send(pack(Leave()))
        with pytest.raises(TransportError, match=f"cut; no way back to there within {patience:g} s: refused"):
            in_vain(session, time, pauses)
        assert pauses[1:6] == [0.05, 0.1, 0.2, 0.4, 0.8] and max(pauses) <= 3.0
        assert sum(pauses) == pytest.approx(patience)
        with pytest.raises(TransportError, match="no way back"):
            session.check()


def test_worker_session_refusal_ends_session() -> None:
    for refused, said in (
        (Refused(reason="enough"), ProtocolError),
        (Refused(reason="enough", lost=True), SessionLostError),
    ):
        session = Time().session()
        procedure = session.reconnect(CUT, partial(list, [pack(refused)]))
        with pytest.raises(ProtocolError, match="the server ended the session: enough") as ended:
            next(procedure)
        assert ended.type is said
    for lost, kind in ((False, ProtocolError), (True, SessionLostError)):
        session = Time().session()
        procedure = session.reconnect(CUT)
        next(procedure)
        with pytest.raises(ProtocolError, match=r"who\?") as caught:
            procedure.send(pack(Refused(reason="who?", lost=lost)))
        assert type(caught.value) is kind and session.over is not None


def test_worker_session_break_without_waiting_server_raises() -> None:
    session = Time().session()
    assert session.receive(pack(SessionAccepted(received=0, grace_s=0.0))) == (False, None)
    session.send(b"not kept")
    assert session.buffer.unacknowledged == ()
    with pytest.raises(TransportError, match="cut"):
        session.reconnect(CUT)
