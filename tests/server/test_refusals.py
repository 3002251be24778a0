"""Messages and plans with errors in them: the answer names the peer and the reason, and no table changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conversation import BIAS, PLAIN, STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import codec
from thinwire.errors import ProtocolError
from thinwire.frames import Frame
from thinwire.frames import pack as pack_frame
from thinwire.optimizers.runner import ALLOWED
from thinwire.packets import BatchedTensor, EncodedTensor, pack, parse, segments
from thinwire.packets.packet import HEAD, MAGIC, VERSION
from thinwire.schema import (
    MAX_VALUE,
    Delta,
    Join,
    Leave,
    Message,
    Offer,
    Plan,
    Push,
    Refused,
    Resume,
    Scalars,
    TableSpec,
    Values,
    Welcome,
)
from thinwire.server.core import ServerCore

STRANGER = 9
Said = tuple[Message, tuple[EncodedTensor, ...]]


def plain(size: int, name: str = "fp32", dtype: torch.dtype = torch.float32) -> bytes:
    return codec(name).encode(torch.ones(size, dtype=dtype))


def nan_payload() -> bytes:
    """A frame whose checksum is right and whose values are not: no sender of ours makes it."""
    return pack_frame(Frame("fp32", "fp32", (5,), payload=np.full(5, np.nan, np.float32).tobytes()))


def push(step: int, table: int, *frames: EncodedTensor, rates: tuple[float, ...] = ()) -> Said:
    return Push(step=step, tables=(table,) * len(frames), rates=rates), frames


STRANGERS: list[tuple[Callable[[Shard], Message], str]] = [
    (lambda s: Join(rank=1, plan=s.plan), "rank 1 is taken"),
    (lambda s: Join(rank=2, plan=s.plan), "rank 2; this training has ranks 0 … 1"),
    (lambda s: Join(rank=-1, plan=s.plan), "rank -1; this training has ranks 0 … 1"),
    (lambda s: Join(rank=0, plan=msgspec.structs.replace(s.plan, workers=3)), "this worker expects 3 workers"),
    (lambda s: Push(step=0, tables=()), "Push came before Join"),
    (lambda s: Leave(), "Leave came before Join"),
    (lambda s: Welcome(send_values=True), "Welcome came before Join"),
]


def test_strangers_are_turned_away_and_the_training_goes_on() -> None:
    shard = Shard()
    shard.step(0)
    before = shard.bits()
    for make, text in STRANGERS:
        shard.say(STRANGER, make(shard))
        assert shard.ended.keys() == {STRANGER} and text in str(shard.ended.pop(STRANGER))
        assert shard.core.closed(STRANGER, None) == []
    assert shard.core.failed is None and shard.bits() == before
    shard.step(1)
    assert shard.core.step == 2


BUFFER = (0.1,)
WORKERS: list[tuple[int, Callable[[Shard], Said], str]] = [
    (1, lambda s: (Join(rank=1, plan=s.plan), ()), "a second Join in one session"),
    (1, lambda s: (Resume(step=1), ()), "Resume came without an offer"),
    (1, lambda s: (Delta(version=1, tables=()), ()), "a worker does not send Delta"),
    (1, lambda s: (Values(tables=(0, 1, 2), versions=(0, 0, 0)), ()), "only worker 0 sends initial values"),
    (0, lambda s: (Values(tables=(0, 1, 2), versions=(0, 0, 0)), ()), "only once"),
    (1, lambda s: push(2, WEIGHT, s.frames(1, 2)[WEIGHT]), "step 2 came for 'weight', which is at step 1"),
    (1, lambda s: push(0, BIAS, s.frames(1, 0)[BIAS]), "step 0 came for 'bias', which is at step 1"),
    (1, lambda s: (Push(step=2**64 - 1, tables=(BIAS,), last=True), (plain(5),)), f"a push of step {2**64 - 1}"),
    (1, lambda s: push(1, BIAS, *[s.frames(1, 1)[BIAS]] * 2), "'bias' got two gradients for step 1"),
    (1, lambda s: push(1, 3, b""), "table 3; there are 3"),
    (1, lambda s: push(1, -1, b""), "table -1; there are 3"),
    (1, lambda s: (Push(step=1, tables=(0, 1)), (b"",)), "2 tables and 1 frames"),
    (1, lambda s: push(1, BIAS, plain(6)), "bias: a frame of shape (6,)"),
    (1, lambda s: push(1, WEIGHT, BatchedTensor.of(np.ones(40, np.float32), "w")), "weight: 40 values came in a"),
    (1, lambda s: push(1, BIAS, BatchedTensor.of(np.ones(4, np.float32), "b")), "bias: 4 values came in a fp32 batch"),
    (1, lambda s: push(1, BIAS, plain(5, "int8")), "bias: codec 'int8' came, 'fp32' was agreed on"),
    (1, lambda s: push(1, BIAS, s.frames(1, 1)[BIAS][:-1] + b"\xff"), "bias: checksum"),
    (1, lambda s: push(1, WEIGHT, s.frames(1, 1)[WEIGHT][:9]), "weight: 9 bytes are too few"),
    (1, lambda s: push(1, WEIGHT, b"x" * 40), "weight: a frame begins"),
    (1, lambda s: push(1, STATISTIC, plain(3)), "buffer 'statistic' comes from worker 0 alone"),
    (0, lambda s: push(1, STATISTIC, plain(3, "int8"), rates=BUFFER), "statistic: codec 'int8' came"),
    (0, lambda s: push(1, STATISTIC, plain(4), rates=BUFFER), "statistic: a frame of shape (4,)"),
    (0, lambda s: push(2**63, STATISTIC, plain(3), rates=BUFFER), f"buffer 'statistic' of step {2**63}"),
    (
        0,
        lambda s: push(1, STATISTIC, plain(3, dtype=torch.float64), rates=BUFFER),
        "statistic: codec 'fp32' came, in fp64",
    ),
    (0, lambda s: (Push(step=1, tables=()), ()), "0 learning rates came for 1 groups"),
]


def test_a_worker_that_breaks_the_conversation_ends_it_for_all() -> None:
    for peer, make, text in WORKERS:
        shard = Shard(make_plan(state=True))
        shard.step(0)
        before = shard.bits()
        shard.say(peer, *make(shard))
        assert shard.ended == {0: shard.core.failed, 1: shard.core.failed}, text
        assert str(shard.core.failed).startswith(f"worker {peer}: ") and text in str(shard.core.failed)
        assert shard.bits() == before
        shard.say(0, Leave())
        assert shard.ended[0] == shard.core.failed, "and that is the answer to whatever comes later"
        assert shard.core.closed(1, None) == []


def test_a_gradient_that_comes_twice_or_before_the_initial_values_is_refused() -> None:
    shard = Shard()
    for _ in range(2):
        shard.push(1, 0, {BIAS: shard.frames(1, 0)[BIAS]})
    assert shard.core.failed == "worker 1: 'bias' got two gradients for step 0"
    shard = Shard(begin=False)
    for rank in (0, 1):
        shard.join(rank)
    shard.push(1, 0, shard.frames(1, 0))
    assert shard.ended == dict.fromkeys((0, 1), "worker 1: a gradient came before the initial values")
    assert shard.core.failed is None and shard.core.plan is None, "it waits for another training"


@pytest.mark.parametrize("messages", [[()], [(1,)], [(1, 0)], [(0, 1, 1)], [(0,), (1, 1)], [(0, 1), (1,)]])
def test_initial_values_are_complete_and_in_order(messages: list[tuple[int, ...]]) -> None:
    shard = Shard(make_plan(1), begin=False)
    shard.join(0)
    for tables in messages:
        frames = tuple(PLAIN.encode(gradient(0, 0, table)) for table in tables)
        shard.say(0, Values(tables=tables, versions=(0,) * len(tables)), frames)
    assert ("only once" if messages[0] == (0, 1) else f"came of tables {messages[-1]}") in str(shard.ended[0])


def test_initial_values_have_the_tables_shape_and_are_finite_float32_frames() -> None:
    """Kernels write 4 bytes for each value of what the server keeps of them."""
    wrong = [(plain(5, "int8"), "codec 'int8'"), (plain(4), "shape (4,) came"), (nan_payload(), "NaN or Inf")]
    wrong += [(plain(5, dtype=dtype), "whole values") for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    for frame, text in wrong:
        shard = Shard(make_plan(1), begin=False)
        shard.join(0)
        values = Values(tables=(0, 1), versions=(0, 0))
        shard.say(0, values, (PLAIN.encode(gradient(0, 0, WEIGHT)), frame))
        assert "worker 0: bias: " in str(shard.ended[0]) and text in str(shard.ended[0])
        assert not shard.core.tables


def test_the_worker_whose_gradient_is_damaged_is_blamed() -> None:
    """A gradient waits for its turn before it is decoded: then another worker's message is at hand."""
    for guilty in range(3):
        shard = Shard(make_plan(3))
        before = shard.bits()
        for rank in (2, 1, 0):
            shard.push(rank, 0, {BIAS: nan_payload() if rank == guilty else PLAIN.encode(gradient(rank, 0, BIAS))})
        assert shard.core.failed == f"the gradient of worker {guilty}: bias: the payload holds NaN or Inf"
        assert shard.bits() == before


def test_where_deaths_are_allowed_a_hostile_worker_alone_is_refused() -> None:
    """The first digest of a step is what all must equal, and scales that all have said are used."""
    said: list[Callable[[Shard], Said]] = [
        lambda s: (Push(step=1, tables=(), digest="lie"), ()),
        lambda s: (Scalars(step=-1, values=(0.0, 0.0)), ()),
        lambda s: push(5, BIAS, s.frames(0, 5)[BIAS], rates=(0.1,)),
        *[lambda s, r=rate: push(0, BIAS, plain(5), rates=(r,)) for rate in (1e300, np.nan, -np.inf)],
        lambda s: (Push(step=0, tables=(), rates=(0.1,), options=((0, {"momentum": 1e300}),)), ()),
        lambda s: (Push(step=0, tables=(WEIGHT, BIAS), rates=()), tuple(s.frames(0, 0).values())),
    ]
    texts = ["of step 1", "of step -1", "of step 5", *["a learning rate is"] * 3, "momentum=1e+300", "0 learning rates"]
    for make, text in zip(said, texts, strict=True):
        shard = Shard(make_plan(3), min_workers=1)
        shard.say(0, *make(shard))
        assert shard.ended.keys() == {0} and text in str(shard.ended[0]), shard.ended
        for step in range(2):
            for rank in (1, 2):
                shard.say(rank, Push(step=step, tables=(), rates=(0.1,), digest=f"true {step}"))
                shard.push(rank, step, shard.frames(rank, step))
        assert shard.ended.keys() == {0} and shard.core.step == 2
    shard = Shard(make_plan(consistency="asp"), min_workers=1)
    shard.say(0, *push(2**64 - 1, BIAS, plain(5), rates=(0.1,)))
    assert shard.ended.keys() == {0} and f"a push of step {2**64 - 1}" in str(shard.ended[0])


def test_where_deaths_are_allowed_a_push_that_makes_all_overflow_is_refused_alone() -> None:
    huge = np.full(5, 3e38, np.float32)
    for up, frame, bias in (
        (PLAIN, PLAIN.encode(huge), BIAS),
        (PLAIN, BatchedTensor.of(huge, "bias"), BIAS),
        (codec("3lc"), codec("3lc").encode(np.full((8, 5), 1e38, np.float32)), WEIGHT),
        (codec("topk"), codec("topk").encode(np.full((8, 5), -1e38, np.float32)), WEIGHT),
    ):
        shard = Shard(make_plan(3, up=up), min_workers=1)
        shard.push(1, 0, {bias: frame})
        assert shard.ended.keys() == {1} and "holds values up to 1e+38" in str(shard.ended[1]).replace("3e+38", "1e+38")
        assert f"the push of {shard.plan.tables[bias].name!r}" in str(shard.ended[1])
        for rank in (0, 2):
            shard.push(rank, 0, shard.frames(rank, 0))
        assert shard.core.step == 1 and shard.ended.keys() == {1}
        assert all(np.abs(table.values.numpy()).max() < 100 for table in shard.core.tables)


# ---- updates that fail


def test_divergence_is_told_to_all() -> None:
    shard = Shard(make_plan(3))
    shard.step(0)
    shard.step(1, rate=3e38)
    assert str(shard.core.failed).startswith("the training has diverged: update 2 of 'weight' is not finite")
    assert "Use a smaller learning rate" in str(shard.core.failed)
    assert shard.ended == dict.fromkeys((0, 1, 2), shard.core.failed)
    shard = Shard(make_plan(up=PLAIN, down=PLAIN))
    for rank in (0, 1):  # whose sum overflows
        shard.push(rank, 0, {BIAS: PLAIN.encode(np.full(5, 3e38, np.float32))})
    assert "update 1 of 'bias' is not finite" in str(shard.core.failed)


@pytest.mark.parametrize("optimizer", ALLOWED)
def test_no_push_that_is_let_in_makes_a_later_update_not_finite(optimizer: str) -> None:
    """Squares of larger gradients overflow the optimizer's sums, and its values stay where they are from then on."""
    shard = Shard(make_plan(3, up=PLAIN, optimizer=optimizer, groups=({},)), min_workers=1)
    for step in range(20):
        for rank in range(3):
            size = MAX_VALUE if rank == 1 else 1.0
            values = np.full(5, (-1) ** step * size, np.float32)
            shard.push(rank, step, {**shard.frames(rank, step), BIAS: BatchedTensor.of(values, "bias")})
    assert not shard.ended
    kept = shard.core.state_dict()["steps"]["updater"]["state"].get(BIAS, {}).values()
    assert all(torch.isfinite(torch.as_tensor(each)).all() for each in kept)
    shard.push(1, 20, {BIAS: BatchedTensor.of(np.full(5, 2**0.5 * MAX_VALUE, np.float32), "bias")})
    assert shard.ended.keys() == {1} and "the push of 'bias' holds values up to" in str(shard.ended[1])


def test_a_push_that_ends_a_training_names_its_worker() -> None:
    three = codec("3lc").encode(np.full((8, 5), 1e38, np.float32))
    for table, frame in ((WEIGHT, three), (BIAS, BatchedTensor.of(np.full(5, 3e38, np.float32), "bias"))):
        shard = Shard(make_plan(3, up=codec("3lc")))
        shard.push(1, 0, {table: frame})
        assert str(shard.core.failed).startswith(
            f"worker 1: the push of {shard.plan.tables[table].name!r} holds values"
        )


def samples() -> list[tuple[Message, tuple[EncodedTensor, ...]]]:
    shard = Shard(begin=False)
    return [
        (Join(rank=1, plan=make_plan(state=True), steps=(3, 2, 1)), ()),
        (Offer(steps=(3, 2), held=(1, 0)), ()),
        (Resume(step=3, have=(1, 2, 3)), ()),
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
    core.received(0, Resume(step=0))
    if core.plan is not None and core.tables[1].values.numel() < 100:
        zeros = tuple(PLAIN.encode(table.downlink.snapshot(0)) for table in core.tables)
        core.received(0, Values(tables=(0, 1), versions=(0, 0)), zeros)
        for step in range(2):
            core.received(0, Push(step=step, tables=(0, 1), rates=(0.1,)), zeros)
