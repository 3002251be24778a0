"""One table: its values, its copy at the workers, and the frames that come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sent_frames import as_frame
from thinwire.codecs import Codec, codec, decode
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.frames import Frame, pack
from thinwire.policies.consistency import Bsp
from thinwire.schema import TableSpec
from thinwire.server.copies import Copies
from thinwire.server.table import Table

PLAIN = codec("fp32")


def make(down: Codec = PLAIN, shape: tuple[int, ...] = (4, 25), workers: int = 1) -> Table:
    table = Table(TableSpec(name="w", shape=shape), PLAIN, down, Bsp().terms(workers))
    table.assign(PLAIN.encode(np.ones(shape, np.float32)), 0)
    return table


def update(table: Table, seed: int) -> bytes:
    table.values += 0.01 * torch.randn(table.spec.shape, generator=torch.Generator().manual_seed(seed))
    return publish(table)


def publish(table: Table) -> bytes:
    [(ranks, frame)] = table.publish(np.zeros(table.spec.shape, np.float32))
    assert ranks == set(range(len(table.given)))
    return as_frame(frame, table.spec.shape)


def test_whole_values_replace_all_copies_and_a_snapshot_is_the_workers() -> None:
    table = make()
    update(table, 0)
    table.assign(PLAIN.encode(np.zeros((4, 25), np.float32)), 5)
    assert table.version == 5
    assert not table.values.any() and not table.replica.any()
    table = make(codec("3lc", sparsity=1.75))
    update(table, 0)
    np.testing.assert_array_equal(decode(table.snapshot()).numpy(), table.replica)
    assert not np.array_equal(table.replica, table.values.numpy())


def test_tables_of_empty_and_scalar_shapes_are_updated() -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,)]
    for shape in shapes:
        table = make(codec("3lc"), shape)
        gradient, _ = table.look(PLAIN.encode(np.ones(shape, np.float32)))
        assert gradient is not None
        table.add(0, gradient)
        assert table.sum.shape == shape and (table.sum == 1).all()
        update(table, 0)
        assert table.version == 1 and decode(table.snapshot()).shape == shape


def test_an_update_that_gives_nan_is_not_sent() -> None:
    table = make(codec("3lc"))
    table.values[2, 3] = float("nan")
    before = table.replica.copy()
    with pytest.raises(NonFiniteError, match=r"after update 1: w: .*NaN"):
        publish(table)
    np.testing.assert_array_equal(table.replica, before)


def test_damaged_gradients_change_nothing() -> None:
    table = make(workers=2)
    good = PLAIN.encode(np.ones((4, 25), np.float32))
    with pytest.raises(ProtocolError, match="w: "):
        table.look(good[:-1])
    bad = pack(Frame("fp32", "fp32", (4, 25), payload=np.full(100, np.inf, np.float32).tobytes()))
    for rank, frame in enumerate((good, bad, good)):
        gradient, finite = table.look(frame)
        assert gradient is not None and finite
        if rank == 1:
            with pytest.raises(FrameError, match="w: the gradient of worker 1: the payload holds NaN or Inf"):
                table.add(rank, gradient)
        else:
            table.add(rank, gradient)
    np.testing.assert_array_equal(table.sum, np.full((4, 25), 2, np.float32))


def test_copies_part_only_where_workers_do() -> None:
    copies = Copies((3,), 4, keep_seen=False)
    for copy in copies.move({0, 1, 2, 3}):
        copy.values += 1
    assert len(copies) == 1
    for copy in copies.move({1, 2}):
        assert copy.owners == {1, 2}
        copy.values += 10
    assert len(copies) == 2
    for copy in copies.move({2, 3}):
        copy.values += 100
    assert [float(copies.of(rank)[0]) for rank in range(4)] == [1, 11, 111, 101]
    copies.assign(np.full(3, 7, np.float32), {0, 1, 3})
    assert [float(copies.of(rank)[0]) for rank in range(4)] == [7, 7, 111, 7] and len(copies) == 2
