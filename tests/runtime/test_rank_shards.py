"""A process group whose ranks serve: here a group of one, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import thinwire as tw
from thinwire.errors import TransportError
from thinwire.packets import pack
from thinwire.runtime.rank_shards import RankShards
from thinwire.schema import SessionOpen
from thinwire.security.certificates import self_signed
from thinwire.transports import sockets
from thinwire.transports.base import Connection
from thinwire.transports.sockets import SocketOptions


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def serving() -> list[str]:
    """Threads that serve rank 0; other tests' servers may still be closing."""
    return [thread.name for thread in threading.enumerate() if thread.name == "thinwire-serve-0"]


def test_a_rank_serves_itself_and_stops(group: dist.ProcessGroup) -> None:
    model = nn.Linear(20, 20)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with tw.distribute(model, optimizer, group=group, design="local-sgd[h=2]") as opt:
        assert serving()
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(4, 20)).square().mean().backward()
            opt.step()
        opt.flush()
    assert torch.isfinite(model.weight).all() and not torch.equal(model.weight, before) and not serving()


def test_strangers_are_not_let_into_a_group(group: dist.ProcessGroup) -> None:
    shards = RankShards(group)
    [own] = shards.open()
    address = shards.address
    try:
        assert isinstance(own, Connection)  # no socket leads to itself
        own.close()
        with shards.dial(address, 20) as connection:
            connection.send(pack(SessionOpen(session="mine")))
            assert connection.receive(20) is not None
        tls, drawn = shards.transport.tls, self_signed("worker-0", "ranks.thinwire", days=1)
        assert tls is not None
        stranger = replace(tls, certificate=drawn.certificate, key=drawn.key)
        for tried, told in ((SocketOptions(), "did not answer"), (SocketOptions(tls=stranger), "lost the server at")):
            with pytest.raises(TransportError, match=told):
                sockets.connect(address, connect_timeout_s=0.3, options=tried)
        with pytest.raises(TransportError, match="its certificate is not trusted"):
            sockets.connect(address, options=SocketOptions(tls=replace(stranger, root=drawn.certificate)))
    finally:
        shards.stop()
