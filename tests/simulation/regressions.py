"""Scenarios that broke a rule once, as small as they could be made, and what was wrong."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from typing import Any

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

_TEXT = """\
backup workers that begin while tables have different versions: their first push was lost, and not reported
    seed=1344 policy=backup[1] workers=3 steps=2 chunk_nbytes=16 latency=(0.001,0.03)
local updates that begin late: the first step began one version early, and took back the others' update
    seed=362 design=update policy=None steps=6 latency=(0.02,0.08)
    kill 0.7625403725431654 0 0.8763056053492392
shared scales: one that came again was waited for at a step which it takes no part in
    seed=2395 design=terngrad policy=None workers=3 steps=2 min_workers=1 grace_s=1.5 latency=(0.001,0.03)
    kill 0.13651786887876283 2 0.06804257333924008
shared scales: one that sat out a step at one shard, and not at the other, told it no scales
    seed=3903 design=terngrad policy=None workers=3 shards=2 steps=2 min_workers=2 grace_s=1.5 latency=(0.02,0.08)
    cut 0.4824958481268176 1 0.0
    kill-at 0.4824958481268176 1 0.6567320358410489 resend.dial
one that replaced itself was refused after its first process's place was given up: no one heard of that update
    seed=2365 design=topk-sgd shards=2 steps=2 min_workers=1 latency=(0.001,0.03)
    kill 0.8788546192004884 1 0.599910786972626
    freeze 0.19563323587143105 1 3.7009460763528454
one that one shard had dropped was sent back at the other for its own sake, each time it began anew
    seed=21306 design=fp32 shards=2 min_workers=2 checkpoint_every=2 latency=(0.02,0.08)
    kill-server 0.7765748268845949 1 2.5894110106201897
    kill 0.7396620176128035 0 3.375479138387738
two that went back voided each other's offers in turn
    seed=10368 design=fp32 policy=adaptive[when=norm,threshold=0.3] shards=2
    chunk_nbytes=16 min_workers=1 checkpoint_every=2
    cut 0.9692269114416262 1 2.8227495517617482
    cut 0.03100746300590172 1 0.0
    kill-at 0.03100746300590172 1 0.2772277531161797 resend.opening
    cut 1.0213590523134206 1 0.0
    kill-at 1.0213590523134206 1 0.30930208888840577 resend.dial
    kill-server 0.4498680467219242 1 3.817435782875651
a worker that never came, where others had begun without it: they waited for it once another had died
    seed=7235 design=doublesqueeze-topk policy=backup[1] workers=3 steps=6 min_workers=1 latency=(0.001,0.03)
    kill 0.012196758228926546 2 2.5006506368696435
    kill-at 0.31152521927169863 1 2.686238684240317 update.push
all were away for too long, at two shards, and nobody had checkpoints: the training ended
    seed=8236 design=update policy=None shards=2 steps=6 min_workers=1 grace_s=1.5 latency=(0.001,0.03)
    freeze 0.5268945019519499 1 3.7417868912501016
    partition 0.4097276126338357 0 3.4077885810287594 down
all were away for too long, and the shard had no step to offer but the one where it was
    seed=52956 design=fp32 policy=adaptive[when=norm,threshold=0.3] steps=2 min_workers=1 latency=(0.02,0.08)
    partition 0.44730482707987396 0 3.1002526156863937 up down
    kill 0.22103596681739843 1 3.9667153950442824
a session's first connection, whose packets came after those of its second, took the session back
    seed=34826 design=topk-sgd shards=2 steps=2 latency=(0.02,0.08) harmless=True
    slow 0.023044739148067987 1 0.27395467330519013
    cut 0.5448345347227431 1 0.11597931767647192
a shard that died twice had forgotten the beginning, which was all that the other one had
    seed=46656 design=entropy policy=local[2] shards=2 steps=6
    min_workers=1 grace_s=1.5 checkpoint_every=2 latency=(0.001,0.03)
    kill-server 0.7046766016586014 0 0.40351701449671645
    kill-server-at 0.22438243746263833 1 0.06147320000743379 checkpoint.forced
answers left before a checkpoint was on the disk, and the other shard went on and forgot that step
    seed=47672 policy=ssp[staleness=1,mode=aggressive] shards=2 checkpoint_every=2
    kill-server-at 0.03728439970639863 0 0.6443187166524741 checkpoint.rename
workers that wanted to go back alone: the update that waited for them was made without them
    seed=54966 design=topk-sgd workers=4 shards=2 steps=2 grace_s=1.5 checkpoint_every=2 harmless=True
    kill-server 0.05209502120278331 1 0.2639413690834028
one that was given up wanted to go back after the others had left: the training, which was over, failed
    seed=113540 design=terngrad policy=None steps=6 min_workers=1 checkpoint_every=2 latency=(0.02,0.08)
    partition 0.4449418154292476 0 3.083291880749392 down
all went back to the beginning, and one that was to have begun late was not expected there
    seed=11502 design=terngrad policy=None steps=2 min_workers=2 grace_s=1.5 checkpoint_every=2 latency=(0.02,0.08)
    kill 0.32569836030277594 1 0.47431034560579427
    partition 0.8407046191605967 0 2.7517113904876895 up down
backup workers removed the step that one had which was cut off before it had said so
    seed=34040 design=doublesqueeze-topk policy=backup[1] workers=3 steps=6
    chunk_nbytes=16 checkpoint_every=2 harmless=True
    partition 0.04954981162655528 1 0.14948370302697195 up down
    kill-server 0.13802388456921308 0 0.05
one that began late at one shard pushed what it sat out to another, resumed, of before that one's step
    seed=816256 shards=2 steps=8 checkpoint_every=2 survives=True
    kill 0.186805 1 0.5
    kill-server 0.290176 1 0.3
one that was refused where another one had begun anew closed the session in which it was to go back
    seed=64 shards=2 checkpoint_every=2 latency=(0.001,0.03) survives=True
    kill 0.3657310096190378 1 0.5
    kill-server 0.30358096187987826 1 0.5
two that had died kept each other from going back, by the connections of their dead processes
    seed=4067 design=3lc[s=1.75] workers=4 shards=2 steps=8 chunk_nbytes=16 checkpoint_every=2 survives=True
    kill 0.1797584239241307 3 0.7066668058762221
    kill-server 0.42417945935125423 0 0.1282816136333969
    kill 0.403940853858466 0 0.14520226935505465
learners: the last one, which had come back, waited at the end for as many as a merge needs while all are there
    seed=18 design=decoupled[h=2,fragments=1,quorum=3,grace=0.0,outer_lr=1.0,outer_momentum=0.0,nesterov=false]
    policy=None workers=4 shards=2 grace_s=0.3 slower=(1.0,1.3,3.0,1.0)
    cut 0.11846132655570982 3 0.5792896976677121
learners: one that took a version after its flush had what adding it rounded
    seed=36 design=decoupled[h=4,fragments=2,quorum=1,grace=0.5,codec=fp32,merge=radial,discount=0.0]
    policy=None workers=3 shards=2 steps=6 min_workers=1 grace_s=0.3 slower=(3.0,1.0,1.0)
    cut 0.10486689141320446 1 0.07146376160641246
    cut 0.18069173228389207 0 0.0
    cut-at 0.18069173228389207 0 2.6517590860033926 resend.accepted
learners: one that was gone before a first contribution, or of a fixed number, was waited for by all others
    seed=1 design=decoupled[h=2,fragments=1,quorum=2,grace=0.01,codec=fp32]
    policy=None workers=3 steps=12 grace_s=0.3 slower=(1.0,1.0,3.0)
    kill 0.2 1 4.0
"""
"""What was wrong; how the scenario differs from the plain one; each fault: kind, at, who, seconds, and way or point."""


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _read(text: str) -> dict[str, Scenario]:
    found: dict[str, Scenario] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            name, found[line] = line, _PLAIN
        elif "=" in line:
            changes = dict(each.split("=", 1) for each in line.split())
            found[name] = replace(found[name], **{key: _value(value) for key, value in changes.items()})
        else:
            kind, at, who, seconds, *rest = line.split()
            where = {"ways" if kind == "partition" else "point": " ".join(rest)}
            fault = Fault(kind=kind, at=float(at), who=int(who), seconds=float(seconds), **where)
            found[name] = replace(found[name], faults=(*found[name].faults, fault))
    return found


REGRESSIONS = _read(_TEXT)
"""By what was wrong."""
