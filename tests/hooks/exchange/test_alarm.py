"""Between two notes ranks hear of a slow link: of the least wait of all ranks, and not of one rank's alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.hooks.ddp_ranks import run_ranks
from tests.policies.autopilot.links import WORK, train
from thinwire.hooks.exchange.alarm import Alarm
from thinwire.policies.autopilot.doubts import RECENT
from thinwire.policies.autopilot.levels import levels
from thinwire.policies.autopilot.pilot import Pilot

RANKS = 2
SLOW_S = 8 * WORK.nbytes(levels()[0], 32) / 1e7


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[tuple[Alarm, Pilot]]]:
    """Two ranks that have trained without a limit on the link, uncompressed."""
    torch_dist = cast("Any", dist)  # whose stubs have neither
    store, gloo = torch_dist.FileStore(str(tmp_path / "store"), RANKS), torch_dist.ProcessGroupGloo
    with ThreadPoolExecutor(RANKS) as pool:
        groups = list(pool.map(lambda rank: gloo(store, rank, RANKS, timedelta(seconds=60)), range(RANKS)))
        found = [(Alarm(group), Pilot(levels(), WORK)) for group in groups]
        for _, pilot in found:
            assert set(train(pilot, [2e10] * 200)) == {"uncompressed"}
        yield found


@pytest.mark.parametrize(
    ("waits_s", "forgets", "leaves"),
    [
        pytest.param([SLOW_S, 1.5 * SLOW_S], False, True, id="all ranks wait"),
        pytest.param([SLOW_S, 1e-4], False, False, id="one rank waits"),
        pytest.param([SLOW_S, SLOW_S], True, False, id="waits are forgotten"),
    ],
)
def test_ranks_leave_uncompressed_steps_at_once_where_all_have_waited(
    ranks: list[tuple[Alarm, Pilot]], waits_s: list[float], forgets: bool, leaves: bool
) -> None:
    for (alarm, _), each in zip(ranks, waits_s, strict=True):
        for _ in range(RECENT):
            alarm.waited(each)
        if forgets:
            alarm.forget()
            assert alarm.state.waits_s == []
    for _ in range(ranks[0][1].alarm_every):
        for alarm, pilot in ranks:
            if (told_s := alarm.due(pilot)) is not None:
                alarm.begin_reduce(told_s)
    for alarm, pilot in ranks:
        alarm.end_reduce()
        alarm.report(pilot, pilot.memory.level)
    first, second = (pilot.setting.name for _, pilot in ranks)
    assert first == second and first.startswith("3lc" if leaves else "uncompressed")


def run_possible(_rank: int, folder: str) -> list[bool]:
    """Whether ranks hear of waits in groups that were made with a backend's name, and without."""
    found = []
    for backend in ("gloo", "cpu:gloo", None):
        dist.destroy_process_group()
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        found.append(Alarm.possible(group, [torch.zeros(1)]))
    return found


def test_group_without_a_backend_s_name_reduces_on_the_host_by_gloo_too(tmp_path: Path) -> None:
    assert run_ranks(1, run_possible, str(tmp_path)) == [[True, True, True]]
