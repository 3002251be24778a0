"""`codec=auto` of local updates through the whole stack: equal replicas while settings change, slow links."""

from __future__ import annotations

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster, start_server
from tests.hooks.local_runs import adamw, inner_step, values, wide
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection


class Slow(Connection):
    """A connection at so many bits per second, one way after the other."""

    def __init__(self, inner: Any, bps: float) -> None:
        self._inner, self._bps, self.address = inner, bps, inner.address

    def send(self, packet: bytes) -> None:
        time.sleep(8 * len(packet) / self._bps)
        self._inner.send(packet)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        packet: bytes | None = self._inner.receive(timeout_s)
        time.sleep(8 * len(packet or b"") / self._bps)
        return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._inner.close(timeout_s)

    def abort(self) -> None:
        self._inner.abort()


def used_in(count: int) -> Any:
    """A training; it returns what all share at the end, the setting after each step, and the report."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, list[str], str]:
        assert isinstance(opt, LocalUpdateOptimizer) and opt._local.auto is not None
        used = []
        for step in range(count):
            inner_step(model, opt, rank, step)
            used.append(opt._local.auto.setting.name)
        opt.flush()
        return values(model), used, str(opt.report())

    return train


def test_replicas_are_bit_identical_while_settings_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "thinwire.worker.autopilot")
    for design in ("local-sgd[h=2,codec=auto,target=bytes]", "diloco[h=2,codec=auto,target=bytes]"):
        memory, grpc = (
            run_cluster(wide, used_in(48), workers=3, optimizer=adamw, design=design, transport=transport)[0]
            for transport in ("memory", "grpc")
        )
        first = memory[0][0]
        assert torch.isfinite(first).all(), design
        for found, used, report in memory + grpc:
            assert torch.equal(found, first), design
            assert {"3lc[s=1,zstd]", "3lc[s=1.9,zstd]"} <= {*used}
            assert re.search(r"auto +3lc\[s=1.9,zstd\] since exchange \d+, 2 changes", report), report
    assert "bf16 → 3lc[s=1,zstd]: the fewest bytes that the lag allows" in caplog.text


def test_a_slow_link_is_answered_after_one_exchange() -> None:
    server, address = start_server(ServerCore(), "memory")

    def work(rank: int) -> tuple[torch.Tensor, list[str], str]:
        model = wide(rank)
        place: dict[str, Any] = {"server": Slow(address(), 1e6), "rank": rank, "workers": 2, "timeout_s": 60}
        with tw.distribute(model, adamw(model), design="update[codec=auto]", **place) as opt:
            found: tuple[torch.Tensor, list[str], str] = used_in(8)(rank, model, opt)
            return found

    with server, ThreadPoolExecutor(2) as pool:
        one, other = pool.map(work, range(2))
    assert torch.equal(one[0], other[0])
    for _, used, _ in (one, other):
        assert used[0] == "bf16", "nothing is known before the first exchange"
        assert all(name.startswith("3lc") for name in used[1:]), used
