"""A group of ranks: hosts, and the order of thin links, counts and gates."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from thinwire.engines.events import Event
from thinwire.errors import EngineError
from thinwire.transports.links import Rate
from thinwire_lab.bench import cells
from thinwire_lab.bench.cells import STOPPED, WARM, Gates, Rank, rank_command
from thinwire_lab.bench.rank_group import PORT, RankGroup
from thinwire_lab.engines.namespaces import available

THIN = Rate(10_000_000)


class Place(Event, frozen=True, kw_only=True):
    """Where a rank has been told to be."""

    rank: int
    gate: str
    device: str
    address: str


SCRIPT = """
import json, os, sys
role = json.loads(sys.argv[1])
said = {"device": os.environ["GLOO_SOCKET_IFNAME"], "address": os.environ["MASTER_ADDR"]}
print(json.dumps({"event": "place", "rank": role["rank"], "gate": role["gate"], **said}))
"""


def command(rank: Rank) -> list[str]:
    return [sys.executable, "-c", SCRIPT, rank_command(rank)[-2]]


def test_rank_group_without_hosts_has_no_links() -> None:
    with RankGroup([Place]) as group:
        group.start([Rank(rank=rank, **group.where) for rank in range(2)], command)
        found = sorted((event for _, event in group.engine.events(silence_s=60.0)), key=str)
        assert found == [Place(rank=rank, gate=group.gate, device="lo", address="127.0.0.1") for rank in range(2)]
        assert group.master.startswith("127.0.0.1:") and not group.master.endswith(f":{PORT}")
        group.begin(THIN)
        assert group.sent() is None and group.end() is None
        assert sorted(each.name for each in Path(group.gate).iterdir()) == ["stopped", "warm"]


@pytest.mark.skipif(not available()[0], reason="needs network namespaces")
def test_rank_group_spreads_ranks_over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str | None]] = []
    with RankGroup([Place], hosts=["one", "two"]) as group:
        start = group.engine.start

        def noted(name: str, argv: list[str], *, host: str | None, **more: Any) -> None:
            started.append((name, host))
            start(name, argv, host=host, **more)

        monkeypatch.setattr(group.engine, "start", noted)
        group.start([Rank(rank=rank, **group.where) for rank in range(4)], command)
        places = [event for _, event in group.engine.events(silence_s=60.0) if isinstance(event, Place)]
        host = group.master.removesuffix(f":{PORT}")
        assert {(each.device, each.address) for each in places} == {("eth0", host)} and len(places) == 4
    assert started == [("rank 0", "one"), ("rank 1", "one"), ("rank 2", "two"), ("rank 3", "two")]


def test_gate_blocks_until_it_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = threading.Event()

    def wait() -> None:
        Gates(str(tmp_path)).wait(STOPPED)
        passed.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    gates = Gates(tmp_path)
    assert not passed.wait(0.1)
    gates.open(STOPPED)
    waiting.join()
    gates.wait(STOPPED)  # it stays open for who comes later
    monkeypatch.setattr(cells, "SILENCE_S", 0.02)
    with pytest.raises(EngineError, match="'warm'"):
        gates.wait(WARM)
