"""Sentences, tables and a chart of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.planner.costs import exchange_every
from thinwire.planner.planning import UNCOMPRESSED, WORTH, Plan
from thinwire.planner.predictions import Setting, Summary
from thinwire.policies.adaptive import EXCHANGE_SHARE
from thinwire.policies.auto.levels import steps_of
from thinwire.presentation.charts import Chart, Panel, Series, to_matplotlib
from thinwire.presentation.tables import Table
from thinwire.quantities import counted, rate_text, seconds_text
from thinwire.transports.links import Rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ONE_LINE = "tw.distribute(model, optimizer)"
SERVED = 'tw.distribute(model, optimizer, server=…, design="{}")'
"""The line of a script, among ranks and with servers."""
UNEVEN = 1.5
"""By how much the middle half of the measured steps may differ before a plan says so."""


def verdict(plan: Plan) -> list[str]:
    """Returns sentences. The first is the line to write and its choice in the planned cluster.

    One sentence for each design follows. The last ones name parts of the training that the plan leaves out, and
    measured steps that differ much.

    Adaptive optimizers exchange local updates. Among designs of gradients the fastest has the least product of a step's
    seconds and the steps to the same accuracy.

    Args:
        plan: with at least one design beside uncompressed training.

    Example:
        >>> import torch
        >>> from thinwire import plan
        >>> model = torch.nn.Linear(100, 10)
        >>> measured = plan.profile(model, lambda: model(torch.ones(4, 100)).sum().backward(), steps=3)
        >>> made = plan.Plan(measured, ["3lc[s=1.0]"], plan.Setting(link="1mbit", workers=8))
        >>> print(plan.verdict(made)[0])  # doctest: +ELLIPSIS
        compress: at 8 workers, 1mbit 3lc[s=1.0] is ...× faster than uncompressed; write tw.distribute(model, ...
    """
    others = [each for each in plan.summaries() if each.at.design != UNCOMPRESSED]
    sentences = [_sentence(plan, each) for each in others]
    return [_advice(plan, others), *sentences, *_remarks(plan)]


def _advice(plan: Plan, others: Sequence[Summary]) -> str:
    """Returns the sentence with the line to write and its choice."""
    setting, ranks = plan.setting, plan.setting.mode == "collective"
    where = f"at {counted(setting.workers, 'worker')}, {link_text(setting.bps)}"
    plain = plan.round_of(UNCOMPRESSED, setting.workers, setting.bps)
    if plan.is_plain_enough:
        return (
            f"plain DDP is enough: {where} an all-reduce takes {100 * plan.plain_share:.2g} % of a step's computation, "
            f"and {ONE_LINE} leaves it as it is"
        )
    if plan.adaptive:
        chosen, kind = plan.local_round(), plan.profile.trainer.kind
        name, speedup = f"local-sgd[h={chosen.steps}]", plain.step_s / chosen.step_s
        line = f"{ONE_LINE}, which takes {name}" if ranks else SERVED.format(name)
        return f"write {line}: {where} a step of {kind} is {speedup:.3g}× as fast as with uncompressed gradients"
    if not others:
        return f"{where} a step takes {seconds_text(plain.step_s)} uncompressed"
    best = max(others, key=lambda each: each.at.speedup / _steps(plan, each))
    worth = best.at.speedup / _steps(plan, best)
    if worth >= WORTH:
        line = f"{ONE_LINE}, which chooses a codec for gradients" if ranks else SERVED.format(best.at.design)
        return f"compress: {where} {best.at.design} is {best.at.speedup:.3g}× faster than uncompressed; write {line}"
    if worth > 1 / WORTH:
        said = f"it makes no difference: {where} {best.at.design} and uncompressed take the same time"
    elif best.at.speedup > 1 / WORTH:
        said = (
            f"do not compress: {where} a step of {best.at.design} is {best.at.speedup:.3g}× as fast as uncompressed "
            f"ones, and it takes some {_steps(plan, best):g} times the steps"
        )
    else:
        said = (
            f"do not compress: {where} uncompressed is {1 / best.at.speedup:.3g}× faster than {best.at.design}, the "
            "best of the others"
        )
    return said + (f"; {ONE_LINE} leaves gradients uncompressed" if ranks else "")


def _steps(plan: Plan, summary: Summary) -> float:
    """How many times the steps of s = 1 a training takes with a design, as far as that is known: of coded gradients."""
    up = plan.designs[summary.at.design].up
    known = up.id == "3lc" and summary.exchange_share is None
    return steps_of(up.config()["sparsity"]) if known else 1.0


def _remarks(plan: Plan) -> list[str]:
    """Returns cautions about the measured steps and the predictions."""
    (low, high), remarks = plan.profile.middle_s, [*plan.profile.remarks]
    if high > UNEVEN * low:
        remarks.append(
            f"measured steps are uneven: of the middle half, the shortest took {seconds_text(low)} and the longest "
            f"{seconds_text(high)}. Where batches are alike, something else was running: plan again when nothing is"
        )
    return remarks


def _sentence(plan: Plan, summary: Summary) -> str:
    at, free, pays = summary.at, summary.free_above_bps, summary.pays_below_bps
    if free is None:
        matters = "the link matters at any rate"
    else:
        matters = f"the link stops mattering above {rate_text(free, 2)}" if free else "the link matters at no rate"
    if pays is None:
        here = "here, and not" if at.speedup >= WORTH else "neither here nor"
        paying = f"it pays {here} on the thinnest links"
    else:
        paying = f"it pays below {rate_text(pays, 2)}" if math.isfinite(pays) else "it pays at any rate"
    said = [f"{at.design} {at.speedup:.3g}×", matters, paying]
    if (steps := exchange_every(plan.designs[at.design])) > 1 and summary.exchange_share is None:
        said.append(f"it sends the sum of {steps} steps' gradients, and weights change once in {steps} steps")
    if summary.exchange_share is not None:
        allowed = f"{100 * EXCHANGE_SHARE:.3g} % or less"
        said.append(f"exchanges take {100 * summary.exchange_share:.2g} % of the time")
        enough = summary.enough_h
        said.append(f"no h makes that {allowed}" if enough is None else f"h={enough} is enough for {allowed}")
    elif plan.loses_by(at.design):
        said.append(f"{plan.profile.trainer.kind} loses accuracy by gradients in fewer than 8 bits")
    elif (times := _steps(plan, summary)) > 1:
        said.append(f"it takes some {times:g} times the steps of s = 1, which are not planned")
    return "; ".join(said)


def designs_table(plan: Plan) -> Table:
    """Returns a line for each design in the cluster that was asked about."""
    header = ["design", "step", "speed-up", "bits up", "bits down", "encode", "decode"]
    lines = []
    for each in plan.summaries():
        free, pays = each.free_above_bps, each.pays_below_bps
        lines.append(
            [
                *(each.at.design, seconds_text(each.at.step_s), f"{each.at.speedup:.3g}×"),
                *(f"{each.bits_up:.3g}", f"{each.bits_down:.3g}"),
                *(seconds_text(each.encode_s), seconds_text(each.decode_s)),
                "any rate" if free is None else rate_text(free, 2) if free else "no rate",
                "–" if pays is None else rate_text(pays, 2) if math.isfinite(pays) else "any rate",
            ]
        )
    setting = plan.setting
    where = f"{counted(setting.workers, 'worker')}, {link_text(setting.bps)}, {mode_text(setting)}"
    title = f"Predicted: {where}; means of a step, bits of a value"
    return Table([*header, "link matters below", "pays below"], lines, title, left=1)


def workers_table(plan: Plan) -> Table:
    """Returns a line for each number of workers: the step's seconds with each design."""
    found = plan.by_workers()
    numbers = dict.fromkeys(each.workers for each in found)
    return Table(
        ["workers", *plan.designs],
        [[f"{each:,}", *(seconds_text(one.step_s) for one in found if one.workers == each)] for each in numbers],
        f"Predicted: a step by the number of workers, {link_text(plan.setting.bps)}, {mode_text(plan.setting)}",
        left=1,
    )


def chart(plan: Plan) -> Chart:
    """Returns the step's seconds against the link's rate, a line for each design, and the link that was asked about."""
    found = plan.by_link()
    series = [
        Series(
            label=name,
            x=[(each.link_bps or 0) / 1e6 for each in found if each.design == name],
            y=[each.step_s for each in found if each.design == name],
        )
        for name in plan.designs
    ]
    if math.isfinite(plan.setting.bps):
        seconds = [each.step_s for each in found]
        at, ends = [plan.setting.bps / 1e6] * 2, [min(seconds), max(seconds)]
        series.append(Series(label=f"the link, {link_text(plan.setting.bps)}", x=at, y=ends, role="reference"))
    panel = Panel(
        title=f"{counted(plan.setting.workers, 'worker')}, {mode_text(plan.setting)}",
        x_label="link, Mbit/s",
        y_label="predicted seconds a step",
        series=series,
        x_log=True,
        y_log=True,
    )
    return Chart(name="plan", caption="Predicted time of a step by the link's rate.", panels=[panel])


def picture(plan: Plan) -> Figure:
    """Returns `chart` as a figure of matplotlib, to be shown or saved.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return to_matplotlib(chart(plan))


def mode_text(setting: Setting) -> str:
    """Returns the text for the mode: equal ranks or servers."""
    if setting.mode == "collective":
        return "DDP and FSDP"
    return "through a parameter server" if setting.servers == 1 else f"through {setting.servers} parameter servers"


def link_text(bps: float) -> str:
    """Returns a link as the command takes it."""
    return "no limit" if math.isinf(bps) else str(Rate(round(bps)))
