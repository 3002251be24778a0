"""`codec=auto` of local updates through the whole stack: replicas, slow links, resuming, what is refused."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster, start_server
from tests.hooks.ddp_ranks import run_script
from tests.hooks.local_runs import adamw, disagree, inner_step, resume, steps, values, wide
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.policies.auto_codec import AutoCodec
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.designs import design as find_design
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_updates.py"


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


def settings(opt: DistributedOptimizer) -> str:
    assert isinstance(opt, LocalUpdateOptimizer)
    assert opt._local.auto is not None
    return opt._local.auto.setting.name


def test_replicas_are_equal_bit_for_bit_while_settings_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "thinwire.worker.autopilot")

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, str, set[str]]:
        used = set()
        for step in range(48):
            inner_step(model, opt, rank, step)
            used.add(settings(opt))
        opt.flush()
        return values(model), str(opt.report()), used

    for design in ("local-sgd[h=2,codec=auto,target=bytes]", "diloco[h=2,codec=auto,target=bytes]"):
        runs = [
            run_cluster(wide, train, workers=3, optimizer=adamw, design=design, transport=transport)[0]
            for transport in ("memory", "grpc")
        ]
        first = runs[0][0][0]
        assert torch.isfinite(first).all(), design
        for run in runs:
            for rank, (found, report, used) in enumerate(run):
                assert torch.equal(found, first), f"{design}: worker {rank}"
                assert {"3lc[s=1,zstd]", "3lc[s=1.9,zstd]"} <= used, used
                assert re.search(r"auto +3lc\[s=1.9,zstd\] since exchange \d+, 2 changes", report), report
    assert "bf16 → 3lc[s=1,zstd]: the fewest bytes that the lag allows" in caplog.text


def test_workers_on_different_devices_choose_among_what_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    every, made = AutoCodec.settings, count()

    def settings_on(self: AutoCodec, devices: Collection[torch.device] = (), **asked: Any) -> tuple[Level, ...]:
        found = every(self, (), **asked)
        return found[1:] if devices and not next(made) else found  # one worker's device has no kernels for bf16

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, list[str]]:
        used = []
        for step in range(6):
            inner_step(model, opt, rank, step)
            used.append(settings(opt))
        opt.flush()
        return values(model), used

    monkeypatch.setattr(AutoCodec, "settings", settings_on)
    runs, _ = run_cluster(wide, train, workers=3, optimizer=adamw, design="update[codec=auto]")
    used = [each for _, each in runs]
    assert all(torch.equal(shared, runs[0][0]) for shared, _ in runs)
    assert sorted(each[0] for each in used) == ["bf16", "bf16", "int8"], "nothing is known of the others yet"
    assert used[0][1:] == used[1][1:] == used[2][1:] and "bf16" not in used[0][1:], used


def test_a_slow_link_is_answered_after_one_exchange() -> None:
    server, address = start_server(ServerCore(), "memory")

    def work(rank: int) -> tuple[list[str], torch.Tensor]:
        model = wide(rank)
        slow = Slow(address(), 1e6)
        place: dict[str, Any] = {"server": slow, "rank": rank, "workers": 2, "timeout_s": 60}
        with tw.distribute(model, adamw(model), design="update[codec=auto]", **place) as opt:
            used = []
            for step in range(8):
                inner_step(model, opt, rank, step)
                used.append(settings(opt))
            opt.flush()
            return used, values(model)

    with server, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    assert torch.equal(found[0][1], found[1][1])
    for used, _ in found:
        assert used[0] == "bf16", "nothing is known before the first exchange"
        assert all(name.startswith("3lc") for name in used[1:]), used


def test_resuming_goes_on_bit_for_bit_in_the_middle_of_a_round_too() -> None:
    total, design = 60, "local-sgd[h=2,codec=auto,target=bytes]"
    whole, _ = run_cluster(wide, steps(total), workers=2, optimizer=adamw, design=design)
    for stop in (17, 30, 50):

        def first(rank: int, model: nn.Module, opt: DistributedOptimizer, stop: int = stop) -> dict[str, Any]:
            for step in range(stop):
                inner_step(model, opt, rank, step)
            opt.sync()
            return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

        saved, core = run_cluster(wide, first, workers=2, optimizer=adamw, design=design)
        assert "auto" in saved[0]["opt"]["position"]
        found = resume(saved, core, design, range(stop, total), wide)
        for rank in range(2):
            assert torch.equal(found[rank], whole[rank]), f"worker {rank}, from step {stop}"


def test_every_rank_serving_a_share_of_the_model() -> None:
    text = run_script(2, EXAMPLE, "--steps", "12", "--design", "local-sgd[h=2,codec=auto]")
    found = re.search(r"held-out loss ([0-9.]+) nats", text)
    assert found, text
    assert float(found[1]) < 4.3, "4.85 before training"
    assert re.search(r"auto +\S+ since exchange \d+, \d+ changes?, link [0-9.]+ [MG]bit/s", text), text


# ---- what is refused


def test_designs_say_what_is_wrong_with_their_options() -> None:
    for name, expected in (
        ("update[codec=auto,s=1.5]", "codec=auto decides both ways and all options itself; leave out sparsity"),
        ("update[codec=auto,codec_down=int8]", "leave out codec_down"),
        ("update[codec=auto,lag_limit=0]", "lag_limit=0; it is a number of steps above 0"),
        ("update[codec=auto,target=size]", "target='size'; allowed are 'time' and 'bytes'"),
        ("streaming-diloco[codec=auto]", "fragments=1 and delay=0 go with it"),
        ("local-sgd[h=4,delay=1,codec=auto]", "fragments=1 and delay=0 go with it"),
        ("update[lag_limit=5]", "only codec=auto takes lag_limit, and the codec here is 3lc"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            find_design(name)


def test_a_limit_that_no_3lc_keeps_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made = find_design("update[codec=auto,lag_limit=1.5]")
    assert "3LC keeps 2 exchanges or more waiting even at s = 1; codec=auto stays at int8 at most" in caplog.text
    assert made.up.id == "int8"
    run_cluster(wide, steps(4), workers=2, optimizer=adamw, design="update[codec=auto,lag_limit=0.1]")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("local-sgd[h=2]", r"this worker's design has (codec=auto|a fixed codec), the others' (codec=auto|a fixed)"),
        ("local-sgd[h=2,codec=auto,lag_limit=8]", "lag_limit: this worker has [58], the others [58]; start all"),
        (
            "local-sgd[h=2,codec=auto,target=bytes]",
            "target: this worker has (bytes|time), the others (bytes|time); start",
        ),
    ],
)
def test_workers_agree_that_and_how_the_codec_is_chosen(other: str, expected: str) -> None:
    errors = disagree("local-sgd[h=2,codec=auto]", other)
    assert any(isinstance(e, ProtocolError) and re.search(expected, str(e)) for e in errors), errors


def test_a_state_of_another_h_is_refused() -> None:
    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        steps(4)(rank, model, opt)
        return {"model": model.state_dict(), "opt": opt.state_dict()}

    [saved], core = run_cluster(wide, first, workers=1, optimizer=adamw, design="local-sgd[h=8,codec=auto]")
    with pytest.raises(ConfigError, match="state is of h=8 and this training has h=4"):
        resume([saved], core, "local-sgd[h=4,codec=auto]", range(4, 5), wide)
