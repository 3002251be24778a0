"""What every benchmark stores its results by: found again in a file, and apart where something else is measured."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from thinwire_lab.bench.designs import DesignsBench
from thinwire_lab.bench.doors import DoorsBench
from thinwire_lab.bench.hostile import HostileBench
from thinwire_lab.bench.server import ServerBench
from thinwire_lab.bench.transports import TransportsBench

from thinwire_lab.bench.clock import ClockBench
from thinwire_lab.bench.codecs import CodecsBench
from thinwire_lab.bench.fsdp import FsdpBench
from thinwire_lab.bench.harness import Bench
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.loss_race import LossRace
from thinwire_lab.bench.memory import MemoryBench
from thinwire_lab.bench.pays import PaysBench
from thinwire_lab.bench.race import RaceBench
from thinwire_lab.bench.updates import UpdatesBench
from thinwire_lab.chaos.deaths import BackupDeath, ServerDeath, WorkerDeath
from thinwire_lab.chaos.outcome import Outcome
from thinwire_lab.chaos.soak import Soak
from thinwire_lab.chaos.storms import Storm, Storms

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
    MemoryBench: {},
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


OTHER: dict[str, Any] = {
    "attacks": ["half-open joins"],
    "bucket_cap_mb": 100,
    "batch": 3,
    "blocks": 9,
    "cores": 64,
    "data": "mnist",
    "data_root": "elsewhere",
    "design": "fp32",
    "designs": ["local-sgd[h=8]"],
    "doors": ["DDP"],
    "faults": ["kill"],
    "hooks": ["onebit"],
    "link": "20mbit",
    "links": ["20mbit"],
    "lr": 0.125,
    "methods": ["none"],
    "min_workers": 2,
    "model": "lenet5",
    "models": ["lenet5"],
    "only": ["3lc"],
    "rates": [0.5],
    "security": ["tls"],
    "shaping": "application",
    "straggler_grace_s": 0.5,
    "elements": [1000],
    "zero_fraction": [0.5],
    "ClockBench.workers": [3],
    "FsdpBench.hooks": ["fsdp:none"],
    "MemoryBench.layers": [2, 3],
    "MemoryBench.ranks": 8,
    "LossRace.data": "python-text[train=1000]",
    "LossRace.models": ["byte-transformer"],
    "ServerBench.workers": [3],
    "UpdatesBench.data": "python-text[train=1000]",
    "UpdatesBench.models": ["byte-transformer"],
}
"""Another value of options that are no number; of those that are, another number will do."""
SAME = (
    *("DoorsBench.examples", "LossRace.margin", "LossRace.files", "LossRace.lr"),
    *("Storms.design", *(f"{name}Bench.device" for name in ("Codecs", "Hooks", "Memory", "Race")), "LossRace.device"),
)
"""Options that change nothing of what is measured: where scripts are, and what is said of losses. A file of `files` is
in the cells of the methods that need it, by its digest; a race to a loss has rates, and each of the storms a design.
There is no other device where there is no GPU."""


@every_bench
def test_what_is_measured_with_other_options_is_stored_beside(kind: type[Bench[Any, Any]]) -> None:
    usual = kind(**GIVEN[kind])
    first = keys(usual)
    for cell in usual.cells():
        assert not set(kind.key_options) & set(msgspec.to_builtins(cell)), "a field of the cell's would be lost"
    assert all(key | kind.stored_defaults() == key for key in first), "older files stay good"
    for option in fields(kind):  # type: ignore[arg-type]
        by_kind, value = f"{kind.__name__}.{option.name}", getattr(usual, option.name)
        if not option.init or by_kind in SAME:
            continue
        if by_kind in OTHER or option.name in OTHER:
            other = OTHER.get(by_kind, OTHER.get(option.name))
        else:
            other = not value if isinstance(value, bool) else value + 1
        assert other != value, by_kind
        assert keys(kind(**{**GIVEN[kind], option.name: other})) != first, by_kind


@every_bench
def test_rows_keep_what_was_asked_beside_what_was_measured(kind: type[Bench[Any, Any]]) -> None:
    """A rate alone has one name for both: the best of the grid, where none was asked for."""
    asked = {name for cell in kind(**GIVEN[kind]).cells() for name in msgspec.to_builtins(cell)}
    for figures in kind.kinds:
        names = {each.name for each in msgspec.structs.fields(figures)}
        if figures is Outcome:
            names = set(Outcome(problems=[], faults=[], steps=1).row())
        assert asked & names <= {"lr"}, figures
