"""The server core behind a transport, of a process or of a group's rank: who is answered, refused, told the time."""

from __future__ import annotations

import msgspec
import pytest

from tests.packets.bytes_of import packet
from tests.runtime.handlers import Hours, Notes, make
from tests.server.conversation import make_plan
from thinwire.packets import pack, parse
from thinwire.runtime.clock import MOMENT_S
from thinwire.runtime.limits import MAX_JOIN_NBYTES, allowance, free_nbytes
from thinwire.runtime.serving import ServerHandler
from thinwire.schema import Join, Leave, Members, Offer, Refused, Resume, TableSpec, Values, Welcome
from thinwire.server.core import ServerCore
from thinwire.transports.base import Identity


def test_a_join_is_answered() -> None:
    _, notes, core, ends = make()
    assert [(peer, parse(packet)[0]) for peer, packet in notes.sent] == [
        (0, offer := Offer(steps=(0,), held=(0,))),
        (1, offer),
        (0, Welcome(send_values=True)),
        (1, Welcome(send_values=False)),
    ]
    assert core.plan == make_plan(2) and not ends


def test_packets_that_are_no_message_are_answered_and_end_the_session() -> None:
    handler, notes, core, _ = make()
    handler.opened(7)
    handler.received(7, packet(kind=200))
    [(peer, message)] = notes.ended
    assert peer == 7 and isinstance(message, Refused) and "message kind 200 is unknown" in message.reason
    handler.closed(7, None)
    assert core.failed is None
    handler, notes, core, ends = make()
    handler.received(1, packet(kind=4, message=b"\xc1"))
    assert sorted(peer for peer, _ in notes.ended) == [0, 1] and core.failed is None and ends == []
    assert all("worker 1: a message of kind 4 could not be read: " in str(message) for _, message in notes.ended)


# ---- strangers


def test_a_plan_that_needs_more_memory_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_nbytes() > 1e6
    handler, notes, core, _ = make(0)
    many = tuple(TableSpec(name=str(number), shape=(1,)) for number in range(1023))
    large = msgspec.structs.replace(make_plan(2), tables=(TableSpec(name="w", shape=(2**20, 2**12)),))
    for free, plan, why in (
        (1e8, msgspec.structs.replace(make_plan(1000), tables=many), "needs at least 133 MB of memory at the server"),
        (1e10, large, "with 4,294,967,296 values needs at least 34.4 GB of memory at the server, which has 10 GB left"),
        (1e12, msgspec.structs.replace(make_plan(4096), tables=many), "4096 workers × 1023 tables; together at most"),
    ):
        monkeypatch.setattr("thinwire.runtime.limits.free_nbytes", lambda free=free: free)
        handler.received(7, pack(Join(rank=0, plan=plan)))
        assert why in str(notes.ended[-1]) and core.plan is None
    handler.received(8, pack(Join(rank=0, plan=make_plan(2))))
    assert core.plan == make_plan(2)


def test_what_a_worker_says_reaches_people_filtered_and_cut(caplog: pytest.LogCaptureFixture) -> None:
    """A terminal obeys escape sequences, and a log's reader believes its lines."""
    said = "\x1b[2J\nERROR all is lost " + "x" * 9000
    handler, notes, *_ = make(2)
    handler.received(1, pack(Leave(failure=said)))
    table = TableSpec(name=said[:90], shape=(1,), up=7)
    handler.received(7, pack(Join(rank=0, plan=msgspec.structs.replace(make_plan(1), tables=(table,)))))
    told = [message.reason for _, message in notes.ended if isinstance(message, Refused)]
    assert len(told) == 2 and all("ERROR all is lost" in each for each in told), told
    for text in (*told, *caplog.messages):
        assert text.isprintable() and len(text) < 2200


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


def test_a_peer_joins_with_the_rank_that_it_proved() -> None:
    handler, notes, core, _ = make(0)
    notes.identities = {5: Identity("worker-1", 1), 6: Identity("worker-1", 1), 7: Identity("anybody")}
    for peer, rank in ((5, 0), (6, 1), (7, 0)):
        handler.received(peer, pack(Join(rank=rank, plan=make_plan(2))))
    [(peer, message)] = notes.ended
    assert peer == 5 and isinstance(message, Refused)
    assert message.reason == "rank 0: this worker's certificate or token is for rank 1; use that rank's own"
    assert [peer for peer, _ in notes.sent] == [6, 7] and core.failed is None


def test_packets_beyond_what_the_plan_allows_end_the_session() -> None:
    _, notes, _, _ = make()
    most, exceeded = notes.limits[1]
    assert most == allowance(make_plan(2)).packet_nbytes
    exceeded()
    reason = f"worker 1: a packet of more than {most} bytes came, which is what the plan's shapes allow"
    assert (1, Refused(reason=reason)) in notes.ended
    head = allowance(make_plan(2)).head
    for frames, message in ((head.frames + 1, b""), (0, bytes(head.message_nbytes + 1))):
        handler, notes, _, _ = make()
        handler.received(1, packet(kind=4, message=message, frames=(b"",) * frames))
        [reason] = {message.reason for _, message in notes.ended if isinstance(message, Refused)}
        assert f"at most {head.frames} frames and {head.message_nbytes}" in reason


@pytest.mark.parametrize("min_workers", [None, 1])
def test_the_others_hear_of_a_broken_connection_that_is_not_back_in_a_moment(min_workers: int | None) -> None:
    """Where they may go on without its worker, at once; a worker that died is first of all a broken connection."""
    clock, notes, plan = Hours(), Notes(), make_plan(3)
    handler = ServerHandler(ServerCore(min_workers), notes, lambda: None, clock=clock, grace_s=60.0)
    for rank in range(3):
        handler.received(rank, pack(Join(rank=rank, plan=plan)))
    for rank in range(3):
        handler.received(rank, pack(Resume(step=0)))

    def heard() -> list[tuple[int, str]]:
        told = [(peer, parse(packet)[0]) for peer, packet in notes.sent]
        notes.sent.clear()
        return [(peer, m.reason) for peer, m in told if isinstance(m, Members) and m.interrupted]

    news = [(0, "worker 1 lost its connection at step 0"), (2, "worker 1 lost its connection at step 0")]
    for away_s, later in ((MOMENT_S / 2, []), (2 * MOMENT_S, news)):
        assert handler.interrupted(1)
        assert heard() == ([] if min_workers is None else news)
        clock.pass_by(away_s)
        assert heard() == (later if min_workers is None else [])
        handler.resumed(1)
    handler.interrupted(1)
    handler.closed(1, "reset by peer; it did not come back")
    heard()
    clock.pass_by(2 * MOMENT_S)
    assert not heard(), "it is gone, as they know"
