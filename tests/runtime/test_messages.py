"""What travels between workers and servers: numbers that stay, and fields that may be added."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from thinwire.errors import ProtocolError
from thinwire.packets import BatchedTensor
from thinwire.packets.batch import join
from thinwire.runtime.messages import from_packet, to_packet
from thinwire.schema import (
    KINDS,
    Abort,
    Delta,
    Heard,
    Join,
    Leave,
    Message,
    Open,
    Opened,
    Plan,
    Push,
    Refused,
    Scalars,
    Shard,
    Skip,
    TableSpec,
    Values,
    Welcome,
)
from thinwire.transports.base import Packet

PLAN = Plan(
    workers=3,
    tables=(
        TableSpec(name="fc.weight", shape=(3, 4), up=1, down=2, group=1),
        TableSpec(name="größe", shape=(), state=True),
    ),
    codecs=({"id": "fp32"}, {"id": "3lc", "sparsity": 1.75}, {"id": "3lc", "entropy": None}),
    optimizer="AdamW",
    groups=({}, {"betas": [0.9, 0.999], "amsgrad": True}),
    reduce="sum",
    state_interval=7,
)

MESSAGES: list[Message] = [
    Join(rank=2, plan=PLAN, have=(4, 5)),
    Welcome(send_values=True, step=9),
    Values(tables=(0, 1), versions=(3, 3)),
    Push(step=2**40, tables=(1,), rates=(0.1, 1e-30), last=True),
    Delta(version=4, tables=(0,), last=True, base=1, ranks=(0, 2), rates=(0.5,)),
    Leave(),
    Refused(reason="ein Grund — mit Umlauten: äöü"),
    Scalars(step=3, values=(0.5, 1.25)),
    Open(session="5eed", heard=3, forgotten=2),
    Opened(heard=4, grace_s=60.0),
    Heard(count=64),
    Shard(step=3, bucket=1),
    Skip(step=3, bucket=1),
    Abort(reason="why"),
]


JOIN = to_packet(Join(rank=0, plan=PLAN)).header


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    frames = (b"\x00\x01", b"")
    assert from_packet(to_packet(message, frames)) == (message, frames)


def test_the_samples_cover_every_kind_and_numbers_stay() -> None:
    first = (Join, Welcome, Values, Push, Delta, Leave, Refused, Scalars)
    assert dict(enumerate((*first, Open, Opened, Heard, Shard, Skip, Abort), start=1)) == KINDS
    assert [type(message) for message in MESSAGES] == list(KINDS.values())


def test_an_older_reader_skips_fields_that_it_does_not_know() -> None:
    header = msgspec.msgpack.encode({"step": 3, "tables": [0], "rates": [0.5], "last": False, "clock": 17})
    assert from_packet(Packet(4, header, (b"f",))) == (Push(step=3, tables=(0,), rates=(0.5,)), (b"f",))


def test_an_older_writer_may_leave_out_what_has_a_default() -> None:
    header = msgspec.msgpack.encode({"step": 3, "tables": [0]})
    assert from_packet(Packet(4, header))[0] == Push(step=3, tables=(0,))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_messages_are_frozen_and_their_fields_named(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen and not config.forbid_unknown_fields


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (Packet(0, b"\x80"), "message kind 0 is unknown; protocol 1 has"),
        (Packet(99, b"\x80"), "message kind 99 is unknown"),
        (Packet(6, b""), "kind 6 could not be read"),
        (Packet(6, b"\x80\x80"), "kind 6 could not be read: .*trailing"),
        (Packet(4, msgspec.msgpack.encode({"tables": [0]})), "kind 4 could not be read: .*`step`"),
        (Packet(4, msgspec.msgpack.encode({"step": "3", "tables": [0]})), r"kind 4 could not be read: .*\$.step"),
        (Packet(4, msgspec.msgpack.encode({"step": 3, "tables": [0.5]})), "kind 4 could not be read"),
        (Packet(7, b"\x81\xa6reason\xa2\xff\xfe"), "kind 7 could not be read: .*utf-8"),
        (
            Packet(1, JOIN.replace(b"\xa3sum", b"\xa3max")),
            "kind 1 could not be read: .*reduce",
        ),
        (
            Packet(1, JOIN.replace(b"\x81\xa2id\xa4fp32", b"\x81\xa2id" + b"\x91" * 10**5)),
            "kind 1 could not be read: .*recursion",
        ),
    ],
)
def test_what_is_no_message(packet: Packet, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        from_packet(packet)


# ---- batches


def ones(count: int) -> BatchedTensor:
    return BatchedTensor(np.full(count, 0.5, np.float32))


@pytest.mark.parametrize("kind", [Push(step=3, tables=(4, 1, 0, 7)), Delta(version=3, tables=(4, 1, 0, 7))])
def test_members_come_back_to_their_tables(kind: Push | Delta) -> None:
    packet = to_packet(kind, (b"frame", ones(2), b"", ones(5)))
    assert len(packet.frames) == 3 and packet.frames[:2] == (b"frame", b"")
    message, pieces = from_packet(packet)
    assert isinstance(message, Push | Delta) and message.tables == kind.tables and message.batch == (0, 2, 0, 5)
    alone, first, empty, second = pieces
    assert (alone, empty) == (b"frame", b"")
    assert isinstance(first, BatchedTensor) and isinstance(second, BatchedTensor)
    assert (first.values.tolist(), second.values.tolist()) == ([0.5] * 2, [0.5] * 5)


def test_a_message_without_a_batch_is_what_it_was_before_there_were_any() -> None:
    assert b"batch" not in to_packet(Push(step=3, tables=(0,)), (b"f",)).header


@pytest.mark.parametrize(
    ("sizes", "frames", "text"),
    [
        ((2,), (b"f", join([ones(2)])), "2 tables, 1 sizes in the batch and 2 frames"),
        ((0, 2, 3), (b"f", join([ones(5)])), "2 tables, 3 sizes"),
        ((0, -2), (b"f", join([ones(2)])), "do not fit"),
        ((0, 2), (join([ones(2)]),), "2 tables, 2 sizes in the batch and 1 frames"),
        ((1, 1), (), "and 0 frames"),
        ((0, 0), (b"f",), "do not fit"),
        ((0, 3), (b"f", join([ones(2)])), r"the batch of tables \(0, 1\) …: a batch of 3 values came as"),
        ((0, 2**62), (b"f", join([ones(2)])), "a batch of 4611686018427387904 values"),
        ((0, 2), (b"f", join([ones(2)])[:-1]), "the batch of tables"),
        ((1, 1), (join([BatchedTensor(np.array([1.0, np.nan], np.float32))]),), "NaN or Inf"),
    ],
)
def test_batches_that_do_not_fit_their_message(sizes: tuple[int, ...], frames: tuple[bytes, ...], text: str) -> None:
    header = msgspec.msgpack.encode({"step": 3, "tables": [0, 1], "batch": sizes})
    with pytest.raises(ProtocolError, match=text):
        from_packet(Packet(4, header, frames))
