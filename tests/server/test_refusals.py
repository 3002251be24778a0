"""Each way a peer can break the conversation has its own text; and nobody's tables change by it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from tests.server.conversation import BIAS, PLAIN, STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import codec
from thinwire.errors import ProtocolError
from thinwire.frames import Frame, pack
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.schema import (
    Delta,
    Join,
    Leave,
    Message,
    Push,
    Values,
    Welcome,
)

STRANGER = 9


def nan_payload() -> bytes:
    """A frame whose checksum is right and whose values are not: no sender of ours makes it."""
    values = np.full(5, np.nan, np.float32)
    return pack(Frame("fp32", "fp32", (5,), payload=values.tobytes()))


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


# ---- strangers: turned away, and the training goes on

STRANGERS: dict[str, tuple[Callable[[Shard], Message], str]] = {
    "a taken rank": (lambda s: Join(rank=1, plan=s.plan), r"rank 1 is taken"),
    "no such rank": (lambda s: Join(rank=2, plan=s.plan), r"rank 2; this training has ranks 0 … 1"),
    "a negative rank": (lambda s: Join(rank=-1, plan=s.plan), r"rank -1; this training has ranks 0 … 1"),
    "another number of workers": (
        lambda s: Join(rank=0, plan=msgspec.structs.replace(s.plan, workers=3)),
        r"this worker expects 3 workers, the others 2",
    ),
    "push before Join": (lambda s: Push(step=0, tables=()), r"Push came before Join"),
    "leave before Join": (lambda s: Leave(), r"Leave came before Join"),
    "what servers say": (lambda s: Welcome(send_values=True), r"Welcome came before Join"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger_is_turned_away_and_the_training_goes_on(case: str) -> None:
    make, text = STRANGERS[case]
    shard = Shard()
    shard.step(0)
    before = shard.bits()
    shard.say(STRANGER, make(shard))
    assert shard.ended.keys() == {STRANGER}
    with pytest.raises(ProtocolError, match=text):
        raise ProtocolError(str(shard.ended[STRANGER]))
    assert shard.core.closed(STRANGER, None) == []
    assert shard.core.failed is None and shard.bits() == before
    shard.step(1)
    assert shard.core.step == 2


# ---- workers: the training is over for all, with the reason

WORKERS: dict[str, tuple[int, Callable[[Shard], tuple[Message, tuple[EncodedTensor, ...]]], str]] = {
    "a second Join": (1, lambda s: (Join(rank=1, plan=s.plan), ()), r"worker 1: a second Join in one session"),
    "what servers say": (1, lambda s: (Delta(version=1, tables=()), ()), r"worker 1: a worker does not send Delta"),
    "values from another": (
        1,
        lambda s: (Values(tables=(0, 1, 2), versions=(0, 0, 0)), ()),
        r"worker 1: only worker 0 sends initial values, and only once",
    ),
    "values twice": (
        0,
        lambda s: (Values(tables=(0, 1, 2), versions=(0, 0, 0)), ()),
        r"worker 0: only worker 0 sends initial values, and only once",
    ),
    "a step ahead": (
        1,
        lambda s: (Push(step=2, tables=(WEIGHT,)), (s.frames(1, 2)[WEIGHT],)),
        r"worker 1: a gradient of step 2 came for 'weight', which is at step 1",
    ),
    "a step behind": (
        1,
        lambda s: (Push(step=0, tables=(BIAS,)), (s.frames(1, 0)[BIAS],)),
        r"worker 1: a gradient of step 0 came for 'bias', which is at step 1",
    ),
    "two gradients in one message": (
        1,
        lambda s: (Push(step=1, tables=(BIAS, BIAS)), (s.frames(1, 1)[BIAS],) * 2),
        r"worker 1: 'bias' got two gradients for step 1",
    ),
    "an unknown table": (1, lambda s: (Push(step=1, tables=(3,)), (b"",)), r"worker 1: table 3; there are 3"),
    "a negative table": (1, lambda s: (Push(step=1, tables=(-1,)), (b"",)), r"worker 1: table -1; there are 3"),
    "too few frames": (1, lambda s: (Push(step=1, tables=(0, 1)), (b"",)), r"2 tables and 1 frames in one push"),
    "another shape": (
        1,
        lambda s: (Push(step=1, tables=(BIAS,)), (PLAIN.encode(np.zeros(6, np.float32)),)),
        r"worker 1: bias: a frame of shape \(6,\) came, the table is \(5,\)",
    ),
    "a batch for a compressed table": (
        1,
        lambda s: (Push(step=1, tables=(WEIGHT,)), (BatchedTensor.of(gradient(1, 1, WEIGHT).reshape(-1), "w"),)),
        r"worker 1: weight: 40 values came in a fp32 batch; the table has shape \(8, 5\), and '3lc' was agreed on",
    ),
    "a batch with too few values": (
        1,
        lambda s: (Push(step=1, tables=(BIAS,)), (BatchedTensor.of(gradient(1, 1, BIAS)[:4], "b"),)),
        r"worker 1: bias: 4 values came in a fp32 batch; the table has shape \(5,\)",
    ),
    "another codec": (
        1,
        lambda s: (Push(step=1, tables=(BIAS,)), (codec("int8").encode(np.zeros(5, np.float32)),)),
        r"worker 1: bias: codec 'int8' came, 'fp32' was agreed on",
    ),
    "a flipped bit": (
        1,
        lambda s: (Push(step=1, tables=(BIAS,)), (flipped(s.frames(1, 1)[BIAS]),)),
        r"worker 1: bias: checksum .* the frame was damaged on its way",
    ),
    "a cut frame": (
        1,
        lambda s: (Push(step=1, tables=(WEIGHT,)), (s.frames(1, 1)[WEIGHT][:9],)),
        r"worker 1: weight: 9 bytes are too few for a frame",
    ),
    "no frame at all": (
        1,
        lambda s: (Push(step=1, tables=(WEIGHT,)), (b"x" * 40,)),
        r"worker 1: weight: a frame begins",
    ),
    "a buffer from another": (
        1,
        lambda s: (Push(step=1, tables=(STATISTIC,)), (PLAIN.encode(gradient(1, 1, STATISTIC)),)),
        r"worker 1: buffer 'statistic' comes from worker 0 alone",
    ),
    "a compressed buffer": (
        0,
        lambda s: (Push(step=1, tables=(STATISTIC,), rates=(0.1,)), (codec("int8").encode(np.ones(3, np.float32)),)),
        r"worker 0: statistic: codec 'int8' came, 'fp32' was agreed on",
    ),
    "a buffer of another shape": (
        0,
        lambda s: (Push(step=1, tables=(STATISTIC,), rates=(0.1,)), (PLAIN.encode(np.ones(4, np.float32)),)),
        r"worker 0: statistic: a frame of shape \(4,\) came, the table is \(3,\)",
    ),
    "a buffer of the far future": (
        0,
        lambda s: (Push(step=2**63, tables=(STATISTIC,), rates=(0.1,)), (PLAIN.encode(np.ones(3, np.float32)),)),
        rf"worker 0: buffer 'statistic' of step {2**63} came between 0 and 1",
    ),
    "too few rates": (0, lambda s: (Push(step=1, tables=()), ()), r"worker 0: 0 learning rates came for 1 groups"),
}


@pytest.mark.parametrize("case", WORKERS)
def test_a_worker_that_breaks_the_conversation_ends_it_for_all(case: str) -> None:
    peer, make, text = WORKERS[case]
    shard = Shard(make_plan(state=True))
    shard.step(0)
    before = shard.bits()
    shard.say(peer, *make(shard))
    assert shard.ended.keys() == {0, 1}, "the others are told as well: no step can complete without this worker"
    assert shard.ended[0] == shard.ended[1] == shard.core.failed
    with pytest.raises(ProtocolError, match=text):
        raise ProtocolError(str(shard.core.failed))
    assert shard.bits() == before
    shard.say(0, Leave())
    assert shard.ended[0] == shard.core.failed, "and that is the answer to whatever comes later"
    assert shard.core.closed(1, None) == []


def test_two_gradients_in_two_messages() -> None:
    shard = Shard()
    shard.push(1, 0, {BIAS: shard.frames(1, 0)[BIAS]})
    shard.push(1, 0, {BIAS: shard.frames(1, 0)[BIAS]})
    assert shard.core.failed == "worker 1: 'bias' got two gradients for step 0"


def test_a_gradient_before_the_initial_values() -> None:
    shard = Shard(begin=False)
    shard.join(0)
    shard.join(1)
    shard.push(1, 0, shard.frames(1, 0))
    assert shard.core.failed == "worker 1: a gradient came before the initial values"
    assert shard.ended.keys() == {0, 1}


@pytest.mark.parametrize("messages", [[()], [(1,)], [(1, 0)], [(0, 1, 1)], [(0,), (1, 1)], [(0, 1), (1,)]])
def test_initial_values_are_complete_and_in_order(messages: list[tuple[int, ...]]) -> None:
    shard = Shard(begin=False)
    shard.join(0)
    for tables in messages:
        frames = tuple(PLAIN.encode(gradient(0, 0, table)) for table in tables)
        shard.say(0, Values(tables=tables, versions=(0,) * len(tables)), frames)
    assert str(shard.core.failed).startswith(
        "worker 0: only worker 0 sends initial values, and only once"
        if messages[0] == (0, 1)
        else f"worker 0: initial values came of tables {messages[-1]} in {len(messages[-1])} frames, after "
    )


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (codec("int8").encode(np.ones(5, np.float32)), "codec 'int8' came, 'fp32' was agreed on"),
        (PLAIN.encode(np.ones((5, 1), np.float32)), r"shape \(5, 1\) came"),
        (nan_payload(), "NaN or Inf"),
    ],
)
def test_initial_values_that_are_none(frame: bytes, text: str) -> None:
    shard = Shard(begin=False)
    shard.join(0)
    frames = (PLAIN.encode(gradient(0, 0, WEIGHT)), frame)
    shard.say(0, Values(tables=(0, 1), versions=(0, 0)), frames)
    with pytest.raises(ProtocolError, match=f"worker 0: bias: .*{text}"):
        raise ProtocolError(str(shard.core.failed))
    assert not shard.core.tables[BIAS].replica.any()


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_the_worker_that_sent_the_damage_is_blamed(guilty: int) -> None:
    """A gradient waits for its turn before it is decoded: then another worker's message is at hand."""
    shard = Shard(make_plan(3))
    before = shard.bits()
    for rank in (2, 1, 0):
        frame = nan_payload() if rank == guilty else PLAIN.encode(gradient(rank, 0, BIAS))
        shard.push(rank, 0, {BIAS: frame})
    assert shard.core.failed == f"bias: the gradient of worker {guilty}: the payload holds NaN or Inf"
    assert shard.bits() == before


# ---- divergence


def test_divergence_is_told_to_all() -> None:
    shard = Shard(make_plan(3))
    shard.step(0)
    shard.step(1, rate=3e38)
    assert shard.core.failed is not None
    assert shard.core.failed.startswith("the training has diverged: after update 2: ")
    assert "Use a smaller learning rate" in shard.core.failed
    assert shard.ended == dict.fromkeys((0, 1, 2), shard.core.failed)


def test_gradients_whose_sum_overflows_are_divergence_too() -> None:
    shard = Shard(make_plan(up=PLAIN, down=PLAIN))
    for rank in (0, 1):
        shard.push(rank, 0, {BIAS: PLAIN.encode(np.full(5, 3e38, np.float32))})
    assert "diverged" in str(shard.core.failed) and "bias" in str(shard.core.failed)
