"""What the exchanges cost one worker of a training, and how much of its time was left for computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Means over the steps so far, of one worker; seconds and bytes are per step, exchanged or not.

    Attributes:
        steps: after the first, in which everything starts.
        seconds: of a step, by the clock.
        compute_s: outside thinwire: forward, backward, the worker's own optimizer, data and evaluation.
        encode_s: encoding pushes.
        decode_s: decoding and applying pulls.
        wait_s: waiting for a shard, and so for the link and the other workers.
        sent_nbytes: that left, message heads included.
        received_nbytes: that came, likewise.
        uncompressed_nbytes: of the trained parameters in their own dtypes, which a training that exchanges every step
            uncompressed would send, and receive.
        void_rounds: exchanges that went without this worker.

    Example:
        >>> report = TrainingReport(steps=10, seconds=0.1, compute_s=0.09, encode_s=0.002, decode_s=0.001, wait_s=0.005,
        ...                         sent_nbytes=100, received_nbytes=100, uncompressed_nbytes=4000, void_rounds=0)
        >>> print(report)
        thinwire: 10 steps, 100 ms each, 90.0 % of them computing
          exchange         encode 2 ms, decode and apply 1 ms, waiting 5 ms a step
          sent, received   0.1 kB, 0.1 kB a step: 40.0× less than uncompressed at every step
    """

    steps: int
    seconds: float
    compute_s: float
    encode_s: float
    decode_s: float
    wait_s: float
    sent_nbytes: float
    received_nbytes: float
    uncompressed_nbytes: int
    void_rounds: int

    @property
    def compute_share(self) -> float:
        """Computing time over time by the clock, 0 … 1."""
        return self.compute_s / self.seconds if self.seconds else 0.0

    @property
    def ratio(self) -> float:
        """How many times less travels than uncompressed both ways at every step."""
        nbytes = self.sent_nbytes + self.received_nbytes
        return 2 * self.uncompressed_nbytes / nbytes if nbytes else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return "thinwire: no step yet after the first"
        void = f", {self.void_rounds} void rounds" if self.void_rounds else ""
        return "\n".join(
            (
                f"thinwire: {self.steps} steps, {_ms(self.seconds)} each, {self.compute_share:.1%} of them computing"
                f"{void}".replace("%", " %"),
                f"  exchange         encode {_ms(self.encode_s)}, decode and apply {_ms(self.decode_s)}, "
                f"waiting {_ms(self.wait_s)} a step",
                f"  sent, received   {self.sent_nbytes / 1e3:,.1f} kB, {self.received_nbytes / 1e3:,.1f} kB a step: "
                f"{self.ratio:.1f}× less than uncompressed at every step",
            )
        )


class Stopwatch:
    """Sums and the clock as they were after the first step, which loads, compiles and joins.

    Args:
        now: seconds.
        sums: see `DistributedOptimizer.traffic`.
        steps: taken so far.
    """

    def __init__(self, now: float, sums: Mapping[str, float], steps: int) -> None:
        self._now, self._sums, self._steps = now, dict(sums), steps

    def report(self, now: float, sums: Mapping[str, float], steps: int, *, uncompressed_nbytes: int) -> TrainingReport:
        """Returns what has come since.

        Args:
            now, sums, steps: as they are now.
            uncompressed_nbytes: of the trained parameters, in their own dtypes.
        """
        taken, seconds = steps - self._steps, now - self._now
        per = 1 / max(1, taken)

        def since(name: str) -> float:
            return sums.get(name, 0) - self._sums.get(name, 0)

        return TrainingReport(
            steps=taken,
            seconds=seconds * per,
            compute_s=(seconds - since("exchange_seconds")) * per,
            encode_s=since("encode_seconds") * per,
            decode_s=since("decode_seconds") * per,
            wait_s=since("wait_seconds") * per,
            sent_nbytes=since("wire_bytes_push") * per,
            received_nbytes=since("wire_bytes_pull") * per,
            uncompressed_nbytes=uncompressed_nbytes,
            void_rounds=int(sums.get("void_rounds", 0)),
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
