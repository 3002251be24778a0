"""What every benchmark stores its results by: found again in a file, and apart where something else is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.bench.chaos.deaths import BackupDeath, ServerDeath, WorkerDeath
from thinwire.bench.chaos.soak import Soak
from thinwire.bench.chaos.storms import Storm, Storms
from thinwire.bench.clock import ClockBench
from thinwire.bench.codecs import CodecsBench
from thinwire.bench.designs import DesignsBench
from thinwire.bench.doors import DoorsBench
from thinwire.bench.fsdp import FsdpBench
from thinwire.bench.harness import Bench
from thinwire.bench.hooks import HooksBench
from thinwire.bench.hostile import HostileBench
from thinwire.bench.loss_race import LossRace
from thinwire.bench.pays import PaysBench
from thinwire.bench.race import RaceBench
from thinwire.bench.server import ServerBench
from thinwire.bench.transports import TransportsBench
from thinwire.bench.updates import UpdatesBench

GIVEN: dict[type[Bench[Any, Any]], dict[str, Any]] = {
    BackupDeath: {},
    ClockBench: {"model": "mlp", "data": "digits"},
    CodecsBench: {},
    DesignsBench: {},
    DoorsBench: {"examples": Path(__file__).parents[2] / "examples" / "doors"},
    FsdpBench: {},
    HooksBench: {},
    HostileBench: {},
    LossRace: {},
    PaysBench: {},
    RaceBench: {},
    ServerBench: {},
    ServerDeath: {},
    Soak: {},
    Storm: {},
    Storms: {"runs": 2},
    TransportsBench: {},
    UpdatesBench: {},
    WorkerDeath: {},
}
"""Every benchmark, with what it cannot do without here."""

every_bench = pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)


def keys(bench: Bench[Any, Any]) -> list[dict[str, Any]]:
    return [bench.key(cell, number) for cell in bench.cells() for number in range(bench.rounds)]


@every_bench
def test_what_is_stored_is_found_again(kind: type[Bench[Any, Any]]) -> None:
    for key in keys(kind(**GIVEN[kind])):
        assert json.loads(json.dumps(key)) == key
