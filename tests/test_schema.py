"""Messages: the numbers of docs/wire-format.md, and both directions of growing."""

from __future__ import annotations

import typing

import msgspec
import pytest

from tests.frames.test_layout import table
from thinwire import schema
from thinwire.schema import KINDS, Join, Message, Plan, Push, TableSpec


def test_kinds_are_documented() -> None:
    documented = {name: int(kind) for name, kind, _ in table("Packets and messages")}
    assert documented == {message.__name__: number for number, message in KINDS.items()}


def test_every_message_has_a_kind() -> None:
    assert set(KINDS.values()) == set(typing.get_args(Message))
    assert all(0 < number < 256 for number in KINDS)


PLAN = Plan(
    workers=2,
    tables=(TableSpec(name="fc.weight", shape=(3, 4)),),
    codecs=({"id": "3lc", "sparsity": 1.75},),
    optimizer="SGD",
    groups=({"momentum": 0.9},),
)


def test_a_message_round_trips() -> None:
    join = Join(rank=1, plan=PLAN, have=(3,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(join), type=Join) == join


@pytest.mark.parametrize("message", KINDS.values(), ids=lambda message: message.__name__)
def test_an_older_reader_skips_what_it_does_not_know(message: type[msgspec.Struct]) -> None:
    """A field from the future is not an error."""
    samples: dict[str, dict[str, object] | list[object]] = {
        "Join": {"rank": 0, "plan": msgspec.to_builtins(PLAN)},
        "Welcome": {"send_values": True},
        "Values": {"tables": [0], "versions": [1]},
        "Push": {"step": 4, "tables": [0]},
        "Delta": {"version": 5, "tables": [0]},
        "Leave": {},
        "Refused": {"reason": "another shape"},
        "Scalars": {"step": 4, "values": [0.5]},
        "Open": {"session": "a1"},
        "Opened": {"heard": 3, "grace_s": 5.0},
        "Heard": {"count": 3},
        "Shard": [3, 0],
        "Skip": [3, 0],
        "Abort": ["lost a tensor"],
    }
    fields = samples[message.__name__]
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=message)
    longer = [*fields, [1, 2]] if isinstance(fields, list) else {**fields, "of_the_future": [1, 2]}
    future = msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=message)
    assert future == plain


def test_a_newer_reader_fills_in_what_an_older_writer_left_out() -> None:
    push = msgspec.msgpack.decode(msgspec.msgpack.encode({"step": 4, "tables": [0]}), type=Push)
    assert (push.rates, push.last) == ((), False)


def test_the_protocol_number_travels() -> None:
    assert Join(rank=0, plan=PLAN).protocol == schema.PROTOCOL == 1
