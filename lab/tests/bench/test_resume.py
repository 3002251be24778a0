"""What every benchmark stores its results by: found again in a file, and apart where something else is measured."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from thinwire_lab.bench.clock import ClockBench
from thinwire_lab.bench.codecs import CodecsBench
from thinwire_lab.bench.fsdp import FsdpBench
from thinwire_lab.bench.harness import Bench
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.memory import MemoryBench
from thinwire_lab.bench.pays import PaysBench
from thinwire_lab.bench.race import Race
from thinwire_lab.bench.updates import UpdatesBench
from thinwire_lab.chaos.outcome import Outcome
from thinwire_lab.chaos.soak import Soak
from thinwire_lab.chaos.storms import Storms

BENCHES: dict[str, tuple[type[Bench[Any, Any]], dict[str, Any]]] = {
    "clock": (ClockBench, {"model": "mlp", "data": "digits"}),
    "codecs": (CodecsBench, {}),
    "fsdp": (FsdpBench, {}),
    "hooks": (HooksBench, {}),
    "memory": (MemoryBench, {}),
    "pays": (PaysBench, {}),
    "race": (Race, {}),
    "race to a loss": (Race, {"models": ["byte-transformer-1m"]}),
    "updates": (UpdatesBench, {}),
    "storms": (Storms, {"runs": 2}),
    "soak": (Soak, {}),
}
"""Every benchmark, with the options that it needs here."""

OTHER: dict[str, Any] = {
    "batch": 3,
    "bucket_cap_mb": 100,
    "cores": 64,
    "data": "mnist",
    "data_root": "elsewhere",
    "design": "fp32",
    "designs": ["local-sgd[h=8]"],
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
    "shaping": "application",
    "straggler_grace_s": 0.5,
    "elements": [1000],
    "zero_fraction": [0.5],
    "strikes": 1,
    "consistency": "ssp[staleness=3]",
    "checkpoint_every": 11,
    "clock.workers": [3],
    "fsdp.hooks": ["fsdp:none"],
    "memory.layers": [2, 3],
    "memory.ranks": 8,
    "updates.data": "python-text[train=1000]",
    "updates.models": ["byte-transformer"],
    "race to a loss.data": "python-text[train=1000]",
    "race to a loss.models": ["byte-transformer"],
}
"""Another value of options that are no number; of those that are, another number will do."""
SAME = {
    *("race.rates", "race.timed_steps", "race.timed_seconds", "race.margin"),
    *("race to a loss.target_accuracy", "race to a loss.give_up", "race to a loss.margin"),
    *(f"{name}.device" for name in ("codecs", "hooks", "memory", "race", "race to a loss")),
}
"""Options that change no measurement of such a race; and devices, of which there is one without a GPU."""


def keys(bench: Bench[Any, Any]) -> list[dict[str, Any]]:
    return [bench.key(cell, number) for cell in bench.cells() for number in range(bench.rounds)]


@every_bench
def test_what_is_measured_with_other_options_is_stored_beside(name: str) -> None:
    kind, given = BENCHES[name]
    usual = kind(**given)
    first = keys(usual)
    assert json.loads(json.dumps(first)) == first, "what is stored is found again"
    for cell in usual.cells():
        assert not set(kind.key_options) & set(msgspec.to_builtins(cell)), "a field of the cell's would be lost"
    for option in fields(kind):  # type: ignore[arg-type]
        of_bench, value = f"{name}.{option.name}", getattr(usual, option.name)
        if not option.init or of_bench in SAME:
            continue
        other = OTHER.get(of_bench, OTHER.get(option.name))
        if other is None:
            other = not value if isinstance(value, bool) else value + 1
        assert other != value, of_bench
        assert keys(kind(**{**given, option.name: other})) != first, of_bench


