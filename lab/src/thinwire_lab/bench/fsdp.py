"""FSDP2 and HSDP on thin links, stock and compressed: seconds per step, bytes, and the loss after some hundred steps.

With HSDP the two ranks of a site share a network namespace, and so memory speed, and the link between sites is thin;
with FSDP every rank has a link of its own. The timed steps run on thin links. The others run without a limit, for no
loss depends on it: uncompressed steps of a large model take half a minute each at 10 Mbit/s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.errors import ConfigError, EngineError
from thinwire.transports.links import Rate, parse_rate
from thinwire_lab.bench.fsdp_cells import RANKS, WARMUP, FsdpCell, FsdpRank, Scored, check_method
from thinwire_lab.bench.harness import Bench, Figures, Measured, Tell, column, median, unusual
from thinwire_lab.bench.options import FsdpOptions
from thinwire_lab.bench.rank_events import SILENCE_S, Stepped, Stopped, Warm
from thinwire_lab.bench.rank_group import RankGroup, Traffic
from thinwire_lab.workloads.recipes import recipe


class FsdpRun(Figures, frozen=True, kw_only=True):
    """What one training came to.

    Attributes:
        seconds_per_step: mean over the timed steps.
        sent_bytes_per_step: of each link, mean over them, as the kernel counted them; None without a limit.
        loss, accuracy: of the whole test set at the end.
        report: what `fsdp.report` says after the timed steps.
    """

    seconds_per_step: float
    sent_bytes_per_step: float | None
    loss: float
    accuracy: float
    report: str


@dataclass(kw_only=True)
class FsdpBench(FsdpOptions, Bench[FsdpCell, FsdpRun]):
    """Kinds × methods on one link.

    Args:
        hooks: `hsdp:METHOD` or `fsdp:METHOD`; a method is `none` or a codec, and its option `gather` codes parameters.
        link: rate of every link.
        model, data, steps, batch, lr, seed: of the training.
        short_steps: timed steps.
        rounds: how often the grid is gone through.

    Raises:
        ConfigError: a name or a number that cannot be, or a model whose training needs whole parameters.
    """

    kinds = (FsdpRun,)
    forms: ClassVar[Mapping[str, str]] = {"loss − stock": "+.4f"}
    defaults: ClassVar[Mapping[str, Any]] = {"recipe": None}
    columns = (
        ("", lambda cell, runs: str(cell)),
        column("s a step", "seconds_per_step", "{:.3f}"),
        column("sent a step and link, bytes", "sent_bytes_per_step", "{:,.0f}"),
        column("test loss", "loss", "{:.4f}"),
        column("accuracy", "accuracy", "{:.2%}"),
    )

    def __post_init__(self) -> None:
        for name in self.hooks:
            check_method(name)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"a learning rate of {self.lr}; it is a finite number above 0")
        if self.batch < 1 or self.short_steps < 1 or self.steps < WARMUP + self.short_steps:
            raise ConfigError(
                f"{self.steps} steps, {self.short_steps} of them timed, and a batch of {self.batch}; needed are at "
                f"least 1 timed step and {WARMUP} before, and a batch of 1"
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

    def key(self, cell: FsdpCell, number: int) -> dict[str, Any]:
        return {**super().key(cell, number), "recipe": unusual(cell.recipe(), "augment")}

    def compared(self, cell: FsdpCell, measured: Measured[FsdpCell, FsdpRun]) -> dict[str, float | None]:
        stock = next(
            (runs for other, runs in measured.items() if (other.kind, other.method) == (cell.kind, "none")), None
        )
        if stock is None:
            return {"× stock": None, "loss − stock": None}
        own = measured[cell]
        return {
            "× stock": median(stock, "seconds_per_step") / median(own, "seconds_per_step"),
            "loss − stock": median(own, "loss") - median(stock, "loss"),
        }

    def thin_link(self) -> tuple[str | None, str]:
        return next((cell.link for cell in self.cells()), None), "kernel"

    def measure(self, cell: FsdpCell, before: Measured[FsdpCell, FsdpRun], tell: Tell) -> FsdpRun:
        stepped: list[Stepped] = []
        scored: list[Scored] = []
        traffic: Traffic | None = None
        hosts = [f"host {number}" for number in range(cell.hosts)] if cell.link else []
        with RankGroup([Warm, Stepped, Stopped, Scored], hosts=hosts) as group:
            group.start([FsdpRank(cell=cell, rank=rank, master=group.master, gate=group.gate) for rank in range(RANKS)])
            warm = stopped = 0
            for _, event in group.engine.events(silence_s=SILENCE_S):
                match event:
                    case Stepped(step=step, seconds=seconds):
                        stepped.append(event)
                        tell(f"step {step} of {cell.timed}, {seconds:.1f} s")
                    case Scored():
                        scored.append(event)
                    case Warm():
                        warm += 1
                        if warm == RANKS:
                            group.begin(parse_rate(cell.link or "none"))
                    case Stopped():
                        stopped += 1
                        if stopped == RANKS:
                            traffic = group.end(Rate(None))
        if len(scored) != RANKS or len({(each.loss, each.accuracy) for each in scored}) != 1:
            raise EngineError(f"{cell}: the ranks ended with different models, or not all of them ended: {scored}")
        sent = traffic.sent_nbytes / (cell.timed * len(hosts)) if traffic else None
        report = next((each.report for each in scored if each.report), "")
        return FsdpRun(
            seconds_per_step=stepped[-1].seconds / cell.timed,
            sent_bytes_per_step=sent,
            loss=scored[0].loss,
            accuracy=scored[0].accuracy,
            report=report,
        )
