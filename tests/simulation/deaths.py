"""What a seed means with `--deaths`: a worker and a shard, or more of them, die close together, and come back.

Seeds of their own, so that those of `scenario.py` mean what they always did.
"""

from __future__ import annotations

from random import Random

from tests.simulation.scenario import TRAININGS, Fault, Scenario
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import design

TOGETHER_S = 0.25
"""Between the first death and the last one at most."""
AWAY_S = (0.05, 0.8)
"""How long a dead process stays away: with the others' deaths and the way, less than a server waits."""

_TRAININGS = tuple(
    (name, policy)
    for name, policy in TRAININGS
    # Elsewhere shards cannot give the model to one that begins anew, or no worker writes checkpoints.
    if design(name).downlink != "gradient" and not consistency(policy or design(name).consistency).immediate
)


def deaths(seed: int) -> Scenario:
    """What a seed means: a training of a fixed number of workers, which all write checkpoints."""
    chance = Random(f"deaths {seed}")
    name, policy = chance.choice(_TRAININGS)
    workers, shards = chance.choice((2, 2, 3, 4)), chance.choice((1, 2, 2, 2))
    latency = chance.choice(((0.001, 0.004), (0.001, 0.03), (0.02, 0.08)))
    steps = 8
    span = steps * (0.02 + 2 * sum(latency) * shards)
    at = 0.1 + chance.uniform(0.1, 0.9) * span  # first all begin
    workers = max(workers, 3) if policy == "backup[1]" else workers
    dying = [("kill", chance.randrange(workers)), ("kill-server", chance.randrange(shards))]
    if chance.random() < 0.3:
        dying.append(chance.choice((("kill", chance.randrange(workers)), ("kill-server", chance.randrange(shards)))))
    return Scenario(
        seed=seed,
        design=name,
        policy=policy,
        workers=workers,
        shards=shards,
        steps=steps,
        chunk_nbytes=chance.choice((16, 1 << 15, 1 << 15)),
        min_workers=None,
        grace_s=2.0,
        checkpoint_every=2,
        latency=latency,
        faults=tuple(
            Fault(kind=kind, at=at + chance.uniform(0.0, TOGETHER_S), who=who, seconds=chance.uniform(*AWAY_S))
            for kind, who in dying
        ),
        harmless=False,
        survives=True,
    )
