"""Named sums that any station may add to, and the record of one step: of each table, and of what belongs to none.

Both are plain numbers and know nothing of processes or files: whoever owns them decides where the numbers go.
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
"""Steps in which kernels compile, DDP rebuilds buckets and buffers are made; figures of a training leave them out."""
WARM_UP_EXCHANGES = 2
"""Exchanges in which kernels compile, where steps come between them: there is a residual from the second on."""


def warm_up_steps(taken: int) -> int:
    """Returns how many of a training's first steps its figures leave out: five, at most half, at least one.

    >>> [warm_up_steps(taken) for taken in (1, 2, 8, 100)]
    [1, 1, 4, 5]
    """
    return max(1, min(WARM_UP_STEPS, taken // 2))


class WarmUp:
    """Sums as they were after each of the first steps, so that a report can leave those steps out.

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
        """Whether there is nothing more to note."""
        return len(self._after) >= WARM_UP_STEPS

    def note(self, steps: int, sums: Mapping[str, float]) -> None:
        """Takes the sums as they are after so many steps; more than once does no harm."""
        if steps == len(self._after) + 1 and not self.over:
            self._after.append(dict(sums))

    def split(self, steps: int, sums: Mapping[str, float]) -> tuple[int, dict[str, float]]:
        """Returns how many first steps are left out, and what the others added to the sums.

        Args:
            steps: taken so far.
            sums: as they are now.
        """
        if not steps:
            return 0, {}
        first = min(warm_up_steps(steps), len(self._after))
        before = self._after[first - 1] if first else {}
        return first, {name: value - before.get(name, 0) for name, value in sums.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one table cost one worker in one step; without a table's name, what belongs to no table.

    What a step cost is the sum over its records.

    Args:
        step: number of the step, from 0.
        table: the table's name; empty in a record of the whole step.
        numel: how many values it holds.
        rank: the worker.
        codec: id of the pushes' codec; empty for buffers.
        payload_bytes_push: bytes of codec payload sent.
        payload_bytes_pull: bytes of codec payload received.
        encode_s: seconds spent encoding the push.
        decode_s: seconds spent decoding and applying the pull.
        wait_s: seconds that the forward pass waited for this table.
        staleness: how many updates the model lacked that the gradient was taken from.
        residual_norm: 2-norm of what was not sent; None where the push keeps no residual.
        residual_lag: that norm in units of one step's update; None likewise.
        skipped: the step did not change the table: nobody pushed a gradient of it, or everybody skipped it.
        time_s: when the step ended, in seconds since 1970 by this worker's clock; 0 where nobody noted it.
        itemsize: bytes of one value in the tensor's own dtype, which uncompressed values would take each way.
        loss: of this worker's training step; in records of the whole step.
        accuracy: on the test set, 0 … 1; likewise.
        ways: how many ways the values travel: 1 where averages stay with who made them, as in a reduce-scatter.
        link_bps: bits per second of the slowest link between ranks, as known at this step; likewise.
        loss_finite: False where the loss was NaN or Inf, which a JSON line cannot hold; likewise.
        share: of the values, which part crosses a link each way: less than 1 where ranks average shares of their own.
        taken: steps that the worker has taken so far, recorded or not; in records of the whole step, as the next two.
        wire_nbytes: bytes of all of them, message heads included, as its report counts them.
        plain_nbytes: what they would be uncompressed.
        version: with learners that never wait, the version that came; in a record of its own.
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
        """Returns a record of what belongs to a step as a whole."""
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
        """What one way would carry of these values in the tensor's own dtype."""
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
