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
    "shared scales: one that came again was waited for at a step which it takes no part in": replace(
        _PLAIN,
        seed=2395,
        design="terngrad",
        policy=None,
        workers=3,
        steps=2,
        min_workers=1,
        grace_s=1.5,
        latency=(0.001, 0.03),
        faults=(Fault(kind="kill", at=0.13651786887876283, who=2, seconds=0.06804257333924008),),
    ),
    "shared scales: one that sat out a step at one shard, and not at the other, told it no scales": replace(
        _PLAIN,
        seed=3903,
        design="terngrad",
        policy=None,
        workers=3,
        shards=2,
        steps=2,
        min_workers=2,
        grace_s=1.5,
        latency=(0.02, 0.08),
        faults=(
            Fault(kind="cut", at=0.4824958481268176, who=1),
            Fault(kind="kill-at", at=0.4824958481268176, who=1, seconds=0.6567320358410489, point="resend.dial"),
        ),
    ),
    "one that replaced itself was refused after its first process's place was given up: no one heard of that update": (
        replace(
            _PLAIN,
            seed=2365,
            design="topk-sgd",
            shards=2,
            steps=2,
            min_workers=1,
            latency=(0.001, 0.03),
            faults=(
                Fault(kind="kill", at=0.8788546192004884, who=1, seconds=0.599910786972626),
                Fault(kind="freeze", at=0.19563323587143105, who=1, seconds=3.7009460763528454),
            ),
        )
    ),
    "one that one shard had dropped was sent back at the other for its own sake, each time it began anew": replace(
        _PLAIN,
        seed=21306,
        design="fp32",
        shards=2,
        min_workers=2,
        checkpoint_every=2,
        latency=(0.02, 0.08),
        faults=(
            Fault(kind="kill-server", at=0.7765748268845949, who=1, seconds=2.5894110106201897),
            Fault(kind="kill", at=0.7396620176128035, who=0, seconds=3.375479138387738),
        ),
    ),
    "two that went back voided each other's offers in turn": replace(
        _PLAIN,
        seed=10368,
        design="fp32",
        policy="adaptive[when=norm,threshold=0.3]",
        shards=2,
        chunk_nbytes=16,
        min_workers=1,
        checkpoint_every=2,
        faults=(
            Fault(kind="cut", at=0.9692269114416262, who=1, seconds=2.8227495517617482),
            Fault(kind="cut", at=0.03100746300590172, who=1),
            Fault(kind="kill-at", at=0.03100746300590172, who=1, seconds=0.2772277531161797, point="resend.opening"),
            Fault(kind="cut", at=1.0213590523134206, who=1),
            Fault(kind="kill-at", at=1.0213590523134206, who=1, seconds=0.30930208888840577, point="resend.dial"),
            Fault(kind="kill-server", at=0.4498680467219242, who=1, seconds=3.817435782875651),
        ),
    ),
    "an update without a late worker: its checkpoint was written after the next message, in half of the next": replace(
        _PLAIN,
        seed=30,
        design="stoch3",
        steps=20,
        chunk_nbytes=16,
        min_workers=1,
        straggler_grace_s=0.2,
        checkpoint_every=2,
        latency=(0.02, 0.08),
        faults=(Fault(kind="freeze", at=2.6473417570298996, who=1, seconds=1.2482551655187626),),
    ),
    "a worker that never came, where others had begun without it: they waited for it once another had died": replace(
        _PLAIN,
        seed=7235,
        design="doublesqueeze-topk",
        policy="backup[1]",
        workers=3,
        steps=6,
        chunk_nbytes=32768,
        min_workers=1,
        grace_s=2.0,
        latency=(0.001, 0.03),
        faults=(
            Fault(kind="kill", at=0.012196758228926546, who=2, seconds=2.5006506368696435),
            Fault(kind="kill-at", at=0.31152521927169863, who=1, seconds=2.686238684240317, point="update.push"),
        ),
    ),
}
