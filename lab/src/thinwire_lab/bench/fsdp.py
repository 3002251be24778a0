"""FSDP2 and HSDP on thin links, stock and compressed: seconds per step, bytes, and the loss after some hundred steps.

With HSDP the two ranks of a site share a network namespace, and so memory speed, and the link between sites is thin;
with FSDP every rank has a link of its own. Only the timed steps run on thin links: no loss depends on the link, and
uncompressed steps of a large model take half a minute each at 10 Mbit/s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from thinwire.errors import ConfigError, EngineError
from thinwire.transports.links import Rate, parse_rate
from thinwire_lab.bench.cells import FSDP_RANKS, FSDP_WARMUP, FsdpCell, FsdpRank, Scored
from thinwire_lab.bench.harness import Bench, Figures, Tell, column, median
from thinwire_lab.bench.names import check_sharded
from thinwire_lab.bench.options import FsdpOptions
from thinwire_lab.bench.rank_group import RankGroup, Traffic
from thinwire_lab.bench.roles import SILENCE_S, Stepped, Stopped, Warm
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.workloads.recipes import recipe


class FsdpRun(Figures, frozen=True, kw_only=True):
    """What one training came to: means over the timed steps, and scores of the whole test set at the end."""

    seconds_per_step: float
    sent_bytes_per_step: float | None
    loss: float
    accuracy: float
    report: str


@dataclass(kw_only=True)
class FsdpBench(FsdpOptions, Bench[FsdpCell, FsdpRun]):
    """Kinds × methods on one link."""

    kinds = (FsdpRun,)
    forms: ClassVar[Mapping[str, str]] = {"loss − stock": "+.4f"}
    columns = (
        ("", lambda cell, runs: str(cell)),
        column("s a step", "seconds_per_step", "{:.3f}"),
        column("sent a step and link, bytes", "sent_bytes_per_step", "{:,.0f}"),
        column("test loss", "loss", "{:.4f}"),
        column("accuracy", "accuracy", "{:.2%}"),
    )

    def __post_init__(self) -> None:
        for name in self.hooks:
            check_sharded(name)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"a learning rate of {self.lr}; it is a finite number above 0")
        if self.batch < 1 or self.short_steps < 1 or self.steps < FSDP_WARMUP + self.short_steps:
            raise ConfigError(
                f"{self.steps} steps, {self.short_steps} of them timed, and a batch of {self.batch}; needed are at "
                f"least 1 timed step and {FSDP_WARMUP} before, and a batch of 1"
            )
        if recipe(self.model, self.data).l1:
            raise ConfigError(
                f"{self.model} trains with a penalty on whole matrices, which no rank of FSDP has; choose another model"
            )

    def cells(self) -> list[FsdpCell]:
        rate = None if parse_rate(self.link).bps is None else self.link
        return [
            FsdpCell(
                kind=kind,
                method=method,
                link=rate,
                model=self.model,
                data=self.data,
                steps=self.steps,
                timed=self.short_steps,
                batch=self.batch,
                lr=self.lr,
                seed=self.seed,
            )
            for kind, _, method in (name.partition(":") for name in self.hooks)
        ]

    def compared(self, cell: FsdpCell, measured: Measured[FsdpCell, FsdpRun]) -> dict[str, float | None]:
        own = measured[cell]
        for other, runs in measured.items():
            if (other.kind, other.method) == (cell.kind, "none"):
                speedup = median(runs, "seconds_per_step") / median(own, "seconds_per_step")
                return {"× stock": speedup, "loss − stock": median(own, "loss") - median(runs, "loss")}
        return {"× stock": None, "loss − stock": None}

    def thin_link(self) -> tuple[str | None, str]:
        return next((cell.link for cell in self.cells()), None), "kernel"

    def measure(self, cell: FsdpCell, before: Measured[FsdpCell, FsdpRun], tell: Tell) -> FsdpRun:
        seconds = 0.0
        scored: list[Scored] = []
        traffic: Traffic | None = None
        hosts = [f"host {number}" for number in range(cell.hosts)] if cell.link else []
        with RankGroup([Warm, Stepped, Stopped, Scored], hosts=hosts) as group:
            group.start([FsdpRank(cell=cell, rank=rank, **group.where) for rank in range(FSDP_RANKS)])
            waiting = Counter[type]()
            for _, event in group.engine.events(silence_s=SILENCE_S):
                waiting[type(event)] += 1
                if isinstance(event, Stepped):
                    seconds = event.seconds
                    tell(f"step {event.step} of {cell.timed}, {seconds:.1f} s")
                elif isinstance(event, Scored):
                    scored.append(event)
                elif isinstance(event, Warm) and waiting[Warm] == FSDP_RANKS:
                    group.begin(parse_rate(cell.link or "none"))
                elif isinstance(event, Stopped) and waiting[Stopped] == FSDP_RANKS:
                    traffic = group.end(Rate(None))
        if len(scored) != FSDP_RANKS or len({(each.loss, each.accuracy) for each in scored}) != 1:
            raise EngineError(f"{cell}: the ranks ended with different models, or not all of them ended: {scored}")
        loss = scored[0].loss
        assert isinstance(loss, float)
        return FsdpRun(
            seconds_per_step=seconds / cell.timed,
            sent_bytes_per_step=traffic.sent_nbytes / (cell.timed * len(hosts)) if traffic else None,
            loss=loss,
            accuracy=scored[0].accuracy,
            report=next((each.report for each in scored if each.report), ""),
        )
