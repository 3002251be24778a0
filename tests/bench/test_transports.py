"""What a step costs: both paths go through a real server and leave it in good order."""

from __future__ import annotations

import threading

from thinwire.bench.transports import CHUNKS, PATHS, SIZES, TransportCell, TransportsBench
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer


def test_every_path_with_every_size_of_messages() -> None:
    for path in PATHS:
        for chunks in CHUNKS:
            take_steps(path, chunks)


def take_steps(path: str, chunks: str) -> None:
    core = ServerCore()
    seconds: list[float] = []

    def work(rank: int) -> None:
        cell = TransportCell(link="none", path=path, chunks=chunks, workers=2, steps=5, wanted="auto")
        seconds.append(PATHS[path](server.connect(), rank, cell))

    with MemoryServer(serving(core)) as server:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert core.finished and core.failed is None, (path, chunks)
    assert len(seconds) == 2 and min(seconds) > 0
    assert core.step == 5
    assert sum(table.values.numel() for table in core.tables) == sum(SIZES)
    # Whether aggregated from ready frames or from a model, the weights of 1 have moved down.
    assert all(float(table.values.max()) < 1 for table in core.tables)


def test_the_grid() -> None:
    bench = TransportsBench(links=["none", "100 Mbit"], rounds=2)
    assert [cell.link for cell in bench.cells()] == ["none"] * 6 + ["100mbit"] * 6 and bench.rounds == 2
    both = TransportsBench(links=["none"], security=["none", "tls"]).cells()
    assert [cell.security for cell in both] == ["none", "tls"] * 6, "pairs take turns"
    assert bench.thin_link() == ("100 Mbit", "auto") and TransportsBench(links=["none"]).thin_link()[0] is None
