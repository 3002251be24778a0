"""Where ranks run and wait, and in which order links become thin, bytes are counted and gates open."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from thinwire.engines.events import Event
from thinwire.errors import EngineError
from thinwire.transports.links import Rate
from thinwire_lab.bench import rank_group, roles
from thinwire_lab.bench.rank_group import PORT, RankGroup, Traffic
from thinwire_lab.bench.roles import STOPPED, WARM, Gates, Role, role_command
from thinwire_lab.engines.namespaces import Count, available

THIN = Rate(10_000_000)


class Place(Event, frozen=True, kw_only=True):
    """Where a rank has been told to be."""

    rank: int
    gate: str
    device: str
    address: str


class Placed(Role, frozen=True, kw_only=True):
    rank: int
    gate: str


SCRIPT = """
import json, os, sys
role = json.loads(sys.argv[1])
said = {"device": os.environ["GLOO_SOCKET_IFNAME"], "address": os.environ["MASTER_ADDR"]}
print(json.dumps({"event": "place", "rank": role["rank"], "gate": role["gate"], **said}))
"""


def command(role: Placed) -> list[str]:
    return [sys.executable, "-c", SCRIPT, role.command()[-1]]


class Watched:
    """A fabric that writes down what is asked of it, and which gates are open; every look finds 100 bytes more."""

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        assert set(rates.values()) == {Rate(None)}, "ranks join and warm up without a limit"
        self.addresses = {host: f"10.0.0.{number}" for number, host in enumerate(rates, start=1)}
        self.gate = Path()
        self.did: list[Any] = []
        self._sent = 0

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.did.append("closed")

    def set_rates(self, rates: Mapping[str, Rate]) -> None:
        assert set(rates) == set(self.addresses)
        self._note(str(next(iter(rates.values()))))

    def sent(self, host: str) -> Count:
        self._note(f"{host} sent")
        self._sent += 100
        return Count(self._sent, 1)

    def received(self, host: str) -> Count:
        self._note(f"{host} received")
        return Count(7, 1)

    def _note(self, what: str) -> None:
        self.did.append((what, sorted(each.name for each in self.gate.iterdir())))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RankGroup, Watched]]:
    made: list[Watched] = []

    def fabric(rates: Mapping[str, Rate]) -> Watched:
        made.append(Watched(rates))
        return made[-1]

    monkeypatch.setattr(rank_group, "Fabric", fabric)

    def group(**options: Any) -> tuple[RankGroup, Watched]:
        found = RankGroup([Place], **options)
        made[-1].gate = Path(found.gate)
        return found, made[-1]

    return group


def test_links_are_thin_and_bytes_counted_before_a_gate_opens(
    watched: Callable[..., tuple[RankGroup, Watched]],
) -> None:
    group, fabric = watched(hosts=["a", "b"], also=["server"])
    with group:
        assert group.master == f"10.0.0.1:{PORT}" and list(fabric.addresses) == ["a", "b", "server"]
        assert group.traffic() is None and fabric.did == []
        group.begin(THIN)
        looks = ["a sent", "b sent", "a received", "b received"]
        assert fabric.did == [(what, []) for what in ["10mbit", *looks]], "the server's link is no rank's"
        fabric.did.clear()
        group.make_thin(THIN)
        group.make_thin(None)
        assert fabric.did == [], "no queue is replaced for nothing"
        fabric.did.clear()
        assert group.end(Rate(None)) == Traffic(300 + 400 - (100 + 200), 0)
        assert fabric.did == [(what, ["warm"]) for what in ["none", *looks]]
        assert sorted(each.name for each in fabric.gate.iterdir()) == ["stopped", "warm"]
    assert fabric.did[-1] == "closed" and not fabric.gate.exists()


def test_links_stay_thin_at_the_end_unless_told(watched: Callable[..., tuple[RankGroup, Watched]]) -> None:
    group, fabric = watched(hosts=["a"])
    with group:
        group.begin(THIN)
        group.end()
    assert [what for what, _ in fabric.did[:-1]] == ["10mbit", "a sent", "a received", "a sent", "a received"]


def test_ranks_of_this_machine_have_no_links() -> None:
    with RankGroup([Place]) as group:
        group.start([Placed(rank=rank, gate=group.gate) for rank in range(2)], command)
        found = sorted((event for _, event in group.engine.events(silence_s=60.0)), key=str)
        assert found == [Place(rank=rank, gate=group.gate, device="lo", address="127.0.0.1") for rank in range(2)]
        assert group.master.startswith("127.0.0.1:") and not group.master.endswith(f":{PORT}")
        group.begin(THIN)
        assert group.traffic() is None and group.end() is None
        assert sorted(each.name for each in Path(group.gate).iterdir()) == ["stopped", "warm"]
    assert role_command(Placed(rank=3, gate="x"))[-1] == "--events"


@pytest.mark.skipif(not available()[0], reason="needs network namespaces")
def test_ranks_are_spread_over_hosts_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str | None]] = []
    with RankGroup([Place], hosts=["one", "two"]) as group:
        start = group.engine.start

        def noted(name: str, argv: list[str], *, host: str | None) -> None:
            started.append((name, host))
            start(name, argv, host=host)

        monkeypatch.setattr(group.engine, "start", noted)
        group.start([Placed(rank=rank, gate=group.gate) for rank in range(4)], command)
        places = [event for _, event in group.engine.events(silence_s=60.0) if isinstance(event, Place)]
        host = group.master.removesuffix(f":{PORT}")
        assert {(each.device, each.address) for each in places} == {("eth0", host)} and len(places) == 4
    assert started == [("rank 0", "one"), ("rank 1", "one"), ("rank 2", "two"), ("rank 3", "two")]


def test_a_rank_waits_until_its_gate_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(roles, "SILENCE_S", 0.02)
    with pytest.raises(EngineError, match="'warm'"):
        gates.wait(WARM)
