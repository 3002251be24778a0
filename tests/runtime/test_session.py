"""What each end of a session keeps, and how a worker comes back, without a connection or a clock."""

from __future__ import annotations

import pytest

from thinwire.errors import ProtocolError, SessionLostError, StepMismatchError, TransportError
from thinwire.packets import pack
from thinwire.runtime.session import (
    ACKNOWLEDGE_MESSAGES,
    ACKNOWLEDGE_NBYTES,
    LEAVING_S,
    Abandon,
    Dial,
    Pause,
    ReplayBuffer,
    WorkerSession,
)
from thinwire.schema import Leave, Refused, SessionAccepted

# ---- what one end keeps


def test_replay_buffers_acknowledge_in_time_and_refuse_impossible_counts() -> None:
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
    next(procedure)
    effect = procedure.throw(CUT)
    while True:
        if isinstance(effect, Pause):
            time.now += effect.seconds
            pauses.append(effect.seconds)
        assert isinstance(effect, Pause | Dial | Abandon)
        dials = isinstance(effect, Dial)
        effect = procedure.throw(TransportError("nobody")) if dials else procedure.send(None)


def test_reconnecting_pauses_grow_until_the_time_is_over() -> None:
    for left, patience in ((False, 20.0), (True, LEAVING_S)):
        time, pauses = Time(), [0.0]
        session = time.session(20.0)
        if left:
            session.send(pack(Leave()))
        with pytest.raises(TransportError, match=f"cut; no way back to there within {patience:g} s: nobody"):
            in_vain(session, time, pauses)
        assert pauses[1:6] == [0.05, 0.1, 0.2, 0.4, 0.8] and max(pauses) <= 3.0
        assert sum(pauses) == pytest.approx(patience)
        with pytest.raises(TransportError, match="no way back"):
            session.check()


def test_a_refusal_ends_the_session_before_and_after_the_break() -> None:
    for refused, said in (
        (Refused(reason="enough"), ProtocolError),
        (Refused(reason="enough", lost=True), SessionLostError),
        (Refused(reason="enough", step=3), StepMismatchError),
    ):
        session = Time().session()
        procedure = session.reconnect(CUT)
        next(procedure)
        with pytest.raises((ProtocolError, StepMismatchError), match="the server ended the session: enough") as ended:
            procedure.send(pack(refused))
        assert ended.type is said
    for lost, kind in ((False, ProtocolError), (True, SessionLostError)):
        session = Time().session()
        procedure = session.reconnect(CUT)
        next(procedure)
        procedure.throw(CUT)
        procedure.send(None)
        procedure.send(None)
        assert procedure.send(pack(Refused(reason="who?", lost=lost))) == Abandon()
        with pytest.raises(ProtocolError, match=r"who\?") as caught:
            procedure.send(None)
        assert type(caught.value) is kind and session.over is not None


def test_without_a_server_that_waits_a_break_is_the_end() -> None:
    session = Time().session()
    assert session.receive(pack(SessionAccepted(received=0, grace_s=0.0))) == (False, None)
    session.send(b"not kept")
    assert session.buffer.unacknowledged == ()
    with pytest.raises(TransportError, match="cut"):
        session.reconnect(CUT)
