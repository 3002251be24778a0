"""Named sums that any component may add to, and the records of one step: of each table, and of the whole step.

Both are plain numbers, independent of processes and files: their owner exports them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


class Counters:
    """Named sums, added to from one thread at a time.

    >>> counters = Counters()
    >>> counters.add("payload_bytes_push", 3); counters.add("payload_bytes_push", 4)
    >>> counters.snapshot()
    {'payload_bytes_push': 7}
    """

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(int)

    def add(self, name: str, amount: float) -> None:
        """Adds `amount` to the sum called `name` (created at 0)."""
        self._sums[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._sums.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """Returns a copy of every sum, by name."""
        return dict(self._sums)


WARM_UP_STEPS = 5
"""Steps in which kernels compile, DDP rebuilds buckets and buffers are made; a training's figures exclude them."""
WARM_UP_EXCHANGES = 2
"""Exchanges in which kernels compile, with several steps between them: residuals exist from the second on."""


def warm_up_steps(taken: int) -> int:
    """Returns how many of a training's first steps its figures exclude: five, at most half, at least one.

    >>> [warm_up_steps(taken) for taken in (1, 2, 8, 100)]
    [1, 1, 4, 5]
    """
    return max(1, min(WARM_UP_STEPS, taken // 2))


class WarmUp:
    """Sums after each of the first steps, so that a report can exclude those steps.

    Example:
        >>> warm_up = WarmUp()
        >>> for steps, seconds in enumerate((3.0, 3.1, 3.2, 3.3), 1): warm_up.note(steps, {"seconds": seconds})
        >>> first, since = warm_up.split(4, {"seconds": 3.3})
        >>> first, round(since["seconds"], 3)
        (2, 0.2)
    """

    __slots__ = ("_after",)

    def __init__(self) -> None:
        self._after: list[dict[str, float]] = []

    @property
    def over(self) -> bool:
        """Whether all first steps are noted."""
        return len(self._after) >= WARM_UP_STEPS

    def note(self, steps: int, sums: Mapping[str, float]) -> None:
        """Notes the sums after so many steps; repeated calls are harmless."""
        if steps == len(self._after) + 1 and not self.over:
            self._after.append(dict(sums))

    def split(self, steps: int, sums: Mapping[str, float]) -> tuple[int, dict[str, float]]:
        """Returns the number of excluded first steps, and the sums of the other steps.

        Args:
            steps: taken so far.
            sums: at present.
        """
        if not steps:
            return 0, {}
        first = min(warm_up_steps(steps), len(self._after))
        before = self._after[first - 1] if first else {}
        return first, {name: value - before.get(name, 0) for name, value in sums.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The cost of one table at one worker in one step; without a table's name, the values of the whole step.

    The cost of a step is the sum over its records.

    Args:
        step: number of the step, from 0.
        table: the table's name; empty in a record of the whole step.
        numel: number of values of the table.
        rank: the worker.
        codec: id of the pushes' codec; empty for buffers.
        payload_bytes_push: bytes of codec payload sent.
        payload_bytes_pull: bytes of codec payload received.
        encode_s: seconds spent encoding the push.
        decode_s: seconds spent decoding and applying the pull.
        wait_s: seconds that the forward pass waited for this table.
        staleness: number of updates missing in the model of the gradient.
        residual_norm: 2-norm of the residual; None where the push keeps none.
        residual_lag: that norm in units of one step's update; None where the push keeps no residual.
        skipped: the step did not change the table: no worker pushed a gradient of it, or all workers skipped it.
        time_s: end of the step, in seconds since 1970 by this worker's clock; 0 if not recorded.
        itemsize: bytes of one value in the tensor's own dtype, which uncompressed values would take each way.
        loss: of this worker's training step; in records of the whole step.
        accuracy: on the test set, 0 … 1; in records of the whole step.
        ways: number of directions in which the values are sent: 1 where averages stay at their owner, as in a
            reduce-scatter.
        link_bps: bits per second of the slowest link between ranks at this step; in records of the whole step.
        loss_finite: False where the loss was NaN or Inf, which a JSON line cannot hold; in records of the whole step.
        share: part of the values that crosses a link each way: less than 1 where ranks average shares of their own.
        taken: steps that the worker has taken so far, recorded or not; in records of the whole step, as the next two.
        wire_nbytes: bytes of all these steps, message heads included, as the report counts them.
        plain_nbytes: bytes of all these steps without compression.
        version: with learners that never wait, the version that came; in a record by itself.
        learners: rank, inner steps and weight of every contribution in it.

    Example:
        >>> record = StepRecord(step=7, table="fc.weight", numel=1000, payload_bytes_push=200, payload_bytes_pull=50)
        >>> record.bits_per_value_push, record.bits_per_value_pull
        (1.6, 0.4)
    """

    step: int
    table: str
    numel: int
    rank: int = 0
    codec: str = ""
    payload_bytes_push: int = 0
    payload_bytes_pull: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    staleness: int = 0
    residual_norm: float | None = None
    residual_lag: float | None = None
    skipped: bool = False
    time_s: float = 0.0
    itemsize: int = 4
    loss: float | None = None
    accuracy: float | None = None
    ways: int = 2
    link_bps: float | None = None
    loss_finite: bool = True
    share: float = 1.0
    taken: int = 0
    wire_nbytes: float = 0.0
    plain_nbytes: float = 0.0
    version: int = 0
    learners: tuple[tuple[int, int, float], ...] = ()

    @classmethod
    def of_scores(cls, step: int, rank: int, time_s: float, loss: float | None, accuracy: float | None) -> StepRecord:
        """Returns a record of a whole step."""
        return cls(
            step=step,
            table="",
            numel=0,
            rank=rank,
            time_s=time_s,
            loss=loss,
            accuracy=accuracy,
            loss_finite=loss is None or math.isfinite(loss),
        )

    @property
    def plain_way_nbytes(self) -> int:
        """Bytes of these values in one direction, in the tensor's own dtype."""
        return round(self.numel * self.itemsize * self.share)

    @property
    def bits_per_value_push(self) -> float:
        """Payload bits sent per value; 0 for a table without values."""
        return 8 * self.payload_bytes_push / self.numel if self.numel else 0.0

    @property
    def bits_per_value_pull(self) -> float:
        """Payload bits received per value; 0 for a table without values."""
        return 8 * self.payload_bytes_pull / self.numel if self.numel else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields and the bits per value, by name."""
        return asdict(self) | {
            "bits_per_value_push": self.bits_per_value_push,
            "bits_per_value_pull": self.bits_per_value_pull,
        }
