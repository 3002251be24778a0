"""Makes a failing scenario smaller while it breaks the same rule: fewer faults, steps, workers and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.scenario import Scenario
from thinwire.policies.consistency import Quorum, consistency


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], *, tries: int = 200) -> Scenario:
    """Returns the smallest scenario found that still fails."""
    found, left = scenario, tries
    while left > 0:
        for smaller in _smaller(found):
            left -= 1
            if fails(smaller):
                found = smaller
                break
            if left <= 0:
                return found
        else:
            return found
    return found


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios one size smaller, those that save most first."""
    faults = scenario.faults
    half = len(faults) // 2
    if half:
        yield replace(scenario, faults=faults[:half])
        yield replace(scenario, faults=faults[half:])
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    if scenario.shards > 1 and all(fault.who == 0 for fault in faults if "server" in fault.kind):
        yield replace(scenario, shards=1)
    policy = consistency(scenario.consistency)
    least = policy.k if isinstance(policy, Quorum) else 3 if scenario.policy == "backup[1]" else 2
    if scenario.workers > least and all(fault.who < scenario.workers - 1 for fault in faults):
        yield replace(scenario, workers=scenario.workers - 1)
    if scenario.steps > 2:
        yield replace(scenario, steps=scenario.steps - 2)
    if scenario.checkpoint_every and not any("server" in fault.kind for fault in faults):
        yield replace(scenario, checkpoint_every=0)
    if scenario.chunk_nbytes < 1 << 15:
        yield replace(scenario, chunk_nbytes=1 << 15)
