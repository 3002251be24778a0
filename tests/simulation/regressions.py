"""Scenarios that broke a rule once, as small as they could be made, and what was wrong."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.scenario import Fault, Scenario

_PLAIN = Scenario(
    seed=0,
    design="3lc[s=1.0]",
    policy="bsp",
    workers=2,
    shards=1,
    steps=4,
    chunk_nbytes=1 << 15,
    min_workers=None,
    grace_s=2.0,
    checkpoint_every=0,
    latency=(0.001, 0.004),
    faults=(),
    harmless=False,
)

REGRESSIONS = {
    "backup workers that begin while tables have different versions: their first push was lost, and not reported": (
        replace(_PLAIN, seed=1344, policy="backup[1]", workers=3, steps=2, chunk_nbytes=16, latency=(0.001, 0.03))
    ),
    "local updates that begin late: the first step began one version early, and took back the others' update": replace(
        _PLAIN,
        seed=362,
        design="update",
        policy=None,
        steps=6,
        latency=(0.02, 0.08),
        faults=(Fault(kind="kill", at=0.7625403725431654, who=0, seconds=0.8763056053492392),),
    ),
}
