"""Anything may arrive: messages with errors in them, plans with any values. The core answers, and it never raises."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conversation import BIAS, PLAIN, Shard, make_plan
from thinwire.errors import ProtocolError
from thinwire.packets import EncodedTensor, pack, parse, segments
from thinwire.packets.packet import HEAD, MAGIC, VERSION
from thinwire.schema import Delta, Join, Leave, Message, Plan, Push, Refused, Scalars, TableSpec, Values, Welcome
from thinwire.server.core import ServerCore


def samples() -> list[tuple[Message, tuple[EncodedTensor, ...]]]:
    shard = Shard(begin=False)
    return [
        (Join(rank=1, plan=make_plan(state=True), have=(1, 2, 3)), ()),
        (Welcome(send_values=True, step=3), ()),
        (Values(tables=(0, 1), versions=(0, 0)), (b"a", b"b")),
        (Push(step=0, tables=(0, 1), rates=(0.1,), last=True), tuple(shard.frames(1, 0).values())),
        (Push(step=0, tables=(0, 1), rates=(0.1,)), tuple(shard.pieces(1, 0).values())),
        (Delta(version=1, tables=(0,), last=True), (b"",)),
        (Delta(version=1, tables=(1, 0)), (shard.pieces(0, 0)[BIAS], b"")),
        (Leave(), ()),
        (Leave(failure="ValueError"), ()),
        (Refused(reason="why"), ()),
        (Scalars(step=0, values=(1.0, 2.0)), ()),
    ]


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_mutated_messages(data: st.DataObject) -> None:
    message, pieces = data.draw(st.sampled_from(samples()))
    head, encoded, *rest = segments(message, pieces)
    kind, header = head[3], bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(["flip", "cut", "insert", "kind"])):
            case "flip" if header:
                header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
            case "cut" if header:
                del header[data.draw(st.integers(0, len(header) - 1)) :]
            case "insert":
                at = data.draw(st.integers(0, len(header)))
                header[at:at] = data.draw(st.binary(max_size=6))
            case "kind":
                kind = data.draw(st.integers(0, 15))
    body = b"".join((header, *rest))
    try:
        mutated = HEAD.pack(MAGIC, VERSION, kind, HEAD.unpack(head)[3], len(header), HEAD.size + len(body)) + body
        read, frames = parse(mutated)
    except ProtocolError:
        return
    for shard in (Shard(begin=False), Shard()):
        if shard.core.plan is not None:
            shard.core.closed(1, "lost")
        shard.say(1, read, frames)
        for sent, its_frames in shard.told[1]:
            pack(sent, its_frames)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
OPTIONS = ["momentum", "dampening", "weight_decay", "nesterov", "maximize", "betas", "eps", "amsgrad", "alpha", "x"]


@given(
    optimizer=st.sampled_from(["SGD", "Adam", "NAdam", "RMSprop", "Adagrad"]),
    group=st.dictionaries(st.sampled_from(OPTIONS), json_values, max_size=3),
    config=st.dictionaries(st.sampled_from(["sparsity", "layout", "entropy", "zero_run", "nonfinite"]), json_values),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_with_any_values_in_it_is_served_or_refused(
    optimizer: str, group: dict[str, Any], config: dict[str, Any], shape: list[int]
) -> None:
    plan = Plan(
        workers=1,
        tables=(TableSpec(name="w", shape=(8,), up=0, down=1), TableSpec(name="other", shape=tuple(shape))),
        codecs=(PLAIN.config(), {"id": "3lc", **config}),
        optimizer=optimizer,
        groups=(group,),
    )
    core = ServerCore()
    core.received(0, Join(rank=0, plan=plan))
    if core.plan is not None and core.tables[1].values.numel() < 100:
        zeros = tuple(PLAIN.encode(table.replica) for table in core.tables)
        core.received(0, Values(tables=(0, 1), versions=(0, 0)), zeros)
        for step in range(2):
            core.received(0, Push(step=step, tables=(0, 1), rates=(0.1,)), zeros)
