"""When gradients are exchanged, how many complete an update, and how stale a worker's copy may be.

A policy answers a few questions and keeps no state; the server core and the worker core do the bookkeeping. An
**exchange** is one push and its pull; a worker's **clock** counts its exchanges. A table's **version** counts its
updates. Under every policy but `asp`, update v is made of gradients of clock v alone, so that staleness is exact,
nothing is counted twice, and staleness 0 is bulk-synchronous bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from thinwire.errors import ConfigError
from thinwire.policies.criteria import Criterion
from thinwire.policies.naming import Family, check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The answers of a policy for some number of workers: computed once, read by workers and shards.

    Args:
        workers: how many take part.
        quorum: how many gradients of the current clock complete an update.
        lead: how many clocks a push may be ahead of its table.
        immediate: every push is an update of its own, answered to its sender alone.
        barrier: all layers are pushed and pulled together, at the end of a step.
        elastic: workers may die and others join.
        decoupled: each worker counts its own steps, and an update merges the contributions that have come.

    Example:
        >>> terms = consistency("backup[1]").terms(workers=4)
        >>> terms.quorum, terms.partial_quorum, terms.accepts_newer, terms.owns_hyperparameters(rank=3)
        (3, True, True, True)
    """

    workers: int
    quorum: int
    lead: int
    immediate: bool
    barrier: bool
    elastic: bool = False
    decoupled: bool = False

    @property
    def has_common_clock(self) -> bool:
        """Whether all workers count the same exchanges; else each counts its own."""
        return not (self.immediate or self.decoupled)

    @property
    def runs_apart(self) -> bool:
        """Whether workers may be at different exchanges for as long as they like."""
        return not self.has_common_clock or self.partial_quorum

    @property
    def partial_quorum(self) -> bool:
        """Whether an update of a clock may be made without some workers' gradients, which then come too late."""
        return self.quorum < self.workers and self.has_common_clock

    @property
    def lockstep(self) -> bool:
        """Whether no worker is ever ahead of another by more than the exchange under way."""
        return self.quorum == self.workers and self.lead == 0 and not self.decoupled

    @property
    def accepts_newer(self) -> bool:
        """Whether a copy takes updates that it does not have to wait for."""
        return self.immediate or not self.lockstep

    def owns_hyperparameters(self, rank: int) -> bool:
        """Whether the rates and options in this worker's pushes count: worker 0's, or all where updates go without it.

        Args:
            rank: the worker's number.
        """
        return rank == 0 or not self.has_common_clock or self.any_rank_sets_rates

    @property
    def any_rank_sets_rates(self) -> bool:
        """Whether updates that several workers' gradients make may be made without worker 0, by others' rates."""
        return self.has_common_clock and (self.elastic or self.quorum < self.workers)


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """The questions that the cores ask. The default answers are those of bulk-synchronous training."""

    id: ClassVar[str]
    immediate: ClassVar[bool] = False
    """Whether every push is an update of its own, answered to its sender alone."""
    decoupled: ClassVar[bool] = False
    """Whether workers count their own steps, and an update merges the contributions that have come."""
    replicas_end_equal: ClassVar[bool] = True
    """Whether all workers hold the same bits once everybody has every update."""

    def exchanges(self, iteration: int) -> bool:
        """Whether iteration 0, 1, 2, … ends with an exchange; if not, its gradient is accumulated for the next one."""
        return True

    def iterations(self, clock: int) -> int:
        """How many iterations a worker has taken after so many exchanges.

        By default as `exchanges` says, one by one, which takes as long as there are iterations.
        """
        if type(self).exchanges is Consistency.exchanges:
            return clock
        iteration = exchanged = 0
        while exchanged < clock:
            exchanged += self.exchanges(iteration)
            iteration += 1
        return iteration

    def needs(self, clock: int) -> int:
        """The version that a table must have before the forward pass that follows `clock` exchanges."""
        return clock

    def quorum(self, workers: int) -> int:
        """How many gradients of the current clock complete an update."""
        return workers

    def lead(self) -> int:
        """How many clocks a worker's push may be ahead of the table."""
        return 0

    def barrier(self) -> bool:
        """Whether all layers are exchanged together at the end of a step, whatever the design's transmission is."""
        return False

    def criterion(self) -> Criterion | None:
        """Decides, per tensor, whether its pending gradient is sent; None sends always."""
        return None

    def terms(self, workers: int, *, elastic: bool = False) -> Terms:
        """Returns the answers that stay the same throughout a training of so many workers.

        Args:
            workers: how many.
            elastic: whether they may die and others join.

        Raises:
            ConfigError: an answer that can never be met.
        """
        check_count(f"{self.id}: the quorum of {workers} workers", self.quorum(workers), 1, workers)
        check_count(f"{self.id}: the lead", self.lead(), 0)
        return Terms(
            workers=workers,
            quorum=self.quorum(workers),
            lead=self.lead(),
            immediate=self.immediate,
            barrier=self.barrier(),
            elastic=elastic,
            decoupled=self.decoupled,
        )


@dataclass(frozen=True, kw_only=True)
class Bsp(Consistency):
    """Bulk-synchronous: every worker, every step (3LC §2.1)."""

    id: ClassVar[str] = "bsp"


@dataclass(frozen=True, kw_only=True)
class Asp(Consistency):
    """Totally asynchronous: each push is an update; a worker waits for the answers to its own pushes alone.

    Every worker (or group of workers with the same copy) gets separate deltas: the per-client sums of Wu 2018.
    """

    id: ClassVar[str] = "asp"
    immediate: ClassVar[bool] = True
    replicas_end_equal: ClassVar[bool] = False

    def quorum(self, workers: int) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Ssp(Consistency):
    """Stale-synchronous with a bound (Wu 2018, §2.3.2, code 4.2).

    Args:
        staleness: τ, how many clocks a copy may lack.
        mode: `passive` exchanges only when the bound would be passed, every τ + 1 iterations, which also saves
            traffic; `aggressive` exchanges in every iteration and waits only at the bound; `traditional` is
            that with all layers together at the end of the step.
    """

    id: ClassVar[str] = "ssp"
    staleness: int = 1
    mode: Literal["passive", "aggressive", "traditional"] = "passive"

    def __post_init__(self) -> None:
        check_count("ssp: staleness", self.staleness, 0)
        if self.mode not in ("passive", "aggressive", "traditional"):
            raise ConfigError(f"ssp: mode={self.mode!r}; allowed are passive, aggressive and traditional")

    def exchanges(self, iteration: int) -> bool:
        return self.mode != "passive" or (iteration + 1) % (self.staleness + 1) == 0

    def iterations(self, clock: int) -> int:
        return clock * (self.staleness + 1) if self.mode == "passive" else clock

    def needs(self, clock: int) -> int:
        return clock if self.mode == "passive" else max(0, clock - self.staleness)

    def lead(self) -> int:
        return 0 if self.mode == "passive" else self.staleness

    def barrier(self) -> bool:
        return self.mode == "traditional"


@dataclass(frozen=True, kw_only=True)
class Backup(Consistency):
    """Backup workers (3LC §2.1): an update needs the gradients of all workers but `spare`, of the latest model.

    A late gradient is discarded; its worker learns so from the update and restores its residual. TensorFlow counts
    gradients of the latest model, of which a fast worker may give two; here such a worker waits for the update.
    """

    id: ClassVar[str] = "backup"
    spare: int = 1

    def __post_init__(self) -> None:
        check_count("backup: spare", self.spare, 0)

    def quorum(self, workers: int) -> int:
        return max(1, workers - self.spare)


LONGEST_GRACE_S = 86_400.0
"""A day."""
LATER = {"later": True}
"""Of an option that a policy did not have at first: where it has its default, the policy keeps its name."""


@dataclass(frozen=True, kw_only=True)
class Local(Consistency):
    """k local steps: gradients accumulate and every k-th step exchanges them (3LC §4.2).

    Args:
        steps: k.
        warmup: before that, so many steps with an exchange each.
    """

    id: ClassVar[str] = "local"
    steps: int = 2
    warmup: int = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        check_count("local: steps", self.steps, 1)
        check_count("local: warmup", self.warmup, 0)

    def exchanges(self, iteration: int) -> bool:
        return iteration < self.warmup or (iteration + 1 - self.warmup) % self.steps == 0

    def iterations(self, clock: int) -> int:
        return min(clock, self.warmup) + max(0, clock - self.warmup) * self.steps


@dataclass(frozen=True, kw_only=True)
class Adaptive(Consistency):
    """Adaptive communication: a tensor is sent when its pending gradient meets a criterion (Wu 2018, §2.3.2).

    Args:
        when: the criterion's name: `norm`, `variance`, `period` or `time`.
        threshold: what it compares with; see `policies/criteria.py`.
    """

    id: ClassVar[str] = "adaptive"
    when: str = "norm"
    threshold: float = 0.01
    _criterion: Criterion = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_criterion", Criterion(self.when, self.threshold))

    def criterion(self) -> Criterion | None:
        return self._criterion


@dataclass(frozen=True, kw_only=True)
class Quorum(Consistency):
    """Learners that never wait (Decoupled DiLoCo, arXiv 2604.21428): a shard merges what at least `k` have contributed.

    Args:
        k: contributions that complete an update.
        grace: how long the shard then waits for the other learners, in seconds, at most: the fastest learner's next
            contribution ends the wait, too.
        h: inner steps between two contributions of one learner, at least.
        merge: `mean`, weighted by examples and speed; or `radial`: the weighted mean of the directions, as long as the
            weighted mean of the lengths.
        discount: a contribution that started s versions ago counts (1 + s)^-discount; 0 turns that off.
    """

    id: ClassVar[str] = "quorum"
    decoupled: ClassVar[bool] = True
    k: int = 1
    grace: float = 1.0
    h: int = 1
    merge: Literal["mean", "radial"] = "mean"
    discount: float = 0.5

    def __post_init__(self) -> None:
        check_count("quorum: k", self.k, 1)
        check_count("quorum: h", self.h, 1)
        for name, most in (("grace", LONGEST_GRACE_S), ("discount", 8.0)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most):
                raise ConfigError(f"quorum: {name} is {value!r}; it is a number from 0 to {most:g}")
        if self.merge not in ("mean", "radial"):
            raise ConfigError(f"quorum: merge={self.merge!r}; allowed are mean and radial")

    def iterations(self, clock: int) -> int:
        return clock * self.h

    def quorum(self, workers: int) -> int:
        return self.k


POLICIES: Family[Consistency] = Family(
    "consistency",
    {kind.id: kind for kind in (Bsp, Asp, Ssp, Backup, Local, Adaptive, Quorum)},
    Consistency,
    short={"τ": "staleness", "b": "spare", "k": "steps"},
    bare={"ssp": "staleness", "backup": "spare", "local": "steps", "adaptive": "when", "quorum": "k"},
)


def consistency(name: str | Consistency) -> Consistency:
    """Returns a policy by name, as in `ssp[staleness=5]`, `backup[1]`, `local[k=2]`.

    Raises:
        ConfigError: an unknown policy or option.
    """
    return name if isinstance(name, Consistency) else POLICIES.make(name)


def name_of(policy: Consistency) -> str:
    """Returns the name that makes an equal policy.

    Raises:
        ConfigError: options that no name can say, so that servers would train by others.

    >>> name_of(consistency("ssp[5]"))
    'ssp[staleness=5,mode=passive]'
    """
    said = [each for each in fields(policy) if each.init]
    said = [each for each in said if each.metadata != LATER or getattr(policy, each.name) != each.default]
    values = {each.name: getattr(policy, each.name) for each in said}
    options = ",".join(f"{name}={'null' if value is None else value}" for name, value in values.items())
    name = f"{policy.id}[{options}]" if options else policy.id
    if policy.id in POLICIES.shipped or policy.id not in POLICIES.known():
        return name  # a process without this policy refuses it by name
    made = consistency(name)
    if made != policy:
        raise ConfigError(
            f"{policy!r} is named {name!r}, which makes {made!r}: servers would train by that. Options are numbers, "
            "true, false, null and words that are none of these"
        )
    return name
