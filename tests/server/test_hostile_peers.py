"""Joins and messages that a worker of ours never sends: each is refused, and the server stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.server.conversation import Shard, gradient, make_plan
from thinwire.codecs import codec
from thinwire.frames import pack as pack_frame
from thinwire.frames import parse as parse_frame
from thinwire.optimizers.runner import OptimizerRunner
from thinwire.packets import EncodedTensor, pack, parse
from thinwire.schema import Join, Message, Plan, Push, Refused, Scalars, TableSpec, TunedPush, Values
from thinwire.server.core import ServerCore

PLAIN, CODED, SOME = codec("fp32"), codec("3lc"), codec("topk", k=2)
MATRIX, VECTOR = TableSpec(name="w", shape=(8, 5), up=1, down=1), TableSpec(name="b", shape=(5,))
Said = tuple[int, Message, tuple[EncodedTensor, ...]]


def join(rank: int, **changed: Any) -> Said:
    plan: dict[str, Any] = {
        "workers": 2,
        "tables": (MATRIX, VECTOR),
        "codecs": (PLAIN.config(), CODED.config()),
        "optimizer": "SGD",
        "groups": ({"momentum": 0.5},),
    }
    return rank, Join(rank=rank, plan=Plan(**{**plan, **changed})), ()


def values(dtype: torch.dtype = torch.float32) -> Said:
    tensors = (torch.zeros(8, 5, dtype=dtype), torch.zeros(5, dtype=dtype))
    return 0, Values(tables=(0, 1), versions=(0, 0)), tuple(PLAIN.encode(each) for each in tensors)


def frames() -> tuple[EncodedTensor, ...]:
    return CODED.encode(torch.randn(8, 5)), PLAIN.encode(torch.randn(5))


def refusals(core: ServerCore, said: Sequence[Said]) -> list[str]:
    """Returns what workers were told when they said something; all of it goes through bytes."""
    told = []
    for peer, message, pieces in said:
        for effect in core.received(peer, *parse(pack(message, pieces))):
            answer = getattr(effect, "message", None)
            if answer is not None:
                pack(answer, getattr(effect, "frames", ()))
            if isinstance(answer, Refused):
                told.append(answer.reason)
    return told


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"consistency": "adaptive[when={}]"}, "unknown criterion"),
        ({"consistency": "ssp[staleness=" + "1" * 5000 + "]"}, "characters"),
        ({"consistency": "ssp[" + "," * 100_000 + "x=1]"}, "characters"),
        ({"consistency": "ssp[staleness=" + '{"a":' * 300 + "1" + "}" * 300 + "]"}, "ssp: staleness is"),
        ({"codecs": ({"id": "fp32", "self": 1}, CODED.config())}, "unknown option 'self'"),
        ({"workers": 4096, "tables": tuple(TableSpec(name=f"{n}", shape=()) for n in range(2000))}, "together at most"),
    ],
    ids=["criterion", "long", "commas", "nested", "self", "places"],
)
def test_a_plan_that_cannot_be_is_refused_and_the_next_is_served(changed: dict[str, Any], reason: str) -> None:
    core = ServerCore()
    [told] = refusals(core, [join(0, **changed)])
    assert reason in told
    assert refusals(core, [join(0), values(), join(1)]) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_whole_values_travel_in_float32(dtype: torch.dtype) -> None:
    """Kernels write 4 bytes for each value of what the server keeps of them."""
    core = ServerCore()
    told = refusals(core, [join(0), join(1), values(dtype)])
    assert told and all("whole values came in" in each for each in told)
    buffers = (MATRIX, TableSpec(name="s", shape=(5,), state=True))
    statistic = PLAIN.encode(torch.zeros(5, dtype=dtype))
    push = Push(step=0, tables=(1,), rates=(0.1,))
    again = ServerCore()
    said = [join(0, tables=buffers), join(1, tables=buffers), values(), (0, push, (statistic,))]
    told = refusals(again, said)
    assert told and all("whole values came in" in each for each in told)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_step_beyond_all_steps(consistency: str) -> None:
    core = ServerCore()
    push = Push(step=2**64 - 1, tables=(0, 1), rates=(0.1,), last=True)
    told = refusals(core, [join(0, consistency=consistency), values(), (0, push, frames())])
    assert told and "a push of step 18446744073709551615; steps are 0 …" in told[0]


def test_a_codec_of_all_values_among_senders() -> None:
    plan = {"reduce": "mean-of-senders", "codecs": (PLAIN.config(), SOME.config(), CODED.config())}
    push = TunedPush(step=0, tables=(0, 1), rates=(0.1,), replaced=1, codec=2)
    told = refusals(ServerCore(), [join(0, **plan), join(1, **plan), values(), (0, push, frames())])
    assert told and "'3lc' sends all values" in told[0]


@pytest.mark.parametrize("rate", [1e300, float("nan"), float("-inf")])
def test_a_rate_beyond_float32_is_refused_and_the_others_go_on(rate: float) -> None:
    shard = Shard(make_plan(3, consistency="asp"), min_workers=1)
    shard.push(1, 0, shard.frames(1, 0), rate=rate)
    assert list(shard.ended) == [1] and "a learning rate is" in str(shard.ended[1])
    shard.push(0, 0, shard.frames(0, 0))
    assert shard.core.failed is None and 0 not in shard.ended


def test_an_option_beyond_float32_is_refused() -> None:
    shard = Shard(make_plan(2), min_workers=1)
    pushed = tuple(shard.frames(0, 0).values())
    shard.say(0, Push(step=0, tables=(0, 1), rates=(0.1,), options=((0, {"momentum": 1e300}),)), pushed)
    assert list(shard.ended) == [0] and "momentum=1e+300" in str(shard.ended[0])


def test_an_update_that_fails_ends_the_training_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    shard = Shard(make_plan(2), min_workers=1)
    monkeypatch.setattr(OptimizerRunner, "step", fails)
    shard.push(0, 0, shard.frames(0, 0))
    shard.lose(1)  # its gradient is waited for no more
    assert "SGD failed at step 0: out of memory" in str(shard.core.failed) and 0 in shard.ended


def late_for(shard: Shard) -> None:
    shard.carry_out(shard.core.waited(1e6))


def breaks_off(shard: Shard) -> None:
    shard.carry_out(shard.core.broke(1, "a packet that is too large"))


def huge(_rank: int, _step: int) -> dict[int, bytes]:
    return {0: CODED.encode(torch.full((8, 5), 3e38)), 1: PLAIN.encode(torch.full((5,), 3e38))}


def damaged(rank: int, step: int) -> dict[int, bytes]:
    """With a checksum that is right, and too few codes: what is seen when they are decoded."""
    frame = parse_frame(CODED.encode(gradient(rank, step, 0)))
    return {0: pack_frame(replace(frame, payload=frame.payload[:-1])), 1: PLAIN.encode(torch.zeros(5))}


@pytest.mark.parametrize("leaves", [lambda shard: shard.lose(1), breaks_off, late_for], ids=["dies", "breaks", "late"])
@pytest.mark.parametrize(("pushed", "reason"), [(huge, "diverged"), (damaged, "gradient of worker 2")])
def test_an_update_that_is_made_when_one_is_gone_fails_as_if_all_had_pushed(
    pushed: Callable[[int, int], dict[int, bytes]], reason: str, leaves: Callable[[Shard], None]
) -> None:
    shard = Shard(make_plan(3, up=CODED), begin=False, min_workers=1)
    shard.core = ServerCore(1, straggler_grace_s=1.0)
    for rank in range(3):
        shard.join(rank)
    shard.give_values(0)
    for step in range(12):
        shard.step(step)
        shard.carry_out(shard.core.waited(0.1 * step))
    shard.push(0, 12, shard.frames(0, 12), rate=1e3)
    shard.push(2, 12, pushed(2, 12))
    shard.carry_out(shard.core.waited(1.2))
    assert shard.core.failed is None
    leaves(shard)
    assert reason in str(shard.core.failed) and reason in str(shard.ended[0])


@pytest.mark.parametrize("message", [Push(step=1, tables=(), digest="lie"), Scalars(step=-1, values=(0.0, 0.0))])
def test_what_is_said_of_a_step_that_nobody_can_be_at_is_refused(message: Message) -> None:
    """The first digest of a step is what the others must equal, and scales that all have said are used."""
    shard = Shard(make_plan(3), min_workers=1)
    shard.say(2, message)
    assert list(shard.ended) == [2] and f"of step {message.step}" in str(shard.ended[2])  # type: ignore[union-attr]
    for step in range(2):
        for rank in range(2):
            shard.say(rank, Push(step=step, tables=(), digest=f"true {step}"))
            shard.push(rank, step, shard.frames(rank, step))
    assert list(shard.ended) == [2] and shard.core.step == 2
