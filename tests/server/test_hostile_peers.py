"""Joins and messages that a worker of ours never sends: each is refused, and the server stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from thinwire.codecs import codec
from thinwire.packets import EncodedTensor, pack, parse
from thinwire.schema import Join, Message, Plan, Push, Refused, TableSpec, TunedPush, Values
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
