"""Messages: the numbers of docs/wire-format.md, what travels, and both directions of growing."""

from __future__ import annotations

import contextlib
import tracemalloc
import typing

import msgspec

from tests.packets.samples import MESSAGES
from tests.wire_format import table
from thinwire.packets import pack, parse
from thinwire.schema import KINDS, Join, Message


def test_kinds_are_documented_and_numbers_stay() -> None:
    documented = {name: int(kind) for name, kind, _ in table("Messages")}
    assert documented == {message.__name__: number for number, message in KINDS.items()}
    assert list(map(type, MESSAGES)) == list(KINDS.values())
    assert set(KINDS.values()) == set(typing.get_args(Message))


def test_every_message_survives_the_wire() -> None:
    for message in MESSAGES:
        assert parse(pack(message, (b"\x00\x01", b""))) == (message, (b"\x00\x01", b"")), message


def test_old_readers_skip_new_fields_and_new_readers_take_defaults() -> None:
    """A field from the future is skipped; one that an older writer did not know has its default."""
    for message in MESSAGES:
        kind = type(message)
        config = kind.__struct_config__
        assert config.frozen and config.array_like and not config.forbid_unknown_fields, kind
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode([*fields, [1, 2]]), type=kind) == message
        required = sum(field.required for field in msgspec.structs.fields(kind))
        shorter = msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:required]), type=kind)
        assert all(
            getattr(shorter, field.name) == (getattr(message, field.name) if field.required else field.default)
            for field in msgspec.structs.fields(kind)
        ), kind


def test_a_join_takes_at_most_ten_times_its_bytes() -> None:
    """A caller with a token cannot make a server spend 80 bytes on each byte that it sends."""
    n = 200_000
    plan = {"workers": 2, "tables": [], "codecs": [], "optimizer": "SGD", "groups": []}
    shape = {"name": "", "shape": [1] * n}
    for name, join in {
        "tables": [0, {**plan, "tables": [{"name": "", "shape": []}] * (n // 15)}],
        "too many tables": [0, {**plan, "tables": [{}] * n}],
        "dimensions": [0, {**plan, "tables": [shape]}],
        "codecs": [0, {**plan, "codecs": [{}] * n}],
        "an option of lists": [0, {**plan, "codecs": [{"id": [[]] * n}]}],
        "options": [0, {**plan, "groups": [{str(i): 0 for i in range(n // 7)}]}],
        "groups": [0, {**plan, "groups": [{}] * n}],
        "versions": [0, plan, [1] * n],
        "steps": [0, plan, [], "", [1] * n],
    }.items():
        packed = msgspec.msgpack.encode(join)
        tracemalloc.start()
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.msgpack.decode(packed, type=Join)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 10 * len(packed), f"{name}: {peak / len(packed):.0f} bytes for each"
