"""Messages: the numbers of docs/wire-format.md, what travels, and both directions of growing."""

from __future__ import annotations

import typing

import msgspec

from tests.packets.samples import MESSAGES
from tests.wire_format import table
from thinwire.packets import pack, parse
from thinwire.schema import KINDS, Message


def test_kinds_are_documented_and_numbers_stay() -> None:
    documented = {name: int(kind) for name, kind, _ in table("Messages")}
    assert documented == {message.__name__: number for number, message in KINDS.items()}
    assert dict(enumerate(map(type, MESSAGES), start=1)) == KINDS
    assert set(KINDS.values()) == set(typing.get_args(Message))


def test_every_message_survives_the_wire() -> None:
    for message in MESSAGES:
        assert parse(pack(message, (b"\x00\x01", b""))) == (message, (b"\x00\x01", b"")), message


def test_both_directions_of_growing() -> None:
    """A field from the future is skipped; one that an older writer did not know has its default."""
    for message in MESSAGES:
        kind = type(message)
        config = kind.__struct_config__
        assert config.frozen and config.array_like and not config.forbid_unknown_fields, kind
        fields = msgspec.to_builtins(message)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode([*fields, [1, 2]]), type=kind) == message
        required = sum(field.required for field in msgspec.structs.fields(kind))
        shorter = msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:required]), type=kind)
        assert all(
            getattr(shorter, field.name) == (getattr(message, field.name) if field.required else field.default)
            for field in msgspec.structs.fields(kind)
        ), kind
