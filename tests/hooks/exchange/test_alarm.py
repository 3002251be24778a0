"""Ranks hear of a slow link between two notes: of the least that all of them waited for, and not of one rank's."""

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


def waits(ranks: list[tuple[Alarm, Pilot]], seconds: list[float]) -> list[str]:
    """Every rank waits as long as it is said, in some steps, and tells of it; returns their settings then."""
    for (alarm, _), each in zip(ranks, seconds, strict=True):
        for _ in range(RECENT):
            alarm.waited(each)
    for _ in range(ranks[0][1].alarm_every):
        for alarm, pilot in ranks:
            if (told_s := alarm.due(pilot)) is not None:
                alarm.begin_reduce(told_s)
    for alarm, pilot in ranks:
        alarm.end_reduce()
        alarm.report(pilot, pilot.memory.level)
    return [pilot.setting.name for _, pilot in ranks]


def test_all_ranks_leave_uncompressed_steps_at_once_where_all_have_waited(ranks: list[tuple[Alarm, Pilot]]) -> None:
    slow_s = 8 * WORK.nbytes(levels()[0], 32) / 1e7
    first, second = waits(ranks, [slow_s, 1.5 * slow_s])
    assert first == second and first.startswith("3lc")


def test_one_rank_that_waited_is_not_heard(ranks: list[tuple[Alarm, Pilot]]) -> None:
    slow_s = 8 * WORK.nbytes(levels()[0], 32) / 1e7
    assert waits(ranks, [slow_s, 1e-4]) == ["uncompressed"] * RANKS


def test_waits_that_are_forgotten_are_not_told(ranks: list[tuple[Alarm, Pilot]]) -> None:
    for alarm, _ in ranks:
        alarm.waited(9.0)
        alarm.forget()
        assert alarm.state.waits_s == []
    for _ in range(ranks[0][1].alarm_every):
        for alarm, pilot in ranks:
            if (told_s := alarm.due(pilot)) is not None:
                alarm.begin_reduce(told_s)
    for alarm, pilot in ranks:
        alarm.end_reduce()
        alarm.report(pilot, pilot.memory.level)
        assert alarm.state.least_s == 0 and pilot.setting.name == "uncompressed"


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


def test_a_group_without_a_backend_s_name_reduces_on_the_host_by_gloo_too(tmp_path: Path) -> None:
    assert run_ranks(1, run_possible, str(tmp_path)) == [[True, True, True]]
