"""The driver's threads, futures and failures, with all ranks in one process over a peer group in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.collective.ranks import SIZES, bucket_of, collectives, gradients, step, tensors
from tests.transports.memory_peers import MemoryPeerGroup, groups
from thinwire.collective.core import Bucket
from thinwire.collective.exchange import Exchange
from thinwire.errors import DeadlineError, NonFiniteError, ProtocolError, TransportError
from thinwire.runtime.bucket_buffers import BucketBuffer
from thinwire.runtime.collective import CollectiveDriver

CODEC = tw.codec("3lc", sparsity=1.5)
MANY = {"a": 20_000, "bias": 7, "b": 900, "c": 12_000}


@contextmanager
def drivers(peers: list[MemoryPeerGroup], **options: Any) -> Iterator[list[CollectiveDriver]]:
    sizes = options.pop("sizes", SIZES)
    cores = collectives(tensors(CODEC, sizes), len(peers), **options)
    made = [CollectiveDriver(core, group) for core, group in zip(cores, peers, strict=True)]
    try:
        yield made
    finally:
        for driver in made:
            driver.close()


def hand_over(driver: CollectiveDriver, gradient: Any, number: int) -> torch.futures.Future[torch.Tensor]:
    """Gives one rank its gradient of a step of one bucket."""
    return driver.bucket_ready(bucket_of(), torch.from_numpy(gradient.copy()), number, 0, last=True)


def test_driver_equals_core_without_threads() -> None:
    cores = collectives(tensors(CODEC), 3)
    with drivers(groups(3)) as made:
        for number in range(4):
            given = gradients(3, number)
            expected = step(cores, bucket_of(), given, number)
            futures = [hand_over(driver, gradient, number) for driver, gradient in zip(made, given, strict=True)]
            for future, wanted in zip(futures, expected, strict=True):
                assert np.array_equal(future.wait().numpy(), wanted)
            for driver in made:
                driver.wait_step()
        counted = made[0].counters()
    assert counted["steps"] == 4 and counted["messages"] == 4 * 2 * 2
    assert counted["payload_bytes"] < counted["wire_bytes"] < 2 * counted["payload_bytes"]
    assert {"copy_seconds", "encode_seconds", "decode_seconds", "wait_seconds"} <= counted.keys()


def test_driver_sends_groups_in_order_and_fills_every_dtype() -> None:
    """Three groups of four buckets; the ranks' gradients have another dtype than the computation."""
    buckets = [Bucket(((name, 0),), 2 * size) for name, size in MANY.items()]
    with drivers(groups(2), sizes=MANY, group_nbytes=30_000) as made:
        buffers = []
        for driver in made:
            own = [torch.ones(size, dtype=torch.bfloat16) * (driver is made[0]) for size in MANY.values()]
            for index, (bucket, buffer) in enumerate(zip(buckets, own, strict=True)):
                driver.bucket_ready(bucket, buffer, 0, index, last=index == 3)
            buffers.append(own)
        for driver in made:
            driver.wait_step()
        assert made[0].counters()["messages"] == 2 * 2
        for ours, theirs in zip(*buffers, strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == torch.bfloat16 and ours.any()


def test_driver_nan_raises_or_skips_on_every_rank() -> None:
    bad = gradients(3, 0)
    bad[1][5] = np.nan
    with drivers(groups(3)) as made:
        for number in range(2):
            futures = [
                hand_over(driver, gradient, number)
                for driver, gradient in zip(made, bad if number else gradients(3, 1), strict=True)
            ]
            last = [future.wait() for future in futures]
        for rank, (driver, buffer) in enumerate(zip(made, last, strict=True)):
            assert buffer.isnan().all()
            with pytest.raises(NonFiniteError, match=r"^w\[" if rank == 1 else "rank 1 gave up: w") as first:
                driver.wait_step()
            with pytest.raises(NonFiniteError) as again:
                driver.raise_failure()
            assert first.value is again.value
    with drivers(groups(3), skip=True) as made:
        for number, given in enumerate([bad, gradients(3, 1)]):
            futures = [hand_over(driver, gradient, number) for driver, gradient in zip(made, given, strict=True)]
            for future in futures:
                assert bool(future.wait().isnan().all()) == (number == 0)
            for driver in made:
                driver.wait_step()
        assert [driver._core.steps_skipped for driver in made] == [1, 1, 1]


def test_driver_failing_rank_reports_to_every_peer() -> None:
    """Rank 2 waits for rank 0; ranks 1 and 3 leave; rank 0 finds a NaN. Rank 2 raises that, not a lost connection."""
    peers = groups(4)
    links = peers[0].links
    bad = gradients(4, 0)
    bad[0][5] = np.nan
    with drivers(peers) as made:
        waiting = hand_over(made[2], bad[2], 0)
        with links.changed:
            assert links.changed.wait_for(lambda: all(links.messages[2, peer, 0] for peer in (0, 1, 3)), 20)
        for gone in (1, 3):
            links.lose(gone)
        assert hand_over(made[0], bad[0], 0).wait().isnan().all() and waiting.wait().isnan().all()
        with pytest.raises(NonFiniteError, match=r"^w\[0:7480\]: holds NaN"):
            made[0].wait_step()
        with pytest.raises(NonFiniteError, match=r"^rank 0 gave up: w\[0:7480\]: holds NaN"):
            made[2].wait_step()


def test_driver_names_dead_stalled_or_desynchronised_peer() -> None:
    peers = groups(2)
    peers[0].links.lose(1)
    with drivers(peers) as made:
        hand_over(made[0], gradients(2, 0)[0], 0).wait()
        with pytest.raises(TransportError, match="rank 1 is gone"):
            made[0].wait_step()
    with drivers(groups(2, timeout_s=0.2)) as made:
        hand_over(made[0], gradients(2, 0)[0], 0).wait()
        with pytest.raises(DeadlineError, match="rank 1 kept rank 0 waiting"):
            made[0].wait_step()
    with drivers(groups(2)) as made:
        futures = [hand_over(driver, gradients(2, 0)[0], 3 + rank) for rank, driver in enumerate(made)]
        for future in futures:
            future.wait()
        for driver in made:
            with pytest.raises(ProtocolError, match=r"is at step|gave up: rank \d is at step"):
                driver.wait_step()


@contextmanager
def held(driver: CollectiveDriver) -> Iterator[threading.Event]:
    """The pushing thread of a rank waits for an event."""
    go_on, started = threading.Event(), driver._core.started

    def wait(exchange: Exchange) -> None:
        assert go_on.wait(20)
        started(exchange)

    driver._core.started = wait  # type: ignore[method-assign]
    try:
        yield go_on
    finally:
        go_on.set()


def test_driver_settles_interrupted_step() -> None:
    """Its groups change residuals until they complete: a checkpoint, or the next step, waits for that."""
    with drivers(groups(2)) as made, held(made[0]) as go_on:
        for driver, gradient in zip(made, gradients(2, 0), strict=True):
            driver.bucket_ready(bucket_of(), torch.from_numpy(gradient), 0, 0, last=False)
        waits = [
            threading.Thread(target=made[0].wait_step),
            threading.Thread(target=hand_over, args=(made[0], gradients(2, 1)[0], 0)),
        ]
        for thread in waits:
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
        go_on.set()
        hand_over(made[1], gradients(2, 1)[1], 0).wait()
        for thread in waits:
            thread.join(20)
            assert not thread.is_alive()


def test_bucket_buffer_keeps_inf_and_clamps_averages() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        buffer = BucketBuffer(
            torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=dtype), None, torch.futures.Future()
        )
        values = torch.as_tensor(buffer.values())
        values += 0.5
        buffer.fill(values, keeps_inf=True)
        assert buffer.buffer[0] == 1.5 and buffer.buffer.isinf().tolist() == [False, True, True, False]
        assert buffer.buffer[3].isnan()
    buffer = BucketBuffer(torch.zeros(2, dtype=torch.float16), None, torch.futures.Future())
    buffer.fill(torch.tensor([1e6, -1e6]))
    assert buffer.buffer.tolist() == [65504.0, -65504.0]
