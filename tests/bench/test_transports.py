"""The data plane's study: both paths go through a real server and leave it in good order."""

from __future__ import annotations

import threading

import pytest

from thinwire.bench import transports as data_plane
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer


@pytest.mark.parametrize("path", data_plane.PATHS)
@pytest.mark.parametrize("chunks", data_plane.CHUNKS)
def test_path(path: str, chunks: str) -> None:
    core = ServerCore()
    seconds: list[float] = []

    def work(rank: int) -> None:
        run = data_plane.PATHS[path]
        chunk_nbytes = data_plane.CHUNKS[chunks]
        seconds.append(run(server.connect(), rank=rank, workers=2, steps=5, chunk_nbytes=chunk_nbytes))

    with MemoryServer(serving(core)) as server:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert core.finished and core.failed is None
    assert len(seconds) == 2 and min(seconds) > 0
    assert core.step == 5
    assert sum(table.values.numel() for table in core.tables) == sum(data_plane.SIZES)
    # Whether aggregated from ready frames or from a model, the weights of 1 have moved down.
    assert all(float(table.values.max()) < 1 for table in core.tables)
