"""The choice of `tw.distribute` for an adaptive optimizer: measured steps, the rule, and monitoring of the link."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import msgspec
import torch

from thinwire.hooks.group_optimizer import GroupOptimizer
from thinwire.policies.adaptive import EXCHANGE_SHARE, ROUNDS, local_steps
from thinwire.policies.compression import MIN_NUMEL
from thinwire.quantities import ms_text, rate_text
from thinwire.states import Count, NonNegative

WARM_UP, TIMED = 1, 3
"""Steps without an exchange: those in which code starts and compiles, then those that are timed."""
CODED = 40
"""Compression ratio of a value of `local-sgd` against float32, each way."""
CODING_S = 8e-9
"""Time in which a rank encodes and decodes such a value, in seconds."""
_EXCHANGING = "exchange_seconds"
SLOW_SHARE, SLOW_ROUNDS = 0.5, 8
"""A link counts as slow if exchanges take more than this share of the time in each of this many rounds."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chosen exchange.

    Args:
        kind: `measuring`, `gradients`, `local` or `plain`; the last sends values uncoded.
        name: the design that a user could write, if there is one.
        why: a line for the log.
    """

    kind: Literal["measuring", "gradients", "local", "plain"]
    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class AutoReport:
    """The choice and its costs so far; print it.

    Attributes:
        choice: the chosen exchange and the figures that led to it, as a line of text.
        report: a `Report` of local updates, or a report of coded gradients as `ddp.report` returns; else None.

    Example:
        >>> print(AutoReport(choice="auto: AdamW, one rank: nothing is exchanged"))
        auto: AdamW, one rank: nothing is exchanged
    """

    choice: str
    report: Any = None

    def __str__(self) -> str:
        return self.choice if self.report is None else f"{self.choice}\n{self.report}"


def choose(
    who: str, compute_s: float, link_bps: float, ranks: int, parameters: Sequence[torch.Tensor], *, least: int = 1
) -> Choice:
    """Returns the choice for an adaptive optimizer; the same numbers give the same choice on all ranks.

    Args:
        who: the optimizer's class.
        compute_s: time of the slowest rank's step without an exchange, in seconds.
        link_bps: of the slowest link, in bits per second.
        ranks: number of ranks.
        parameters: the trained parameters.
        least: fewest steps of a round; 1 allows a plain all-reduce.

    Example:
        >>> weights = [torch.zeros(1000, 1000)]
        >>> print(choose("AdamW", 0.092, 98e6, 4, weights).why)
        auto: AdamW, link 98 Mbit/s, a step computes 92 ms: local-sgd[h=4] (an exchange takes 5 % of the time)
        >>> print(choose("AdamW", 0.092, 20e9, 4, weights).why)
        auto: AdamW, link 20 Gbit/s, a step computes 92 ms: plain all-reduce (it takes 3 % of a step's computation)
    """
    # A rank sends its share to every other rank and receives theirs: as many bytes as in a ring.
    byte_s = 2 * (ranks - 1) / ranks * 8 / max(1.0, link_bps)
    coded = sum(each.numel() for each in parameters if each.ndim > 1 and each.numel() >= MIN_NUMEL)
    rest = sum(each.numel() for each in parameters) - coded
    all_reduce_s = byte_s * sum(each.numel() * each.element_size() for each in parameters)
    exchange_s = byte_s * 4 * (coded / CODED + rest) + CODING_S * coded
    steps = max(least, local_steps(compute_s, all_reduce_s, exchange_s))
    begins = f"auto: {who}, link {rate_text(link_bps)}, a step computes {ms_text(compute_s)}"
    if steps == 1:
        share = 100 * all_reduce_s / compute_s
        why = f"{begins}: plain all-reduce (it takes {share:.0f} % of a step's computation)"
        return Choice(kind="plain", name="plain all-reduce", why=why)
    name, share = f"local-sgd[h={steps}]", 100 * exchange_s / (steps * compute_s + exchange_s)
    why = f"{begins}: {name} (an exchange takes {share:.0f} % of the time)"
    return Choice(kind="local", name=name, why=why)


class SavedChoice(Choice, frozen=True, kw_only=True):
    """A choice in a state, with its measurements.

    Args:
        taken: steps so far.
        optimizer: the user's optimizer class.
        ranks: this rank, and the number of ranks.
        link_bps: of the slowest link; 0 if it was not measured.
        seconds, uses_all, scaled: of `StepClock`.
        exchange: the state of coded gradients or of local updates; else None.
    """

    taken: Count
    optimizer: str
    ranks: tuple[int, int]
    link_bps: NonNegative
    seconds: list[NonNegative]
    uses_all: bool
    scaled: bool
    exchange: dict[str, Any] | None

    def __post_init__(self) -> None:
        if (self.exchange is None) is not (self.kind in ("measuring", "plain")):
            raise ValueError(f"a choice of kind {self.kind!r} with{'out' * (self.exchange is None)} an exchange")


@dataclass
class StepClock:
    """Times steps from the end of one to the end of the next.

    Attributes:
        seconds: of the steps that were timed.
        uses_all: whether every trained parameter had a gradient at every step.
        scaled: whether a GradScaler was in use, with a scale that differs between ranks.
    """

    seconds: list[float] = field(default_factory=list)
    uses_all: bool = True
    scaled: bool = False
    _ended: float | None = None

    def step_ended(self, steps: int, optimizer: torch.optim.Optimizer) -> bool:
        """Records the end of a step; returns whether enough steps were timed.

        Args:
            steps: taken so far.
            optimizer: with the step's gradients.
        """
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        self.uses_all = self.uses_all and all(each.grad is not None for each in trained)
        if trained and trained[0].is_cuda:
            torch.cuda.synchronize(trained[0].device)
        now = time.perf_counter()
        if self._ended is not None:
            self.seconds.append(now - self._ended)
        self._ended = now
        return steps >= WARM_UP + TIMED and bool(self.seconds)

    @property
    def step_s(self) -> float:
        """The median of the timed steps, in seconds."""
        return median(self.seconds)


class LinkWatch:
    """Detects that exchanges of local updates take most of the time, as on a link that has become slower.

    On a busy machine one rank may wait for the others, but rarely in every round.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 4
        self._slow: list[list[float]] = []
        self._warned = False

    def step_ended(self, optimizer: GroupOptimizer) -> str:
        """Returns a warning, once; else an empty string."""
        if self._warned or optimizer.clock == self._sums[0]:
            return ""
        now = [optimizer.clock, optimizer.steps_done, time.perf_counter(), optimizer.traffic().get(_EXCHANGING, 0.0)]
        before, self._sums = self._sums, now
        if before[0] < 2:  # kernels compile in the first exchanges
            return ""
        _, _, seconds, exchanging = last = [new - old for new, old in zip(now, before, strict=True)]
        self._slow = [*self._slow, last] if exchanging > SLOW_SHARE * seconds else []
        if len(self._slow) < SLOW_ROUNDS:
            return ""
        self._warned = True
        rounds, steps, seconds, exchanging = (sum(each) for each in zip(*self._slow, strict=True))
        each_s, step_s = exchanging / rounds, (seconds - exchanging) / steps
        fits = (h for h in ROUNDS if each_s <= EXCHANGE_SHARE * (h * step_s + each_s))
        return (
            f"exchanges take {100 * exchanging / seconds:.0f} % of the time by now, as the link is much slower than it "
            f"was, or ranks wait for each other. The choice stays; with {each_s:.2g} s an exchange, write "
            f'design="local-sgd[h={next(fits, ROUNDS[-1])}]"'
        )
