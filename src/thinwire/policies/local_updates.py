"""Local updates: what a worker's own optimizer did in H steps travels, not its gradients.

Every worker trains from the shared parameters θ with its own optimizer. After H steps it pushes what that changed, the
pseudo-gradient Δ = θ − local parameters; the shards apply an **outer** optimizer to the mean of them and send what it
changed, and every worker continues from there (Local SGD, Stich 2019; DiLoCo, Douillard et al. 2023). Tensors may be
cut into fragments that are exchanged at different steps, and an answer may be waited for only some steps later
(Streaming DiLoCo, Douillard et al. 2025). This file holds the numbers and the timetable; the worker carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from thinwire.errors import ConfigError
from thinwire.policies.consistency import consistency
from thinwire.policies.naming import check_count
from thinwire.schema import Reduce

Outer = Literal["SGD", "SignSGD"]

LONGEST_FOR_SGD = 2.0
"""How many times an update the outer optimizer may move where workers have SGD, without a warning: at 1.75 the digits
train as with local-sgd, at 2.3 and 3.5 a point or two below, at 7 hardly at all (docs/local-updates.md)."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class LocalUpdates:
    """How workers train by themselves, and what shards do with the mean of their updates.

    Args:
        h: inner steps between two exchanges of a tensor, H ≥ 1.
        warmup: at the beginning, so many inner steps with an exchange after each: weights move the most there.
        fragments: groups of tensors that are exchanged at different steps, 1 … H.
        delay: inner steps that go on while an exchange is under way, 0 … H − 1.
        keep: which share of its local parameters a worker keeps when an answer comes, in [0, 1); the rest is θ.
        keep_unsent: which share of its residual stays in its local parameters then, in [0, 1]: a worker that forgets
            what it did not send learns it again, and sends both.
        settle: at the end, when `flush` is called, so many further exchanges of what waits in residuals, with nothing
            trained in between; with SGD without momentum at the shards, to which that is no step of its own.
        steer: which share of its momentum a worker replaces then by what all workers did on average, in [0, 1); with
            Adam or AdamW at the workers, everything exchanged at once, and SGD without momentum at the shards.
        outer: the shards' optimizer: SGD, or SignSGD, which steps by the sign of the mean.
        outer_lr: its rate; None follows the inner optimizer's.
        outer_momentum: in [0, 1).
        nesterov: whether the momentum is Nesterov's.
        quorum: 0: all workers exchange in step. Above: learners never wait, and a shard merges what so many have
            contributed (`consistency.Quorum`); `h` then counts each learner's own steps.
        grace, merge, discount: as of `consistency.Quorum`.
        inner: `any` optimizer of the workers, or only `SGD` without momentum: where the residual of the pushes is the
            momentum, a second one would count gradients twice.

    Raises:
        ConfigError: a number out of range.

    Example:
        >>> timetable = LocalUpdates(h=6, fragments=3, delay=1)
        >>> [timetable.fragment_due(step) for step in range(6)]
        [None, 0, None, 1, None, 2]
    """

    h: int = 1
    warmup: int = 0
    fragments: int = 1
    delay: int = 0
    keep: float = 0.0
    keep_unsent: float = 0.0
    settle: int = 0
    steer: float = 0.0
    outer: Outer = "SGD"
    outer_lr: float | None = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    inner: Literal["any", "SGD"] = "any"
    quorum: int = 0
    grace: float = 1.0
    merge: Literal["mean", "radial"] = "mean"
    discount: float = 0.5

    def __post_init__(self) -> None:
        check_count("h", self.h, 1)
        check_count("fragments", self.fragments, 1, self.h)
        check_count("delay", self.delay, 0, self.h - 1)
        check_count("warmup", self.warmup, 0)
        check_count("settle", self.settle, 0)
        if self.warmup and (self.fragments > 1 or self.delay):
            raise ConfigError("warmup: its steps exchange everything at once; fragments=1 and delay=0 go with it")
        for name in ("keep", "outer_momentum", "steer"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < 1):
                raise ConfigError(f"{name} is {value!r}; it is a number of at least 0 and below 1")
        if not (_is_number(self.keep_unsent) and 0 <= self.keep_unsent <= 1):
            raise ConfigError(f"keep_unsent is {self.keep_unsent!r}; it is a number from 0 to 1")
        if self.outer_lr is not None and not (_is_number(self.outer_lr) and 0 < self.outer_lr < math.inf):
            raise ConfigError(f"outer_lr is {self.outer_lr!r}; it is a positive number, or null for the inner rate")
        if self.outer not in ("SGD", "SignSGD"):
            raise ConfigError(f"outer is {self.outer!r}; there are SGD and SignSGD")
        if self.inner not in ("any", "SGD"):
            raise ConfigError(f"inner is {self.inner!r}; there are any and SGD")
        if self.settle and (self.outer != "SGD" or self.outer_momentum):
            raise ConfigError(
                "settle: signs and momentum of the outer optimizer would step once more where nothing was trained; "
                "outer=SGD and outer_momentum=0 go with it"
            )
        if self.steer and not self.sends_means:
            raise ConfigError(
                "steer: an update tells what all workers did in the last steps only where it is their mean; outer=SGD, "
                "outer_momentum=0, fragments=1 and delay=0 go with it"
            )
        check_count("quorum", self.quorum, 0)
        in_step = ("warmup", "delay", "keep", "keep_unsent", "settle", "steer")
        if self.quorum and (of := [name for name in in_step if getattr(self, name)]):
            raise ConfigError(
                f"{of[0]} is of workers that exchange in step, and with quorum={self.quorum} learners never wait: "
                f"leave {of[0]} at 0"
            )
        if self.quorum:
            consistency(self.consistency)
        if self.nesterov and not self.outer_momentum:
            raise ConfigError("nesterov needs an outer_momentum above 0; without momentum give nesterov=false too")

    @property
    def consistency(self) -> str:
        """The policy that exchanges after so many steps."""
        if self.quorum:
            options = f"k={self.quorum},grace={self.grace},h={self.h},merge={self.merge},discount={self.discount}"
            return f"quorum[{options}]"
        warmup = f",warmup={self.warmup}" if self.warmup else ""
        return f"local[steps={self.h}{warmup}]"

    @property
    def sends_means(self) -> bool:
        """Whether an update is the mean of what workers changed since the one before, times a rate."""
        return self.outer == "SGD" and not self.outer_momentum and self.fragments == 1 and not self.delay

    # ---- the timetable

    def fragment_due(self, iteration: int) -> int | None:
        """Returns which fragment is pushed at the end of an inner step; None where none is.

        Fragment f of F is pushed after step ⌊(f + 1)·H/F⌋ of every H, so that the last one ends the round.

        Args:
            iteration: of the training, from 0.
        """
        if iteration < self.warmup:
            return 0
        position = (iteration - self.warmup) % self.h + 1
        fragment = -(-position * self.fragments // self.h) - 1
        return fragment if (fragment + 1) * self.h // self.fragments == position else None

    def ends_round(self, iteration: int) -> bool:
        """Returns whether every tensor has been pushed once more after this inner step."""
        return self.steps_in_round(iteration + 1) == 0

    def steps_in_round(self, iteration: int) -> int:
        """Returns how many inner steps were taken since the last round ended, after so many in all."""
        return max(0, iteration - self.warmup) % self.h

    def merges_at(self, iteration: int) -> int:
        """Returns before which inner step the answer to a push at the end of `iteration` is needed."""
        return iteration + 1 + self.delay

    def assign(self, sizes: Sequence[int]) -> list[int]:
        """Returns each tensor's fragment: consecutive tensors, about equally many values in each.

        Args:
            sizes: values of every tensor, in the model's order.

        Example:
            >>> LocalUpdates(h=4, fragments=2).assign([6, 1, 1, 6])
            [0, 0, 1, 1]
        """
        total, before, found = max(1, sum(sizes)), 0, []
        for size in sizes:
            middle = before + size / 2
            found.append(min(self.fragments - 1, int(middle * self.fragments / total)))
            before += size
        return found

    # ---- the optimizers

    def check_inner(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises ConfigError for an optimizer of the workers, by class name and parameter groups, that cannot be."""
        if self.inner == "SGD" and (optimizer != "SGD" or any(group["momentum"] for group in groups)):
            given = optimizer if optimizer != "SGD" else "SGD with momentum"
            raise ConfigError(
                f"this design takes torch.optim.SGD without momentum and was given {given}: what is not sent yet is "
                "kept, decays and is added to the next step, and so is the momentum already; inner=any allows others"
            )

    def caution_for(self, optimizer: str) -> str | None:
        """Returns what to warn a user of whose workers have this optimizer, by class name; None where of nothing.

        Rounds whose updates are alike move the parameters by `outer_lr / (1 - outer_momentum)` of one: 7 with DiLoCo's
        own numbers, made for AdamW, whose steps are bounded. SGD's are as long as the gradients are, and diverge.

        Example:
            >>> diloco = LocalUpdates(h=30, outer_lr=0.7, outer_momentum=0.9, nesterov=True)
            >>> print(diloco.caution_for("AdamW"))
            None
            >>> diloco.caution_for("SGD").partition(";")[0]
            'an outer rate of 0.7 with a momentum of 0.9 moves the model 7 times as far as SGD at the workers does'
        """
        if optimizer != "SGD" or self.outer != "SGD" or self.outer_lr is None:
            return None
        longer = self.outer_lr / (1 - self.outer_momentum)
        if longer <= LONGEST_FOR_SGD:
            return None
        return (
            f"an outer rate of {self.outer_lr:g} with a momentum of {self.outer_momentum:g} moves the model "
            f"{longer:.2g} times as far as SGD at the workers does; such a training often ends in nothing. Take "
            "outer_momentum=0.6, a local-sgd design, or AdamW"
        )

    def outer_groups(self, inner_lr: float = 1.0) -> list[dict[str, Any]]:
        """Returns the outer optimizer's parameter groups: the model's parameters, and its buffers, which are averaged.

        Args:
            inner_lr: the rate where `outer_lr` follows the inner optimizer's.
        """
        lr = inner_lr if self.outer_lr is None else self.outer_lr
        if self.outer == "SignSGD":
            return [{"lr": lr, "sign": True}, {"lr": 1.0, "sign": False}]
        plain = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
        trained = {**plain, "lr": lr, "momentum": self.outer_momentum, "nesterov": self.nesterov}
        return [trained, {**plain, "lr": 1.0}]

    def agreement(self) -> str:
        """Returns what workers must agree on besides H and the outer optimizer, as a plan states it."""
        names = ("fragments", "delay", "keep", "keep_unsent", "settle", "steer")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The parts of a design of local updates.

    Args:
        about: what it is, and where it comes from.
        updates: its numbers.
        codec: of the pushes, and of the pulls unless `down` is given.
        options: of that codec, where they are not its defaults. A decay of the residual (`error_scale`) is of the
            pushes alone.
        down_options: of the pulls' codec where it is the same, besides.
        down: of the pulls, by name.
        small: of biases, norm layers and small tensors, both ways, by name.
        others: options of other codecs that are named in place of `codec`, by their id, where they are not defaults.
        reduce: how the shards aggregate what the workers push.
        steers_by_some: whether it steers by the few values that a codec sends of an update, too, where shards average
            over those who sent them.
    """

    about: str
    updates: LocalUpdates = LocalUpdates()
    codec: str = "3lc"
    options: Mapping[str, Any] = field(default_factory=dict)
    down_options: Mapping[str, Any] = field(default_factory=dict)
    down: str | None = None
    small: str = "bf16"
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reduce: Reduce = "mean"
    steers_by_some: bool = False


OPTIONS = tuple(each.name for each in fields(LocalUpdates))
"""What local updates have, in brackets."""
_FINER = {"clip": 0.7, "entropy": "zstd"}
"""What several steps changed is sent so seldom that a residual's lag costs more than values do, and than zstd does."""
_FINE = {"clip": 0.75, "entropy": "zstd"}
"""A sixteenth less to send than with .7, for .03 nats where both ends add the momentum themselves: 1,016 times less
than plain DDP, and .007 nats above itself uncoded."""
_SMALL = "3lc[clip=0.7,entropy=zstd]"
"""A frame for each small tensor costs processor time, which an exchange in 30 steps has."""
_SELECTED = {"blocktopk": {"k": 768, "bits": 3}}
"""3/16 of the values: fewer wait for too many rounds where there are some dozens."""
_RARER = {"sparsity": 1.75, "lag": 4, "entropy": "zstd"}
"""What one step changed may wait a little: with a bound on the lag half as much is sent, and nothing is lost."""
STEERS_FROM = 4
"""Inner steps from which `local-sgd` steers unless told otherwise: after one or two, what the codec rounded weighs more
than what workers drifted apart."""
_NESTEROV = LocalUpdates(h=30, outer_lr=0.7, outer_momentum=0.9, nesterov=True)

KINDS: dict[str, Kind] = {
    "update": Kind(
        about="every worker's own optimizer steps, and its update is coded, not its gradient",
        options=_RARER,
    ),
    "local-sgd": Kind(
        about="h local steps of the worker's own optimizer, then an average (Local SGD, Stich 2019)",
        updates=LocalUpdates(h=4, keep_unsent=1.0, steer=0.6),
        options=_FINER,
    ),
    "diloco": Kind(
        about="h local steps, then an outer Nesterov step (DiLoCo, Douillard et al. 2023)",
        updates=replace(_NESTEROV, keep_unsent=1.0),
        options=_FINE,
        small=_SMALL,
        others=_SELECTED,
    ),
    "streaming-diloco": Kind(
        about="DiLoCo by fragments, each at its own step, answered some steps later (Douillard et al. 2025)",
        updates=replace(_NESTEROV, fragments=3, delay=1, keep=0.5),
        options=_FINER,
        small=_SMALL,
        others=_SELECTED,
    ),
    "decoupled": Kind(
        about="learners that never wait: shards merge a quorum's contributions (Decoupled DiLoCo, 2026)",
        updates=replace(_NESTEROV, h=24, fragments=3, quorum=1),
        options=_FINER,
        small=_SMALL,
        others=_SELECTED,
    ),
    "sparseloco": Kind(
        about="h local steps, 64 values of each 64 × 64 tile in 2 bits, averaged over those who sent them (SparseLoCo)",
        updates=LocalUpdates(h=30, outer_lr=0.65, steer=0.6),
        codec="blocktopk",
        options={"layout": "tiles", "error_scale": 0.95},
        down_options={"k": 74},
        small=_SMALL,
        reduce="clipped-mean-of-senders",
        steers_by_some=True,
    ),
    "demo": Kind(
        about="32 DCT coefficients of each 64 × 64 tile of what gathers at a worker, then a step by their signs (DeMo)",
        updates=LocalUpdates(outer="SignSGD", outer_lr=None, inner="SGD"),
        codec="blocktopk",
        options={"layout": "tiles", "transform": "dct", "k": 32, "bits": 8, "error_scale": 0.999},
        down="3lc",
        reduce="mean-of-senders",
    ),
}
"""The designs of local updates, by id."""
