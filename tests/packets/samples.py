"""One message of every kind, in the order of their numbers."""

from __future__ import annotations

from thinwire.schema import (
    Abort,
    Acknowledged,
    Ahead,
    Delta,
    Echo,
    Join,
    Leave,
    Members,
    Message,
    Offer,
    Plan,
    Push,
    Refused,
    Resume,
    Saved,
    Scalars,
    SessionAccepted,
    SessionOpen,
    Shard,
    Skip,
    TableSpec,
    TunedDelta,
    TunedPush,
    Values,
    Welcome,
)

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
    Push(step=2**40, tables=(1, 0), rates=(0.1, 1e-30), last=True),
    Delta(version=4, tables=(0, 1), last=True, base=1, ranks=(0, 2), rates=(0.5,)),
    Leave(),
    Refused(reason="ein Grund — mit Umlauten: äöü"),
    Scalars(step=3, values=(0.5, 1.25)),
    SessionOpen(session="5eed", received=3, acknowledged=2),
    SessionAccepted(received=4, grace_s=60.0),
    Acknowledged(count=64),
    Shard(step=2**40, bucket=3),
    Skip(step=0, bucket=0),
    Abort(reason="FrameError: why"),
    Members(step=7, ranks=(0, 2), least=1, reason="worker 1 went away"),
    Offer(steps=(100, 75)),
    Resume(step=100, have=(100, 100)),
    Saved(steps=(100, 75), safe=75),
    TunedPush(step=2**40, tables=(1, 0), rates=(0.1,), replaced=2, codec=5, sparsity=1.75, note=b"\x03\x00"),
    TunedDelta(version=4, tables=(0, 1), notes=((0, b"\x03\x00"), (2, b"\x04"))),
    Echo(number=3),
    Ahead(tables=(1, 0), anchor=True),
]
