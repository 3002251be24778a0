"""The outcomes of one worker and of a whole run, which `train --json` writes.

Attributes that a run lacks are `UNSET`; the JSON leaves them out.
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
"""Sums of the workers' traffic under their names in the run's outcome."""


class PlacementSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of the tables: bytes on each shard, their deviation, and a digest of the assignment."""

    loads: list[float]
    coefficient_of_variation: float
    standard_deviation: float
    digest: str


class WorkerOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one worker. Worker 0 evaluates and has the scores; see `RunOutcome`.

    Seconds count training from the end of the first step, without this worker's evaluations. If all wait while worker 0
    evaluates, the seconds of the others include that wait. The training loss is a mean over the latest steps; a late
    worker may take none.
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
    """Test accuracy, 0 … 1, and the loss of text in nats a byte, by step and seconds of training."""

    step: int
    seconds: float
    accuracy: float
    loss: float | UnsetType = UNSET
    sent_bytes: float | UnsetType = UNSET

    def text(self) -> str:
        """Returns the score for people."""
        return f"accuracy {self.accuracy:.1%}" if isinstance(self.loss, UnsetType) else f"{self.loss:.3f} nats a byte"


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run.

    `steps`, `seconds`, `seconds_per_step`, scores and the curve are worker 0's; its seconds leave out its evaluations.
    If worker 0 was lost, they are those of the lowest remaining rank, which evaluated at the end; the curve then has no
    points in between. Scores are NaN if worker 0 was lost in the last steps or if the workers' models differ.

    Payload and wire bytes are sums over all workers. Bits per value and the ratio count the payload of all tensors,
    uncompressed small ones included. If some steps have no exchange (local updates, local steps, passive and adaptive
    consistency), every step counts: bits are per parameter and step, and the ratio is to float32 at every step.
    Interface counters are the kernel's, at the workers' links.

    A resumed run includes the bytes, values and seconds of earlier processes up to the checkpoint. Seconds of encoding,
    decoding and waiting are means over workers; unlike `seconds` they include the first step, in which kernels compile.

    `residuals_lost` counts residuals that a new process began empty, `residuals_carried` those from a checkpoint.
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
        raise EngineError("no worker that reached the end has taken a step")
    if not scored:
        caution("worker 0 was lost before it had evaluated the model, and no other worker could: no scores")

    def total(name: str) -> float:
        return sum(worker.traffic.get(name, 0) for worker in workers)

    def ratio(a: float, b: float) -> float:
        return a / b if b else 0.0

    values = total("values_push"), total("values_pull")
    if _saves_exchanges(design):
        # A process counts its own steps: a late one has not taken the steps before it.
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
