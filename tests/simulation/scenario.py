"""What a seed means: a training, and what happens to it. Plain values, so that a failing one can be made smaller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from thinwire.policies.consistency import consistency
from thinwire.policies.designs import design

POLICIES = (
    "bsp",
    "ssp[1]",
    "ssp[staleness=1,mode=aggressive]",
    "ssp[staleness=1,mode=traditional]",
    "asp",
    "backup[1]",
    "local[2]",
    "adaptive[when=norm,threshold=0.3]",
)
TRAININGS: tuple[tuple[str, str | None], ...] = (
    *(("fp32", policy) for policy in POLICIES),
    *(("3lc[s=1.0]", policy) for policy in POLICIES),
    ("3lc[s=1.75]", "bsp"),
    ("stoch3", "bsp"),
    ("topk-sgd", "bsp"),
    ("mps", None),
    ("doublesqueeze-1bit", "bsp"),
    ("doublesqueeze-topk", "backup[1]"),
    ("terngrad", None),
    ("entropy", "local[2]"),
    ("update", None),
    ("local-sgd[h=2]", None),
    ("diloco[h=2,codec=3lc]", None),
    ("sparseloco[h=2]", None),
)
"""Designs and policies: every policy over a plain and a lossy delta downlink, every other downlink, local updates."""

POINTS = (
    "resend.dial",
    "resend.opening",
    "resend.accepted",
    "resend.packet",
    "join.sent",
    "join.welcome",
    "join.values",
    "update.push",
    "update.pull",
)
"""Where a worker may be hit, by name."""
SERVER_POINTS = ("update.received", "update.answered", "update.sent")
"""Where a server may be: before a push, after it and before its answers leave, between two of the answers."""
CHECKPOINT_POINTS = ("checkpoint.write", "checkpoint.forced", "checkpoint.rename", "checkpoint.sync")
"""What a disk is asked for, each before it is done."""

WITHIN, BEYOND = (0.05, 0.9), (2.5, 4.0)
"""Seconds that a worker is away: less than the server waits, or more."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens.

    Args:
        kind: what: a method of `Faults`.
        at: virtual seconds after the start; with a point, not before then.
        who: a worker's rank, or a shard.
        seconds: how long it lasts, or how long a dead process stays away.
        ways: of a partition: `up`, `down` or `up down`.
        point: a fault point by name, in place of a time.
    """

    kind: str
    at: float
    who: int = 0
    seconds: float = 0.0
    ways: str = ""
    point: str = ""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One training and its faults.

    Args:
        seed: of every choice that is not written here.
        design, policy: as users write them; None takes the design's own policy.
        workers, shards, steps: how many.
        chunk_nbytes: after so many bytes a push leaves: after every table, or once a step.
        min_workers: of the server's.
        grace_s: how long the server waits for a worker.
        checkpoint_every: steps between two checkpoints; 0: none.
        latency: seconds that a packet takes, least and most.
        faults: what happens.
        harmless: whether nothing lasts longer than the server waits, and no worker dies; servers may, where there are
            checkpoints.
        slower: how many times longer a step of each worker takes; nothing: all take as long.
        survives: whether all write checkpoints, and all that die are back sooner than the server gives a worker up: the
            training does not end before a worker has reached the last step.
    """

    seed: int
    design: str
    policy: str | None
    workers: int
    shards: int
    steps: int
    chunk_nbytes: int
    min_workers: int | None
    grace_s: float
    checkpoint_every: int
    latency: tuple[float, float]
    faults: tuple[Fault, ...]
    harmless: bool
    survives: bool = False
    slower: tuple[float, ...] = ()

    @property
    def lockstep(self) -> bool:
        """Whether every run has the same bits, whatever the order of arrivals."""
        terms = consistency(self.consistency).terms(self.workers)
        return terms.lockstep and self.policy != "adaptive[when=norm,threshold=0.3]"

    @property
    def repeats(self) -> bool:
        """Whether a training that reaches its end has the bits of one that nothing disturbed."""
        return self.harmless and self.lockstep

    @property
    def consistency(self) -> str:
        return self.policy or design(self.design).consistency

    @property
    def decoupled(self) -> bool:
        return consistency(self.consistency).decoupled

    @property
    def gives_model(self) -> bool:
        return design(self.design).downlink != "gradient"


def scenario(seed: int) -> Scenario:
    chance = Random(seed)
    name, policy = chance.choice(TRAININGS)
    workers = chance.choice((2, 2, 2, 3, 3, 4))
    harmless = chance.random() < 0.4
    elastic = not harmless and chance.random() < 0.7
    spare = policy == "backup[1]"
    given = Scenario(
        seed=seed,
        design=name,
        policy=policy,
        workers=max(workers, 3) if spare else workers,
        shards=chance.choice((1, 1, 1, 2)),
        steps=chance.choice((4, 4, 6)),
        chunk_nbytes=chance.choice((16, 1 << 15, 1 << 15)),
        min_workers=chance.choice((1, 1, 2)) if elastic else None,
        grace_s=chance.choice((1.5, 2.0)),
        checkpoint_every=0,
        latency=chance.choice(((0.001, 0.004), (0.001, 0.03), (0.02, 0.08))),
        faults=(),
        harmless=harmless,
    )
    saves = given.consistency != "asp" and chance.random() < 0.35
    given = replaced(given, chance, checkpoint_every=2 if saves else 0)
    return losing(given, Random(f"deaths while another is awaited of {seed}"))


def learners(seed: int) -> Scenario:
    """What a seed means with `--learners`: workers that never wait for each other."""
    chance = Random(f"learners {seed}")
    workers, h, harmless = chance.choice((1, 2, 2, 3, 3, 4)), chance.choice((2, 3, 4)), chance.random() < 0.4
    options = {
        "h": h,
        "fragments": chance.randint(1, min(h, 3)),
        "quorum": chance.randint(1, workers),
        "grace": chance.choice((0.0, 0.01, 0.05, 0.5)),
        "codec": chance.choice(("fp32", "fp32", "3lc")),
        "merge": chance.choice(("mean", "mean", "radial")),
        "discount": chance.choice((0.0, 0.5)),
        **chance.choice(({"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": "false"}, {"outer_momentum": 0.6}, {})),
    }
    given = Scenario(
        seed=seed,
        design=f"decoupled[{','.join(f'{name}={value}' for name, value in options.items())}]",
        policy=None,
        workers=workers,
        shards=chance.choice((1, 1, 2)),
        steps=h * chance.choice((2, 4, 6)) + chance.choice((0, 0, 1)),
        chunk_nbytes=1 << 15,
        min_workers=None if harmless or chance.random() < 0.3 else chance.randint(1, min(2, workers)),
        grace_s=1.5 if harmless else chance.choice((0.3, 1.5)),
        checkpoint_every=0,
        latency=chance.choice(((0.001, 0.004), (0.001, 0.03), (0.02, 0.08))),
        faults=(),
        harmless=harmless,
        slower=tuple(chance.choice((1.0, 1.0, 1.3, 3.0)) for _ in range(workers)),
    )
    given = replaced(given, chance, checkpoint_every=2 if chance.random() < 0.35 else 0)
    sooner = 0.01 * max(given.slower) / (0.25 + 4 * given.latency[1])  # where nobody waits, it is over sooner
    # Before the first contribution, a stranger may bring another training where the only learner is away.
    faults = [each for each in given.faults if workers > 1 or each.kind != "hostile"]
    return replace(given, faults=tuple(replace(each, at=0.1 + sooner * each.at) for each in faults))


def losing(given: Scenario, chance: Random) -> Scenario:
    """The scenario, or now and then one in which a worker dies, and is replaced, while all wait for another one."""
    if given.min_workers is None or chance.random() < 0.85:
        return given
    at = chance.uniform(0.1, 0.9) * given.steps * (0.02 + 2 * sum(given.latency) * given.shards)
    awaited, dies = chance.sample(range(given.workers), 2)
    away = Fault(kind="freeze", at=at, who=awaited, seconds=chance.uniform(0.4, 0.9) * given.grace_s)
    death = Fault(kind="kill", at=at + chance.uniform(0.0, 0.3), who=dies, seconds=chance.uniform(*WITHIN))
    return replace(given, faults=(*given.faults[:1], away, death))


def replaced(given: Scenario, chance: Random, *, checkpoint_every: int) -> Scenario:
    """The scenario with faults that fit it."""
    span = 0.25 * given.steps + 4 * given.steps * given.latency[1]
    faults: list[Fault] = []
    for _ in range(chance.choice((0, 1, 2, 2, 3, 4))):
        fault = _fault(given, chance, span, saves=checkpoint_every > 0)
        if fault.point.startswith("resend"):  # first there must be something to send again
            faults.append(Fault(kind="cut", at=fault.at, who=fault.who))
        faults.append(fault)
    return Scenario(**{**vars(given), "checkpoint_every": checkpoint_every, "faults": tuple(faults)})


def _fault(given: Scenario, chance: Random, span: float, *, saves: bool) -> Fault:
    at, who = chance.uniform(0.0, span), chance.randrange(given.workers)
    # A worker whose reconnection is hit again is still away: several faults must stay below the grace together.
    seconds = chance.uniform(0.05, 0.3) if given.harmless else chance.uniform(*chance.choice((WITHIN, WITHIN, BEYOND)))
    kinds = ["cut", "cut", "cut-at", "cut-at", "partition", "freeze", "slow", "hostile", "hostile"]
    if not given.harmless:
        kinds += ["kill", "kill", "kill-at", "kill-at", "clock", "freeze-server"]
    if saves:
        kinds += ["kill-server", "kill-server", "kill-server-at", "kill-server-at", "slow-disk"]
    kind = chance.choice(kinds)
    point, ways = "", ""
    if kind in ("cut-at", "kill-at"):
        point = chance.choice(POINTS)
    elif kind == "kill-server-at":
        point, who = chance.choice(SERVER_POINTS + CHECKPOINT_POINTS), chance.randrange(given.shards)
    elif kind == "partition":
        ways = chance.choice(("up", "down", "up down"))
    elif kind in ("kill-server", "freeze-server", "slow-disk"):
        who = chance.randrange(given.shards)
    if kind in ("freeze-server", "slow-disk"):
        seconds = min(seconds, 0.3)
    return Fault(kind=kind, at=at, who=who, seconds=seconds, ways=ways, point=point)
