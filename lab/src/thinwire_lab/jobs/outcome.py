"""What a run came to: one worker's outcome, and the run's, which `train --json` writes.

Attributes that a run may lack are `UNSET`, and are then left out of the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from thinwire.cautions import caution
from thinwire.errors import EngineError
from thinwire.policies.consistency import Consistency, consistency
from thinwire.policies.designs import Design
from thinwire.transports.links import Rate
from thinwire_lab.jobs.job import Job

_COUNTERS = (
    *("payload_bytes_push", "payload_bytes_pull", "wire_bytes_push", "wire_bytes_pull"),
    *("late_pushes", "skipped_updates", "residuals_lost", "residuals_carried"),
)
"""Sums of the workers' traffic that the run's outcome has under the same names."""


class PlacementSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How the tables were placed: bytes on each shard, how far they deviate, and a digest of the decision."""

    loads: list[float]
    coefficient_of_variation: float
    standard_deviation: float
    digest: str


class WorkerOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's training came to. Worker 0 evaluates, and has the scores; see `RunOutcome`.

    Seconds are of training, from the end of the first step, without this worker's evaluations; where all wait while
    worker 0 evaluates, the others' have that wait. The training loss is a mean over the latest steps; a late worker may
    take none.
    """

    rank: int
    steps: int
    seconds: float
    seconds_per_step: float
    train_loss: float | UnsetType = UNSET
    weights: str
    traffic: dict[str, float]
    placement: PlacementSummary
    compute_share: float = 0.0
    parameters: int = 0
    test_accuracy: float | UnsetType = UNSET
    test_loss: float | UnsetType = UNSET
    test_accuracy_ema: float | UnsetType = UNSET
    residual_ratio: dict[str, float] | UnsetType = UNSET


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Test accuracy, 0 … 1, and the loss of text in nats a byte, after so many steps and seconds of training."""

    step: int
    seconds: float
    accuracy: float
    loss: float | UnsetType = UNSET
    sent_bytes: float | UnsetType = UNSET

    def text(self) -> str:
        """Returns the score for people."""
        return f"accuracy {self.accuracy:.1%}" if isinstance(self.loss, UnsetType) else f"{self.loss:.3f} nats a byte"


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to.

    `steps`, `seconds`, `seconds_per_step`, scores and the curve are worker 0's, and its seconds are without its
    evaluations. Where worker 0 was lost they are those of the lowest rank that was left, which evaluated at the end in
    its place; the curve has no points in between. Scores are NaN where it was lost in the last steps or later, or where
    the workers' models differ.

    Payload and wire bytes are sums over all workers; bits per value and the ratio come from the payload of everything
    that travelled, uncompressed small tensors included. Where steps go without an exchange (local updates, local steps,
    passive and adaptive consistency), values are counted at every step, exchanged or not: bits are then per parameter
    and step, and the ratio is over float32 at every step. Interface counters are the kernel's, at the workers' links.

    A run that was resumed has the bytes, values and seconds of the processes before as well, until the checkpoint.
    Seconds of encoding, decoding and waiting are a worker's mean and of all steps, with the first, in which kernels
    compile, and which `seconds` leaves out.

    Of workers that died: `residuals_lost` began empty in a new process, `residuals_carried` came from its checkpoint.
    """

    design: str
    model: str
    data: str
    workers: int
    servers: int
    servers_on_workers: bool = False
    steps: int
    link: str
    seed: int
    seconds: float
    seconds_per_step: float
    test_accuracy: float
    train_loss: float
    payload_bytes_push: int
    payload_bytes_pull: int
    wire_bytes_push: int
    wire_bytes_pull: int
    bits_per_value_push: float
    bits_per_value_pull: float
    compression_ratio: float
    shaping: str
    choices: dict[str, Any]
    placement: PlacementSummary
    late_pushes: int
    skipped_updates: int
    residuals_lost: int = 0
    residuals_carried: int = 0
    batch: int
    lr: float
    test_loss: float
    test_accuracy_ema: float | UnsetType = UNSET
    residual_ratio: dict[str, float]
    weights: str
    seconds_encode: float
    seconds_decode: float
    seconds_wait: float
    compute_share: float = 0.0
    lost_workers: int = 0
    curve: list[CurvePoint]
    interface_bytes_push: int | UnsetType = UNSET
    interface_bytes_pull: int | UnsetType = UNSET
    interface_packets_push: int | UnsetType = UNSET
    interface_packets_pull: int | UnsetType = UNSET
    interface_payload_bytes_push: int | UnsetType = UNSET
    interface_payload_bytes_pull: int | UnsetType = UNSET
    in_process: bool | UnsetType = UNSET


def _saves_exchanges(design: Design) -> bool:
    policy = consistency(design.consistency)
    at_every_step = type(policy).exchanges is Consistency.exchanges and policy.criterion() is None
    return design.local is not None or not at_every_step


def summarise(
    job: Job,
    workers: Sequence[WorkerOutcome],
    curve: Sequence[CurvePoint] = (),
    *,
    rate: Rate,
    shaping: str,
) -> RunOutcome:
    """Sums up the workers' outcomes, in the order of ranks, so that equal runs have equal sums."""
    workers = sorted(workers, key=lambda worker: worker.rank)
    scored = [worker for worker in workers if isinstance(worker.test_loss, float)]
    first, design, recipe = (scored or workers)[0], job.full_design(), job.recipe()
    digests = {worker.weights for worker in workers}
    if len(digests) > 1 and consistency(design.consistency).replicas_end_equal:
        raise EngineError(f"the workers ended with {len(digests)} different models; they must be equal bit for bit")
    losses = [worker.train_loss for worker in workers if not isinstance(worker.train_loss, UnsetType)]
    if not losses:
        raise EngineError("the workers that ended have taken no step")
    if not scored:
        caution("worker 0 was lost before it had evaluated the model, and nobody did in its place: no scores")

    def total(name: str) -> float:
        return sum(worker.traffic.get(name, 0) for worker in workers)

    def ratio(a: float, b: float) -> float:
        return a / b if b else 0.0

    values = total("values_push"), total("values_pull")
    if _saves_exchanges(design):
        # Of the process whose bytes these are: one that came late has not taken the steps of before.
        every_step = sum(worker.traffic.get("steps", worker.steps) * worker.parameters for worker in workers)
        values = every_step, every_step
    push_bits, pull_bits = 8 * total("payload_bytes_push"), 8 * total("payload_bytes_pull")
    counted: dict[str, Any] = {name: int(total(name)) for name in _COUNTERS}
    of_job = ("design", "model", "data", "workers", "servers_on_workers", "seed")
    of_first = ("steps", "seconds", "seconds_per_step", "placement", "test_accuracy_ema", "weights")
    return RunOutcome(
        **{name: getattr(job, name) for name in of_job},
        **{name: getattr(first, name) for name in of_first},
        **counted,
        servers=job.shards,
        link=str(rate),
        test_accuracy=first.test_accuracy if isinstance(first.test_accuracy, float) else math.nan,
        train_loss=sum(losses) / len(losses),
        bits_per_value_push=ratio(push_bits, values[0]),
        bits_per_value_pull=ratio(pull_bits, values[1]),
        compression_ratio=ratio(32 * sum(values), push_bits + pull_bits),
        shaping=shaping,
        choices=design.choices(),
        batch=recipe.batch,
        lr=recipe.lr,
        test_loss=first.test_loss if isinstance(first.test_loss, float) else math.nan,
        residual_ratio=first.residual_ratio or {},
        seconds_encode=total("encode_seconds") / len(workers),
        seconds_decode=total("decode_seconds") / len(workers),
        seconds_wait=total("wait_seconds") / len(workers),
        lost_workers=job.workers - len(workers),
        compute_share=sum(worker.compute_share for worker in workers) / len(workers),
        curve=list(curve),
    )
