"""Does it pay? Measured step times of training methods beside the planner's predictions, on links of many rates.

One run sweeps a method over all links: its processes start once, warm up without a limit, and train while the links
change. The figure of a link is the median step. Speed-ups are over uncompressed training of the same kind: DDP, a
parameter server, or local updates. The planner profiles the same model, batch and machine before the runs, on one
thread as in each rank; the costs of messages and shared processors are those of `thinwire plan`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from thinwire.errors import ConfigError
from thinwire.planner.costs import exchange_every
from thinwire.planner.models import torch_threads
from thinwire.planner.planning import UNCOMPRESSED, Plan
from thinwire.planner.predictions import Setting
from thinwire.policies.adaptive import is_adaptive_name
from thinwire.policies.designs import Design, design
from thinwire.presentation.tables import Table
from thinwire.transports.links import parse_rate
from thinwire_lab.bench.cells import BATCHES, HookCell
from thinwire_lab.bench.courses import Sweep
from thinwire_lab.bench.harness import Bench, Tell
from thinwire_lab.bench.hook_runs import measure
from thinwire_lab.bench.names import hook, last_line
from thinwire_lab.bench.options import TEXT, PaysOptions
from thinwire_lab.bench.pay_rows import (
    AtLink,
    Paid,
    SweptMethod,
    compare,
    milliseconds,
    pays_table,
    prediction_tables,
    summary,
)
from thinwire_lab.engines.namespaces import first_thin
from thinwire_lab.engines.starters import forks
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.workloads.models import TEXT_MODELS
from thinwire_lab.workloads.profiling import profile_workload
from thinwire_lab.workloads.recipes import recipe

WARM_EXCHANGES = 3
"""Exchanges before the first link, in which kernels compile."""
AUTO_SETTLES = 10
"""Exchanges that `auto` gets to adapt to a changed link, and that do not count."""
AUTO_SETTINGS, WIDE = (UNCOMPRESSED, "bf16", "int8", "3lc[s=1.0]", "3lc[s=1.75,entropy=zstd]"), 3
"""The predicted settings of `auto`; adaptive optimizers have the first few."""
PROFILED_STEPS = 160
"""Some seconds of most models, so that a pause of the machine affects few steps."""
STEPS = 5000
"""A limit above the steps of any sweep."""


@dataclass(kw_only=True)
class PaysBench(PaysOptions, Bench[SweptMethod, Paid]):
    """Models × methods, each swept over the links."""

    _plans: dict[str, dict[str, Plan]] = field(default_factory=dict, init=False, repr=False)

    kinds = (Paid,)
    serves = True
    key_options = ("cores",)
    left: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not self.cells() or not self.links or not self.seconds > 0:
            raise ConfigError("nothing to measure: name at least one model, one method and one link, and some seconds")
        for name in self.methods:
            for made in _planned(name):
                exchange_every(made)  # raises ConfigError if the planner does not know it
        for cell in self.cells():
            recipe(cell.model, cell.data)

    def cells(self) -> list[SweptMethod]:
        links = ",".join(str(parse_rate(link)) for link in self.links)
        return [
            self.filled(SweptMethod, model=model, method=name, data=data, links=links)
            for model in self.models
            for data in [TEXT if model in TEXT_MODELS else self.data]
            for name in self.methods
        ]

    def thin_link(self) -> tuple[str | None, str]:
        return first_thin(self.links), "kernel"

    def failed(self, figures: Paid) -> bool:
        return figures.error is not None

    def measure(self, cell: SweptMethod, before: Measured[SweptMethod, Paid], tell: Tell) -> Paid:
        tell("profile")
        plan = self._plan(cell)
        rates = [parse_rate(link) for link in cell.rates]
        named = hook(cell.method)
        settle = AUTO_SETTLES if named.auto is not None else 2
        sweep = Sweep(rates, cell.seconds, period=named.period, settle=settle)
        run = measure(
            HookCell(
                hook=cell.method,
                model=cell.model,
                data=cell.data,
                ranks=cell.ranks,
                steps=STEPS,
                warmup=WARM_EXCHANGES * named.period,
                seed=cell.seed,
                eval_examples=1,
            ),
            tell=lambda text: tell(f"{cell.rates[min(len(sweep.step_s), len(rates) - 1)]}: {text}"),
            course=sweep,
            starter=forks(),
        )
        at = [
            AtLink(link=link, measured_s=seconds, predicted_s=_predicted_s(plan, cell, rate.bps or math.inf))
            for link, rate, seconds in zip(cell.rates, rates, sweep.step_s, strict=False)
        ]
        missing = f"only {len(at)} of {len(rates)} links within {STEPS} steps" if len(at) < len(rates) else None
        return Paid(at=at, alone_s=plan.profile.step_s, error=run.error or missing)

    def _plan(self, cell: SweptMethod) -> Plan:
        """Returns the plan of a model in one mode, measured while no rank runs."""
        if cell.model not in self._plans:
            batch = BATCHES.get(cell.model, recipe(cell.model, cell.data).batch)
            profile = profile_workload(
                cell.model, cell.data, batch=batch, seed=cell.seed, steps=PROFILED_STEPS, threads=1
            )
            made = {}
            for mode in ("server", "collective"):
                names = [name for name in self.methods if (mode == "server") == hook(name).served]
                planned = [each for name in names for each in _planned(name)]
                setting = Setting(workers=cell.ranks, mode=mode, cores=self.cores or os.cpu_count())
                made[mode] = Plan(profile, planned, setting)
                with torch_threads(1):
                    made[mode].costs, made[mode].works  # measures them now
            self._plans = {cell.model: made}
        return self._plans[cell.model]["server" if cell.kind == "server" else "collective"]

    def line(self, cell: SweptMethod, figures: Paid) -> str:
        if figures.error is not None:
            return f"{cell}: failed: {last_line(figures.error)}"
        steps = ", ".join(f"{each.link} {milliseconds(each.measured_s)} ({each.error:+.0%})" for each in figures.at)
        return f"{cell}, ms a step and the prediction's error: {steps}"

    def tables(self, measured: Measured[SweptMethod, Paid]) -> list[Table]:
        return [pays_table(measured, self.ranks), *prediction_tables(measured)]

    def sections(self, measured: Measured[SweptMethod, Paid]) -> dict[str, Any]:
        return {**super().sections(measured), "pays": compare(measured), "predictions": summary(measured)}

    def notes(self, measured: Measured[SweptMethod, Paid]) -> list[str]:
        return [sentence for sentence in summary(measured).values() if sentence]


def _planned(name: str) -> list[Design]:
    """Returns the planner's design for a hook; for DDP's controller, one for each of its settings."""
    named = hook(name)
    if named.start_step and (named.auto is not None or named.codec is not None):
        raise ConfigError(f"method {name!r}: every measured step is compressed; leave out start_step")
    if named.auto is not None:
        return [design(each) for each in AUTO_SETTINGS]
    if named.design is not None:
        return [named.design]
    if named.id == "none":
        return [design(UNCOMPRESSED)]
    if named.codec is None:
        raise ConfigError(f"method {name!r}: the planner knows designs and our codecs, and none of torch's hooks")
    return [replace(design("3lc"), name=name, up=named.codec, down=named.codec)]


def _predicted_s(plan: Plan, cell: SweptMethod, bps: float) -> float:
    """Returns the predicted step; for DDP's controller that of the fastest allowed setting."""
    found = [plan.step_s(each.name, cell.ranks, bps) for each in _planned(cell.method)]
    return min(found[:WIDE] if is_adaptive_name(plan.profile.trainer.name) else found)
