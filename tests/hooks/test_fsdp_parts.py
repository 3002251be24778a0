"""Parts of an FSDP step by themselves: in which order a step ends, and where gathered parameters are decoded."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.collective.exchange import abort_packet
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.hooks.fsdp import gathering
from thinwire.hooks.fsdp.gathering import CodedAllGather
from thinwire.hooks.fsdp.state import ShardedState
from thinwire.packets import segments
from thinwire.schema import Shard
from thinwire.transports.peers import PeerGroup, ReceiveBuffer, Transfer


class _Exchanged(Exception):
    pass


def test_the_newest_gradients_leave_after_what_fsdp_has_reduced() -> None:
    """On a GPU a loss scale has changed residuals on FSDP's stream, and the hook's threads read them on another."""
    calls: list[str] = []

    def exchange(*, last: bool) -> None:
        assert last
        raise _Exchanged

    groups = [SimpleNamespace(wait_reduced=lambda n=n: calls.append(f"reduced {n}"), device="cpu") for n in range(2)]
    ready = [SimpleNamespace(group=group, wait=lambda: None) for group in groups]
    state: Any = SimpleNamespace(
        _ready=ready,
        _pass=-1,
        _exchanging=False,
        _worst=lambda own, device: calls.append(f"{own.name} on {device}"),
        core=SimpleNamespace(steps_skipped=0),
        _exchange_newest=exchange,
    )
    with pytest.raises(_Exchanged):
        ShardedState.end_step(state)
    assert calls == ["reduced 0", "reduced 1", "FAILED on cpu"], "ranks of other shards wait to hear of it"


class _Peers(PeerGroup):
    """Rank 0 of three: rank 1 gave up, and rank 2 is late."""

    rank, size, timeout = 0, 3, timedelta(seconds=1)

    def __init__(self, packets: dict[int, bytearray]) -> None:
        self._packets, self.waited = packets, list[tuple[str, int]]()

    def receive(self, peer: int, buffer: ReceiveBuffer, tag: int) -> Transfer:
        return Transfer(peer, _Work("receive"), memoryview(self._packets[peer]))

    def send(self, peer: int, data: bytearray, tag: int) -> Transfer:
        return Transfer(peer, _Work("send"), memoryview(data))

    def wait(self, transfer: Transfer, timeout: timedelta | None = None) -> memoryview:
        assert isinstance(transfer.work, _Work)
        self.waited.append((transfer.work.kind, transfer.peer))
        return transfer.data


@dataclass
class _Work:
    kind: str

    def wait(self, timeout: timedelta) -> object:
        return None


def test_what_others_send_is_waited_for_where_one_gave_up() -> None:
    """A receive that is left under way would take what belongs to the next gather."""
    shard = torch.linspace(-1, 1, 50)
    frame = tw.codec("int8").encode(shard)
    shards = bytearray().join(segments(Shard(step=0, bucket=3), [frame]))
    peers = _Peers({1: abort_packet(NonFiniteError("weight holds NaN")), 2: shards})
    group = SimpleNamespace(gathered=lambda flat: [flat], gathered_names=["weight"])
    gather: Any = SimpleNamespace(
        _peers=peers, _group=group, _number=3, _codecs=[tw.codec("int8")], _buffers={}, _count=lambda *_: None
    )
    gather._read = partial(CodedAllGather._read, gather)
    with pytest.raises(NonFiniteError, match="rank 1 gave up: NonFiniteError: weight holds NaN"):
        CodedAllGather._exchange(gather, shard)
    assert peers.waited == [("receive", 1), ("receive", 2), ("send", 1), ("send", 2)]


def test_coded_parameters_are_decoded_where_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a frame that is decoded by itself would be so on the CPU, and be uploaded as float32."""
    taken = list[str]()

    def decode(frame: bytes) -> torch.Tensor:
        taken.append(tw.frames.parse(frame).codec)
        return tw.decode(frame)

    monkeypatch.setattr(gathering, "decode", decode)
    gather: Any = SimpleNamespace(_peers=SimpleNamespace(names=[4, 7]), _group="layer")
    values = [torch.linspace(-1, 1, 50), torch.linspace(-3, 3, 8), torch.zeros(0), torch.linspace(0, 1, 30)]
    frames = [tw.codec(id).encode(each) for id, each in zip(("int8", "fp32", "int8", "bf16"), values, strict=True)]
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.full((88,), torch.nan, dtype=dtype)
        parts = torch.split(flat, [each.numel() for each in values])
        CodedAllGather._fill(gather, 1, frames, parts)
        assert torch.equal(flat, torch.cat([tw.decode(frame) for frame in frames]).to(dtype))
    assert taken == ["fp32", "fp32"]
    with pytest.raises(ProtocolError, match=r"rank 7 sent parameters of shape \(50,\) for \(8,\) of layer"):
        CodedAllGather._fill(gather, 1, frames[:1], parts[1:2])
    damaged = frames[0][:-1] + bytes([frames[0][-1] ^ 1])
    with pytest.raises(ProtocolError, match="rank 7 sent a damaged frame of layer: "):
        CodedAllGather._fill(gather, 1, [damaged], parts[:1])
