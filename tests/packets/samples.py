"""One message of every kind, in the order of their numbers."""

from __future__ import annotations

from thinwire import schema as s

PLAN = s.Plan(
    workers=3,
    tables=(
        s.TableSpec(name="fc.weight", shape=(3, 4), up=1, down=2, group=1),
        s.TableSpec(name="größe", shape=(), state=True),
    ),
    codecs=({"id": "fp32"}, {"id": "3lc", "sparsity": 1.75}, {"id": "3lc", "entropy": None}),
    optimizer="AdamW",
    groups=({}, {"betas": [0.9, 0.999], "amsgrad": True}),
    reduce="sum",
    state_interval=7,
)

MESSAGES: list[s.Message] = [
    s.Join(rank=2, plan=PLAN, steps=(5, 4)),
    s.Welcome(send_values=True, step=9),
    s.Values(tables=(0, 1), versions=(3, 3)),
    s.Push(step=2**40, tables=(1, 0), rates=(0.1, 1e-30), last=True),
    s.Delta(version=4, tables=(0, 1), last=True, base=1, ranks=(0, 2), rates=(0.5,)),
    s.Leave(),
    s.Refused(reason="ein Grund — mit Umlauten: äöü"),
    s.Scalars(step=3, values=(0.5, 1.25)),
    s.SessionOpen(session="5eed", received=3, acknowledged=2),
    s.SessionAccepted(received=4, grace_s=60.0),
    s.Acknowledged(count=64),
    s.Shard(step=2**40, bucket=3),
    s.Skip(step=0, bucket=0),
    s.Abort(reason="FrameError: why"),
    s.Members(step=7, ranks=(0, 2), least=1, reason="worker 1 went away"),
    s.Offer(steps=(100, 75), held=(1, 2)),
    s.Resume(step=100, have=(100, 100)),
    s.Ahead(tables=(1, 0), anchor=True),
    s.Contribution(step=48, steps=24, examples=768.0, bases=(3, 4), tables=(0, 1), rates=(0.7, 1.0), ended=True),
    s.Merged(
        version=5,
        tables=(0, 1),
        ranks=(0, 2),
        steps=(48, 40),
        weights=(0.75, 0.25),
        momentum=(0.95, 0.5),
        examples=9e6,
        ended=True,
    ),
]
