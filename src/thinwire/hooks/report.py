"""What the exchanges cost one worker of a training, and how much of its time was left for computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.quantities import ms_text, nbytes_text


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Means over the steps so far, of one worker; seconds and bytes are per step, exchanged or not.

    Attributes:
        steps: after the first ones, in which everything starts and compiles: those of `telemetry.warm_up_steps`, and
            all up to the answer of the second exchange, or of the first, if another one has come since.
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
        warm_up: how many first steps are in no mean.
        warm_up_s: seconds a step that exchanges took in those, compiling included.
        compiling: the means are of the first two exchanges too, in which kernels may have compiled: there were no more.

    Example:
        >>> report = TrainingReport(steps=10, seconds=0.1, compute_s=0.09, encode_s=0.002, decode_s=0.001, wait_s=0.005,
        ...                         sent_nbytes=100, received_nbytes=100, uncompressed_nbytes=4000, void_rounds=0)
        >>> print(report)
        thinwire: 10 steps, 100 ms each, 90.0 % of them computing
          exchange         encode 2 ms, decode and apply 1 ms, waiting 5 ms a step
          sent, received   100 B, 100 B a step: 40.0× less than uncompressed at every step
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
    warm_up: int = 0
    warm_up_s: float = 0.0
    compiling: bool = False

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
                f"thinwire: {self.steps} steps, {ms_text(self.seconds)} each, "
                f"{self.compute_share:.1%} of them computing"
                f"{void}".replace("%", " %"),
                f"  exchange         encode {ms_text(self.encode_s)}, decode and apply {ms_text(self.decode_s)}, "
                f"waiting {ms_text(self.wait_s)} a step",
                f"  sent, received   {nbytes_text(self.sent_nbytes)}, {nbytes_text(self.received_nbytes)} a step: "
                f"{self.ratio:.1f}× less than uncompressed at every step",
                *self._left_out(),
            )
        )

    def _left_out(self) -> list[str]:
        if not self.warm_up:
            return []
        which = "the first step" if self.warm_up == 1 else f"the first {self.warm_up} steps"
        if self.compiling:
            return [f"  left out         {which}, but kernels compile in two exchanges: more of them tell more"]
        return [f"  left out         {which}, with {ms_text(self.warm_up_s)} each of exchanging and compiling"]


def training_report(
    steps: int,
    since: Mapping[str, float],
    *,
    uncompressed_nbytes: int,
    void_rounds: float,
    warm_up: int = 0,
    warm_up_s: float = 0.0,
    compiling: bool = False,
) -> TrainingReport:
    """Returns the means over some steps.

    Args:
        steps: that were taken.
        since: what they added to the sums of `DistributedOptimizer.traffic`, and to the clock's `seconds`.
        uncompressed_nbytes: of the trained parameters, in their own dtypes.
        void_rounds: of all steps.
        warm_up, warm_up_s, compiling: see `TrainingReport`.
    """
    per = 1 / max(1, steps)

    def mean(name: str) -> float:
        return since.get(name, 0) * per

    return TrainingReport(
        steps=steps,
        seconds=mean("seconds"),
        compute_s=mean("seconds") - mean("exchange_seconds"),
        encode_s=mean("encode_seconds"),
        decode_s=mean("decode_seconds"),
        wait_s=mean("wait_seconds"),
        sent_nbytes=mean("wire_bytes_push"),
        received_nbytes=mean("wire_bytes_pull"),
        uncompressed_nbytes=uncompressed_nbytes,
        void_rounds=int(void_rounds),
        warm_up=warm_up,
        warm_up_s=warm_up_s,
        compiling=compiling,
    )
