"""The server's end of sessions: who is waited for, who is refused, and that nothing is kept of those who left."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tests.runtime.sessions import Cluster, number_in, numbered
from thinwire.errors import ProtocolError, TransportError
from thinwire.packets import kind_of, pack
from thinwire.runtime import session_server
from thinwire.schema import Leave, Refused, SessionAccepted, SessionOpen
from thinwire.transports.base import wire_nbytes


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
    monkeypatch.setattr(session_server, "MAX_KEPT_NBYTES", 10 * wire_nbytes(numbered(10)))
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
