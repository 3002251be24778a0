"""A process group whose ranks serve: here a group of one, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore

import thinwire as tw
from tests.server.conversation import Shard, make_plan
from thinwire.errors import ConfigError, ProtocolError, TransportError
from thinwire.hooks.ending import FAILED_S
from thinwire.packets import pack
from thinwire.runtime import rank_shards
from thinwire.runtime.rank_shards import RankShards, own_host
from thinwire.schema import Push, SessionOpen
from thinwire.security.certificates import self_signed
from thinwire.server.effects import Send
from thinwire.transports import sockets
from thinwire.transports.base import Connection
from thinwire.transports.sockets import SocketOptions
from thinwire.version import VERSION


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


def test_who_is_not_in_the_group_is_not_let_in(group: dist.ProcessGroup) -> None:
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


def test_a_rank_answers_the_next_one_first(group: dist.ProcessGroup) -> None:
    shard = Shard(make_plan(3), begin=False)
    shard.core = RankShards(group).core  # rank 0's
    for rank in range(3):
        shard.join(rank)
    shard.give_values(0)
    for rank in range(2):
        shard.push(rank, 0, shard.frames(rank, 0))
    frames = shard.frames(2, 0)
    [answer] = shard.core.received(2, Push(step=0, tables=tuple(frames), rates=(0.1,)), tuple(frames.values()))
    assert isinstance(answer, Send) and answer.peers == (1, 2, 0)


def test_what_cannot_be_opens_nothing(group: dist.ProcessGroup) -> None:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="parameter 'bias' needs a gradient and the optimizer does not hold it"):
        tw.distribute(model, torch.optim.AdamW([model.weight]), group=group, design="update")
    with pytest.raises(ConfigError, match="leave out rank and workers"):
        tw.distribute(model, optimizer, group=group, rank=0, workers=4, design="update")
    with pytest.raises(ConfigError, match="draws certificates of its own"):
        tw.distribute(model, optimizer, group=group, design="update", credentials=tw.Credentials())
    with pytest.raises(ConfigError, match=r"give either server=.* or group="):
        tw.distribute(model, optimizer, group=group, server="grpc://127.0.0.1:1", design="update")
    assert not serving()


def test_ranks_that_plan_otherwise_are_told_in_what_unless_they_are_of_another_thinwire(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, of which the other says what it is given here."""
    mine = make_plan()
    theirs = msgspec.structs.replace(mine, reduce="sum")
    found = [msgspec.msgpack.encode((mine,)), msgspec.msgpack.encode((theirs,))]
    shards = RankShards(group)
    shards.workers = 2

    def gather(into: list[bytes], _own: bytes, *, group: object) -> None:
        into[:] = found

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(rank_shards, "_gather", lambda own, *_: [own, f"{VERSION} another"])
    with pytest.raises(ProtocolError, match="rank 1 of 2 would train otherwise than rank 0: reduce: this worker plans"):
        shards.agree((mine,))
    monkeypatch.setattr(rank_shards, "_gather", lambda own, *_: [own, "0.0.0 another"])
    shards.agree((mine,))  # who joins is told
    monkeypatch.setattr(rank_shards, "_gather", lambda own, *_: [own, f"{VERSION} another"])
    found[1] = found[0]  # in options of its own alone, which are none of a plan's
    shards.agree((mine,))


def test_on_several_machines_somebody_must_know_an_address(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    ways = {"127.0.0.1": "127.0.0.1", "10.0.0.2": "10.0.0.1", "fd00::2": "[fd00::1]"}
    monkeypatch.setattr(rank_shards, "source_address", ways.__getitem__)
    said: list[str] = []
    monkeypatch.setattr(rank_shards, "_gather", lambda mine, _group, _workers: [mine, *(said or [mine])])
    assert own_host(group, 0, 2) == "127.0.0.1", "both are on this machine"
    said = ["127.0.1.1 another"]
    with pytest.raises(ConfigError, match=r"on several machines, and none knows an address .*: set MASTER_ADDR"):
        own_host(group, 0, 2)
    for other, own in (("10.0.0.2", "10.0.0.1"), ("[fd00::2]", "[fd00::1]")):
        said = [f"{other} another"]
        assert own_host(group, 0, 2) == own


def test_without_torchrun_the_group_s_store_says_where_the_ranks_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    store = TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert rank_shards._rendezvous() == "127.0.0.2"
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.3")
        assert rank_shards._rendezvous() == "127.0.0.3"
    finally:
        dist.destroy_process_group()


def test_without_a_process_group_the_message_says_what_is_missing() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="is None before init_process_group"):
        tw.distribute(model, torch.optim.AdamW(model.parameters()), group=dist.group.WORLD, design="update")


def test_a_slow_rank_is_served_for_as_long_as_ranks_wait_for_each_other(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def close(shards: RankShards, within_s: float) -> None:
        waits.append(within_s)
        shards.stop()

    monkeypatch.setattr(RankShards, "close", close)
    for failure in (None, ValueError()):
        model = nn.Linear(20, 20)
        with (
            suppress(ValueError),
            tw.distribute(model, torch.optim.AdamW(model.parameters()), group=group, design="update", timeout_s=45),
        ):
            if failure is not None:
                raise failure
    assert waits == [45.0, FAILED_S]


def test_one_rank_is_asked_at_a_time_whether_it_has_ended(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_shards, "_LOOK_S", 0.05)
    monkeypatch.setattr(rank_shards, "_FAREWELL_S", 0.0)
    asked: list[str] = []

    def closed(*, ends: str = "", dead: str = "", within_s: float = 60.0) -> list[str]:
        shards = RankShards(group)
        shards._others = [str(rank) for rank in range(64)]

        def has_ended(address: str) -> bool:
            asked.append(address)
            time.sleep(0.05)
            if address == ends:
                shards._ended.set()
            return address == dead

        asked.clear()
        monkeypatch.setattr(rank_shards, "has_ended", has_ended)
        shards.close(within_s)
        return asked

    assert closed(ends="2") == ["0", "1", "2"], "all have left"
    assert closed(dead="2") == ["0", "1", "2"], "one has died"
    assert 0 < len(closed(within_s=0.2)) < 10, "the time is over"
