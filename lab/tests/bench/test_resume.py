"""The keys under which benchmarks store results."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from thinwire_lab.bench.codecs import CodecsBench
from thinwire_lab.bench.harness import Bench
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.memory import MemoryBench
from thinwire_lab.bench.pays import PaysBench
from thinwire_lab.bench.race import Race
from thinwire_lab.chaos.storms import Storms

BENCHES: dict[str, tuple[type[Bench[Any, Any]], dict[str, Any]]] = {
    "codecs": (CodecsBench, {}),
    "hooks": (HooksBench, {}),
    "memory": (MemoryBench, {}),
    "pays": (PaysBench, {}),
    "race": (Race, {}),
    "race to a loss": (Race, {"models": ["byte-transformer-1m"]}),
    "storms": (Storms, {"runs": 2}),
}
"""Every benchmark, with the options that it needs here."""
OTHER = {"memory.ranks": 8, "storms.min_workers": 2, "storms.strikes": 1}
"""Numbers that may not be one larger."""

SAME = {
    *("race.timed_steps", "race.timed_seconds", "race.margin"),
    *("race to a loss.target_accuracy", "race to a loss.give_up", "race to a loss.margin"),
}
"""Options that change no measurement of such a race."""


def keys(bench: Bench[Any, Any]) -> list[dict[str, Any]]:
    return [bench.key(cell) for cell in [*bench.cells(), *bench.further({})]]


@pytest.mark.parametrize("name", BENCHES)
def test_resume_with_other_options_adds_results(name: str) -> None:
    kind, given = BENCHES[name]
    usual = kind(**given)
    first = keys(usual)
    assert json.loads(json.dumps(first)) == first, "what is stored is found again"
    for cell in usual.cells():
        assert not set(kind.key_options) & set(msgspec.to_builtins(cell)), "a field of the cell's would be lost"
    for option in fields(kind):  # type: ignore[arg-type]
        of_bench, value = f"{name}.{option.name}", getattr(usual, option.name)
        if option.init and of_bench not in SAME and isinstance(value, int | float):
            other = not value if isinstance(value, bool) else OTHER.get(of_bench, value + 1)
            assert keys(kind(**{**given, option.name: other})) != first, of_bench
