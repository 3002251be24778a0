"""Named sums that any station may add to, and the record of one table's step.

Both are plain numbers and know nothing of processes or files: whoever owns them decides where the numbers go.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one table cost one worker in one step.

    Args:
        step: number of the step, from 0.
        table: the table's name.
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

    @property
    def bits_per_value_push(self) -> float:
        """Payload bits sent per value; 0 for a table without values."""
        return 8 * self.payload_bytes_push / self.numel if self.numel else 0.0

    @property
    def bits_per_value_pull(self) -> float:
        """Payload bits received per value; 0 for a table without values."""
        return 8 * self.payload_bytes_pull / self.numel if self.numel else 0.0

    def as_dict(self) -> dict[str, int | float | str | bool | None]:
        """Returns the fields and the bits per value, by name."""
        return asdict(self) | {
            "bits_per_value_push": self.bits_per_value_push,
            "bits_per_value_pull": self.bits_per_value_pull,
        }
