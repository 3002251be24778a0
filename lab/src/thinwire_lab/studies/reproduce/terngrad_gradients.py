"""TernGrad's figure 2: histograms of gradients: original, clipped, ternary, and averaged over two workers.

The gradients come from a training with the design. The study codes them as the workers do: clipped at 2.5 σ, and
rounded to one scale, the larger of both workers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from thinwire.codecs import codec, decode
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.studies.reproduce.entry import Found, Scale, Shown, scaled
from thinwire_lab.studies.reproduce.job_cells import TrainingFinding, train
from thinwire_lab.studies.reproduce.terngrad_training import LARGE, SCALED, RecipeCell, pair

BINS = 61
LOOKS = 3  # steps with stored gradients, from the first to the last
CLIP = 2.5  # c of equation 21
_STEPS: dict[Scale, int] = {"tiny": 4, "quick": 120, "full": 2_000}


class Histograms(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's gradients at one step."""

    layer: str  # its name
    step: int  # number of the step, from 0
    sigma: float  # standard deviation of worker 0's gradient
    scale: float  # scale of the ternary values, the larger of both workers
    edge: float  # histograms extend from −edge to edge
    original: list[float]  # share of worker 0's values in each of `BINS` bins
    clipped: list[float]  # share of worker 0's values in each of `BINS` bins
    ternary: list[float]  # share of worker 0's values at −1, 0 and 1 times the scale
    averaged: list[float]  # share of both workers' averages at −1, −½, 0, ½ and 1 times the scale
    shortened: float  # share of its norm that worker 0's gradient loses by clipping
    turned: float  # the angle by which clipping turns it, in degrees


class GradientsFinding(TrainingFinding, frozen=True, kw_only=True):
    """The results of the training, and its histograms."""

    histograms: list[Histograms]


def histograms(layer: str, step: int, gradients: Sequence[torch.Tensor], *, seed: int) -> Histograms:
    """Codes both workers' gradients of one layer and counts their values.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator ...>
    >>> gradients = [torch.randn(200_000), torch.randn(200_000)]
    >>> found = histograms("fc", 0, gradients, seed=0)
    >>> round(sum(found.ternary), 6), round(sum(found.averaged), 6), found.scale <= 2.51
    (1.0, 1.0, True)
    >>> round(found.shortened, 2), round(found.turned)
    (0.01, 3)
    """
    coder = codec("terngrad", clip=CLIP)
    scale = max(coder.local_scale(each) for each in gradients)
    trits = []
    for rank, each in enumerate(gradients):
        values = decode(coder.encode(each, key=coder.key(seed, f"{layer} {rank}", step), scale=scale))
        trits.append((torch.as_tensor(values) / scale if scale else torch.zeros_like(each)).round())
    first = gradients[0]
    sigma, edge = float(first.std(correction=0)), float(first.abs().max()) or 1.0
    clipped = first.clamp(-CLIP * sigma, CLIP * sigma)

    whole, left = float(first.norm()), float(clipped.norm())
    cosine = float(first @ clipped) / (whole * left) if left else 1.0

    def shares(values: torch.Tensor, bins: int, reach: float) -> list[float]:
        counts = torch.histc(values.float(), bins=bins, min=-reach, max=reach)
        return [float(each) / values.numel() for each in counts]

    return Histograms(
        layer=layer,
        step=step,
        sigma=sigma,
        scale=scale,
        edge=edge,
        original=shares(first, BINS, edge),
        clipped=shares(clipped, BINS, edge),
        ternary=shares(trits[0], 3, 1.5),
        averaged=shares(sum(trits[1:], trits[0]), 5, 2.5),
        shortened=1 - left / whole if whole else 0.0,
        turned=math.degrees(math.acos(min(1.0, cosine))),
    )


def layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of the last convolution, if any, and of the first fully connected layer."""
    weights = {name: each for name, each in model.named_parameters() if each.ndim > 1}
    convolutions = [name for name, each in weights.items() if each.ndim == 4]
    first = next(name for name, each in weights.items() if each.ndim == 2)
    return {name: weights[name] for name in (*convolutions[-1:], first)}


class GradientsCell(RecipeCell, frozen=True, kw_only=True):
    """A training of two workers with `LOOKS` samples of their gradients."""

    finding = GradientsFinding

    def run(self, tell: Tell) -> GradientsFinding:
        looked = {round(number * (self.steps - 1) / (LOOKS - 1)) for number in range(LOOKS)}
        waiting: defaultdict[tuple[int, str], dict[int, torch.Tensor]] = defaultdict(dict)  # by rank: any may be first
        found: list[Histograms] = []

        def on_step(rank: int, step: int, loss: float, model: nn.Module) -> None:
            if step not in looked:
                return
            for name, parameter in layers(model).items():
                if parameter.grad is None:
                    continue
                gradients = waiting[step, name]
                gradients[rank] = parameter.grad.detach().clone().flatten()
                if len(gradients) == self.workers:
                    by_rank = [each for _, each in sorted(waiting.pop((step, name)).items())]
                    found.append(histograms(name, step, by_rank, seed=self.seed))

        return GradientsFinding(**msgspec.structs.asdict(train(self, tell, on_step=on_step)), histograms=found)


def _cells(scale: Scale) -> Sequence[GradientsCell]:
    model, data = pair(scale)
    shared: dict[str, Any] = {"workers": 2, "batch": 16 if scale == "tiny" else 128, "eval_steps": 0, "lr": 0.01}
    return [GradientsCell(design=LARGE, model=model, data=data, steps=_STEPS[scale], **shared)]


def _show(found: Found) -> Shown:
    [(cell, finding)] = found.items()
    charts, lines = [], []
    for number, layer in enumerate(dict.fromkeys(each.layer for each in finding.histograms)):
        panels: dict[str, list[Series]] = {kind: [] for kind in ("original", "clipped", "ternary", "averaged")}
        for each in finding.histograms:
            if each.layer != layer:
                continue
            width = 2 * each.edge / BINS
            centres = [(-each.edge + (index + 0.5) * width) / each.sigma for index in range(BINS)]
            half = each.scale / each.sigma / 2
            x = {"original": centres, "clipped": centres}
            x["ternary"], x["averaged"] = [2 * half * i for i in (-1, 0, 1)], [half * i for i in range(-2, 3)]
            for kind, series in panels.items():
                series.append(Series(label=f"step {each.step + 1:,}", x=x[kind], y=getattr(each, kind)))
            zeros = f"{each.ternary[1]:.1%}"
            largest, scale = f"{each.edge / each.sigma:.1f} σ", f"{2 * half:.2f} σ"
            clipping = f"{each.shortened:.1%}", f"{each.turned:.1f}°"
            lines.append([layer, f"{each.step + 1:,}", largest, scale, *clipping, zeros])
        charts.append(
            Chart(
                name=f"terngrad-figure-2-{number + 1}",
                caption=f"Histograms of {layer}'s gradient; values in units of its standard deviation σ.",
                panels=[
                    Panel(title=f"({letter}) {kind}", x_label="gradient, σ", y_label="share", series=series, y_log=True)
                    for letter, (kind, series) in zip("abcd", panels.items(), strict=True)
                ],
            )
        )
    header = ["layer", "step", "largest value", "scale after clipping", "length lost", "turned by", "zeros"]
    return Shown(
        setting=(
            f"{cell.model} on {cell.data}, 2 workers of {cell.batch} examples, {cell.steps:,} steps, momentum SGD from "
            f"{cell.lr:g}, polynomial decay, one seed."
        ),
        tables=[Table(header, lines, "What clipping does to the scale, and to the gradient", left=1)],
        charts=charts,
        notes=[
            "The paper shows AlexNet's third convolution and first fully connected layer, without numbers. Clipping at "
            "2.5 σ takes 1.0 to 1.5 % of a gradient's length there and turns it by 2 to 3 degrees (§3.3)."
        ],
    )


ENTRIES = scaled(
    *("terngrad", SCALED), ("figure-2", "histograms of gradients, clipped, ternary and averaged", 1, _cells, _show)
)
