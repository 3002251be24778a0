"""Bytes that travel with a gradient: all ranks get all of them, and the gradient keeps the bits it has without them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from thinwire.hooks.exchange.piggyback import MOST_NBYTES, Piggyback

COUNTS = (1, 5, 7, 8, 9, 31, 1001, 4099, 61_706, MOST_NBYTES // 4)


def on_ranks(folder: Path, world: int, work: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    """Runs it on every rank of a gloo group, in threads; returns the results in rank order."""
    torch_dist = cast("Any", dist)  # whose stubs have neither
    store, gloo = torch_dist.FileStore(str(folder / "store"), world), torch_dist.ProcessGroupGloo

    def run(rank: int) -> Any:
        return work(rank, gloo(store, rank, world, timedelta(seconds=60)))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def gradient(rank: int, count: int) -> torch.Tensor:
    """Values of many magnitudes, so that the order of a sum shows in its last bits."""
    drawn = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randn(count, generator=drawn) * torch.exp(3 * torch.randn(count, generator=drawn))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_get_all_bytes_and_sums_keep_their_bits(tmp_path: Path, world: int) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        piggyback = Piggyback(rank, world)
        for count in COUNTS:
            alone = gradient(rank, count)
            group.allreduce([alone]).wait()
            for length in (2, 16, 18):
                carried = gradient(rank, count)
                piggyback.put(bytes((rank + 1) * (place + 251) % 256 for place in range(length)))
                group.allreduce([piggyback.load(carried)]).wait()
                piggyback.unload(carried)
                assert torch.equal(carried, alone), (world, count, length)
                expected = [bytes((each + 1) * (place + 251) % 256 for place in range(length)) for each in range(world)]
                assert piggyback.take() == expected
                assert piggyback.take() == []

    on_ranks(tmp_path, world, work)


def test_nan_and_inf_stay_where_they_are(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[list[bytes], torch.Tensor]:
        piggyback, carried = Piggyback(rank, 2), torch.ones(50)
        if rank:
            carried[::2], carried[7] = torch.nan, torch.inf
        piggyback.put(b"\xff" * 18)
        group.allreduce([piggyback.load(carried)]).wait()
        piggyback.unload(carried)
        return piggyback.take(), carried

    for came, carried in on_ranks(tmp_path, 2, work):
        assert came == [b"\xff" * 18] * 2
        assert carried[::2].isnan().all() and carried[7] == torch.inf and (carried[9::2] == 2).all()


def test_bytes_of_a_broken_step_are_waited_for(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[list[bytes]]:
        piggyback, found = Piggyback(rank, 2), []
        for step in range(2):
            piggyback.put(bytes([rank, step]))
            piggyback.begun(group.allreduce([piggyback.load(torch.ones(9))]))
            found.append(piggyback.take())  # never unloaded
        return found

    assert on_ranks(tmp_path, 2, work) == [[[b"\0\0", b"\1\0"], [b"\0\1", b"\1\1"]]] * 2


def test_bytes_without_a_gradient_are_dropped_and_only_small_dense_float32_carries() -> None:
    piggyback = Piggyback(0, 2)
    piggyback.put(b"late")
    assert piggyback.take() == [] and not piggyback.waiting
    assert not Piggyback.fits(torch.empty(8, 2)[:, 0])
    assert Piggyback.fits(torch.empty(MOST_NBYTES // 4))
    assert not Piggyback.fits(torch.empty(MOST_NBYTES // 4 + 1))
    assert not Piggyback.fits(torch.empty(0))
    others = (torch.float16, torch.bfloat16, torch.float64)
    assert not any(Piggyback.fits(torch.empty(4, dtype=dtype)) for dtype in others)
