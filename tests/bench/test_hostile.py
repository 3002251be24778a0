"""The attacks of `bench hostile`: what is chosen, and what a row says. `tests/security` tries attacks one by one."""

from __future__ import annotations

import math

import pytest

from thinwire.bench.attacks import ATTACKS
from thinwire.bench.hostile import HostileBench, Suffered
from thinwire.errors import ConfigError


def test_attacks_are_chosen_by_name() -> None:
    assert [cell.attack for cell in HostileBench().cells()] == list(ATTACKS)
    [cell] = HostileBench(attacks=["half-open joins"], times=7, seconds=2.0).cells()
    assert (cell.attack, cell.times, cell.seconds) == ("half-open joins", 7, 2.0)
    with pytest.raises(ConfigError, match="attacks bribery; there are nothing, connects and drops"):
        HostileBench(attacks=["bribery"])
    with pytest.raises(ConfigError, match="seconds=inf; things are held for 0 seconds or more"):
        HostileBench(seconds=math.inf)


def test_a_server_that_did_not_survive_is_seen() -> None:
    bench = HostileBench(attacks=["nothing"])
    runs = [
        Suffered(grown_mb=1.5, threads=0, slowest_step_s=0.25, median_step_s=0.01, attack_s=2.0, served=served)
        for served in (True, False)
    ]
    [table] = bench.tables({bench.cells()[0]: runs})
    assert table.lines == [["nothing", "2.0", "+2", "+0", "0.25", "0.0100", "NO"]]
