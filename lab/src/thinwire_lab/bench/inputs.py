"""The inputs of measurements: values with a chosen share of zeros, a ResNet-50's sizes, and a model's gradients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire.codecs import Context
from thinwire.policies.compression import codec_by_name
from thinwire_lab.bench.resnet50 import ResNet50
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.workload import workload

BLOCK = 4096
ROTATION = 3
"""Inputs that take turns on a device, so that none is found in a cache that a training step would not leave it in."""

Floats = NDArray[np.float32]


def draw(size: int, zero_fraction: float, seed: int = 0) -> tuple[Floats, Floats]:
    """Returns a gradient and a residual whose sum quantises, at s = 1, to about this share of zeros.

    Normal values with a log-normal scale per block of 4,096, as layers have, clipped at twice the quantile.
    """
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size, dtype=np.float32)
    scales = np.exp(0.5 * generator.standard_normal(-(-size // BLOCK), dtype=np.float32))
    values *= np.repeat(scales, BLOCK)[:size]
    threshold = np.quantile(np.abs(values[: min(size, 4_000_000)]), zero_fraction)
    np.clip(values, -2 * threshold, 2 * threshold, out=values)
    residual = values * generator.uniform(0.2, 0.8, size).astype(np.float32)
    return values - residual, residual


class Arrays:
    """The arrays of all measurements of one size, allocated once.

    Whether a large array gets huge pages is luck, and worth a fifth: rows that are to be compared must share it.

    Attributes:
        gradients, residuals: inputs, which nothing writes to.
        works: residuals that are measured, each to be restored from `residuals` before a turn.
        outs: what is decoded or copied into.
    """

    def __init__(self, size: int, device: torch.device, rotation: int) -> None:
        self.size, self.device = size, device
        self.gradients, self.residuals, self.works, self.outs = (
            [torch.from_numpy(np.zeros(size, np.float32)).to(device) for _ in range(rotation)] for _ in range(4)
        )
        self._zero_fraction: float | None = None
        self._contexts: dict[str, Context] = {}

    def fill(self, zero_fraction: float) -> None:
        """Draws data with this share of zeros, where they are not there yet."""
        if zero_fraction != self._zero_fraction:
            for seed, (gradient, residual) in enumerate(zip(self.gradients, self.residuals, strict=True)):
                for kept, drawn in zip((gradient, residual), draw(self.size, zero_fraction, seed), strict=True):
                    kept.copy_(torch.from_numpy(drawn))
            self._zero_fraction = zero_fraction

    def context(self, name: str) -> Context:
        """Returns the context of a codec, the same one for every share of zeros."""
        if name not in self._contexts:
            self._contexts[name] = codec_by_name(name).context(self.gradients[0])
        return self._contexts[name]

    def restore(self, turn: int) -> None:
        """Restores the residual of a turn."""
        index = turn % len(self.works)
        self.works[index].copy_(self.residuals[index])


def resnet50_sizes() -> list[int]:
    """The sizes of ResNet-50's 161 parameters, in order."""
    with torch.device("meta"):
        return [each.numel() for each in ResNet50().parameters()]


def training(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[list[torch.Tensor]]]:
    """Returns a job's model, its optimizer, and the gradients of every step of worker 0.

    The gradients are in the parameters' order, and are applied when the next ones are asked for.
    """
    made = workload(job)

    def gradients() -> Iterator[list[torch.Tensor]]:
        while True:
            made.optimizer.zero_grad()
            made.backward()
            yield [parameter.grad for parameter in made.model.parameters() if parameter.grad is not None]
            made.optimizer.step()

    return made.model, made.optimizer, gradients()
