"""Each way a peer can break the conversation has its own text; and nobody's tables change by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conversation import BIAS, PLAIN, STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import codec
from thinwire.codecs.bundle import Piece, member
from thinwire.errors import ProtocolError
from thinwire.frames import Frame, pack
from thinwire.runtime.messages import from_packet, to_packet
from thinwire.schema import (
    PROTOCOL,
    Delta,
    Join,
    Leave,
    Message,
    Plan,
    Push,
    Refused,
    Scalars,
    TableSpec,
    Values,
    Welcome,
)
from thinwire.server import steps as steps_module
from thinwire.server.core import ServerCore
from thinwire.transports.base import Packet

STRANGER = 9


def changed(plan: Plan, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


def nan_payload() -> bytes:
    """A frame whose checksum is right and whose values are not: no sender of ours makes it."""
    values = np.full(5, np.nan, np.float32)
    return pack(Frame("fp32", "fp32", (5,), payload=values.tobytes()))


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


# ---- strangers: turned away, and the training goes on

STRANGERS: dict[str, tuple[Callable[[Shard], Message], str]] = {
    "another protocol": (
        lambda s: Join(rank=1, plan=s.plan, protocol=PROTOCOL + 1),
        rf"the worker speaks protocol {PROTOCOL + 1}, this server {PROTOCOL}",
    ),
    "a taken rank": (lambda s: Join(rank=1, plan=s.plan), r"rank 1 is taken"),
    "no such rank": (lambda s: Join(rank=2, plan=s.plan), r"rank 2; this training has ranks 0 … 1"),
    "a negative rank": (lambda s: Join(rank=-1, plan=s.plan), r"rank -1; this training has ranks 0 … 1"),
    "another number of workers": (
        lambda s: Join(rank=0, plan=changed(s.plan, workers=3)),
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

WORKERS: dict[str, tuple[int, Callable[[Shard], tuple[Message, tuple[Piece, ...]]], str]] = {
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
    "a bundle for a compressed table": (
        1,
        lambda s: (Push(step=1, tables=(WEIGHT,)), (member(gradient(1, 1, WEIGHT).reshape(-1), "w"),)),
        r"worker 1: weight: 40 values came in a bundle; the table has shape \(8, 5\), and '3lc' was agreed on",
    ),
    "a bundle with too few values": (
        1,
        lambda s: (Push(step=1, tables=(BIAS,)), (member(gradient(1, 1, BIAS)[:4], "b"),)),
        r"worker 1: bias: 4 values came in a bundle; the table has shape \(5,\)",
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


@pytest.mark.parametrize("tables", [(0,), (1, 0), (0, 1, 1)])
def test_initial_values_are_complete_and_in_order(tables: tuple[int, ...]) -> None:
    shard = Shard(begin=False)
    shard.join(0)
    frames = tuple(PLAIN.encode(gradient(0, 0, table)) for table in tables)
    shard.say(0, Values(tables=tables, versions=(0,) * len(tables)), frames)
    assert shard.core.failed == f"worker 0: initial values came for {len(tables)} of 2 tables"


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


# ---- plans

PLANS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "an optimizer that is not on the list": (
        lambda p: changed(p, optimizer="LBFGS"),
        r"optimizer 'LBFGS' is not on the server's list: SGD, Adam",
    ),
    "something else that torch has": (lambda p: changed(p, optimizer="Optimizer"), r"not on the server's list"),
    "an unknown option": (lambda p: changed(p, groups=({"betas": [0.9, 0.9]},)), r"SGD does not take \['betas'\]; it"),
    "an option that is ours alone": (lambda p: changed(p, groups=({"foreach": True},)), r"SGD does not take"),
    "an option out of range": (lambda p: changed(p, groups=({"momentum": -1.0},)), r"Invalid momentum value"),
    "an option of another type": (
        lambda p: changed(p, groups=({"momentum": 0.5, "dampening": "a"},)),
        r"SGD does not take these",
    ),
    "too few betas": (lambda p: changed(p, optimizer="Adam", groups=({"betas": [0.9]},)), r"Adam does not take these"),
    "no codec": (lambda p: changed(p, codecs=()), r"weight: the plan has no codec 2"),
    "a codec that is not there": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(2,), up=-1),)),
        r"w: the plan has no codec",
    ),
    "an unknown codec": (lambda p: changed(p, codecs=({"id": "4lc"},) * 3), r"unknown codec '4lc'"),
    "an unknown codec option": (
        lambda p: changed(p, codecs=({"id": "fp32", "x": 1},) * 3),
        r"unknown option 'x'",
    ),
    "a codec without an id": (lambda p: changed(p, codecs=({},) * 3), r"a codec's configuration has an id"),
    "an id that is no text": (lambda p: changed(p, codecs=({"id": [1]},) * 3), r"a codec's configuration has an id"),
    "a codec option of another type": (
        lambda p: changed(p, codecs=({"id": "3lc", "sparsity": [1.5]},) * 3),
        r"sparsity=\[1.5\]",
    ),
    "no group": (lambda p: changed(p, groups=()), r"weight: the plan has no parameter group 0"),
    "no workers": (lambda p: changed(p, workers=0), r"a plan for 0 workers; 1 … 4096 are possible"),
    "a crowd": (lambda p: changed(p, workers=5000), r"a plan for 5000 workers"),
    "one name twice": (lambda p: changed(p, tables=(p.tables[0], p.tables[0])), r"two tables have one name"),
    "a negative dimension": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(-4, -4)),)),
        r"w: shape \(-4, -4\) has a negative dimension",
    ),
    "more than any memory": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(2**40,)),)),
        r"w: with it the tables have more than 68719476736 values together",
    ),
    "overflow behind a zero": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(0, 2**62, 2**62)),)),
        r"w: with it the tables have more than",
    ),
    "too many dimensions": (
        lambda p: changed(p, tables=(TableSpec(name="w", shape=(1,) * 100),)),
        r"w: 100 dimensions; at most 32 are possible",
    ),
    "buffers that never travel": (lambda p: changed(p, state_interval=0), r"buffers that travel every 0 steps"),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_be_served(case: str) -> None:
    make, text = PLANS[case]
    shard = Shard(begin=False)
    shard.say(STRANGER, Join(rank=0, plan=make(make_plan())))
    with pytest.raises(ProtocolError, match=text):
        raise ProtocolError(str(shard.ended[STRANGER]))
    assert not shard.core.tables, "and the next worker may bring a better one"
    shard.ended.clear()
    shard.join(0)
    assert (shard.core.plan, shard.ended) == (shard.plan, {})


def test_tables_that_do_not_fit_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("Unable to allocate 64.0 GiB")

    monkeypatch.setattr(steps_module, "Table", no_memory)
    shard = Shard(begin=False)
    shard.join(0)
    assert shard.ended[0] == "the tables do not fit the server's memory: Unable to allocate 64.0 GiB"


def test_a_refused_first_worker_leaves_no_plan_behind() -> None:
    shard = Shard(begin=False)
    shard.say(STRANGER, Join(rank=4, plan=make_plan(4)))
    assert "rank 4; this training has ranks 0 … 3" in str(shard.ended[STRANGER])
    shard.join(0)
    assert shard.ended.keys() == {STRANGER}


DIFFERENCES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a tensor more": (
        lambda p: changed(p, tables=(*p.tables, TableSpec(name="extra", shape=(1,)))),
        r"this worker's model has a tensor 'extra' that the others' do not have",
    ),
    "a tensor less": (lambda p: changed(p, tables=p.tables[:1]), r"this worker's model lacks the tensor 'bias'"),
    "a shape": (
        lambda p: changed(p, tables=(p.tables[0], TableSpec(name="bias", shape=(7,)))),
        r"tensor 'bias' has shape \(7,\) in this worker's model and \(5,\) in the others'",
    ),
    "a codec of one tensor": (
        lambda p: changed(p, tables=(p.tables[0], TableSpec(name="bias", shape=(5,), up=1))),
        r"tensor 'bias': this worker plans .*up=1.*, the others .*up=0",
    ),
    "the order": (lambda p: changed(p, tables=p.tables[::-1]), r"plan differs"),
    "a codec": (
        lambda p: changed(p, codecs=(*p.codecs[:2], codec("3lc", sparsity=1.25).config())),
        r"codecs: this worker plans .*1\.25.*, the others .*1\.5",
    ),
    "the optimizer": (lambda p: changed(p, optimizer="Adam"), r"optimizer: this worker plans Adam, the others SGD"),
    "its options": (lambda p: changed(p, groups=({"momentum": 0.75},)), r"groups: .*0\.75.*, the others .*0\.5"),
    "the reduction": (lambda p: changed(p, reduce="sum"), r"reduce: this worker plans sum, the others mean"),
    "the interval": (lambda p: changed(p, state_interval=7), r"state_interval: this worker plans 7, the others 50"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_plan_that_differs_is_refused_by_name(case: str) -> None:
    make, text = DIFFERENCES[case]
    shard = Shard(begin=False)
    shard.join(0)
    shard.say(1, Join(rank=1, plan=make(shard.plan)))
    assert shard.ended.keys() == {1}
    with pytest.raises(ProtocolError, match=text):
        raise ProtocolError(str(shard.ended[1]))


def test_an_answer_is_short_however_long_the_question() -> None:
    shard = Shard(begin=False)
    shard.join(0)
    shard.say(1, Join(rank=1, plan=changed(shard.plan, tables=(TableSpec(name="x" * 10**6, shape=(1,)),))))
    assert len(str(shard.ended[1])) < 3000


# ---- divergence


@pytest.mark.parametrize("rate", [float("nan"), 3e38])
def test_divergence_is_told_to_all(rate: float) -> None:
    shard = Shard(make_plan(3))
    shard.step(0)
    shard.step(1, rate=rate)
    assert shard.core.failed is not None
    assert shard.core.failed.startswith("the training has diverged: after update 2: ")
    assert "Use a smaller learning rate" in shard.core.failed
    assert shard.ended == dict.fromkeys((0, 1, 2), shard.core.failed)


def test_gradients_whose_sum_overflows_are_divergence_too() -> None:
    shard = Shard(make_plan(up=PLAIN, down=PLAIN))
    for rank in (0, 1):
        shard.push(rank, 0, {BIAS: PLAIN.encode(np.full(5, 3e38, np.float32))})
    assert "diverged" in str(shard.core.failed) and "bias" in str(shard.core.failed)


# ---- anything at all


def samples() -> list[tuple[Message, tuple[Piece, ...]]]:
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
        (Refused(reason="why"), ()),
        (Scalars(step=0, values=(1.0, 2.0)), ()),
    ]


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_mutated_messages_raise_protocol_errors_alone_and_the_core_raises_nothing(data: st.DataObject) -> None:
    message, pieces = data.draw(st.sampled_from(samples()))
    packet = to_packet(message, pieces)
    header = bytearray(packet.header)
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
                packet = Packet(data.draw(st.integers(0, 9)), packet.header, packet.frames)
    try:
        read, frames = from_packet(Packet(packet.kind, bytes(header), packet.frames))
    except ProtocolError:
        return
    for shard in (Shard(begin=False), Shard(rejoin=True)):
        if shard.core.plan is not None:
            shard.core.closed(1, "lost")
        shard.say(1, read, frames)
        for sent, its_frames in shard.told[1]:
            to_packet(sent, its_frames)


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
