"""What a hook tells the controller of its model and gradients."""

from __future__ import annotations

import math

import torch

from thinwire.codecs import Codec
from thinwire.collective.core import Collective
from thinwire.kernels.numba.lag import norm
from thinwire.policies.autopilot.costs import Workload
from thinwire.runtime.collective import CollectiveDriver


def workload(core: Collective, base: Codec) -> Workload:
    """Returns what is exchanged in a step.

    Args:
        core: this rank's part in it.
        base: the codec of the tensors that the controller decides about.
    """
    tensors = core.residuals.tensors.values()
    coded = sum(tensor.numel for tensor in tensors if tensor.choice.up == base)
    whole = sum(tensor.numel for tensor in tensors)
    return Workload(
        coded=coded,
        plain=whole - coded,
        ranks=core.residuals.world,
        groups=max(1, math.ceil(4 * whole / core.group_nbytes)) if core.group_nbytes else 1,
        uncompressed_nbytes=sum(tensor.nbytes for tensor in tensors),
        pulls=core.pulls,
    )


def log_norm(gradient: torch.Tensor) -> float:
    """Returns log₂ of the norm of a sample; NaN where it would have to come from a GPU, or is none."""
    if gradient.is_cuda or gradient.dtype not in (torch.float32, torch.float64):
        return math.nan
    found = norm(gradient.detach().reshape(-1).numpy())
    return math.log2(found) if 0 < found < math.inf else math.nan


class ExchangeMeter:
    """What compressed steps take of a driver: of each its waiting, and of several in a row a mean of all else.

    Args:
        driver: counts.
    """

    def __init__(self, driver: CollectiveDriver) -> None:
        self._driver = driver
        self._before: tuple[float, float] | None = None
        self._steps, self._waited_s = 0, 0.0

    def begin(self) -> None:
        """Says that a compressed step begins."""
        if self._before is None:
            self._before, self._steps = self._driver.spent(), 0
        self._steps += 1
        self._waited_s = self._driver.waited_s

    def forget(self) -> None:
        """Says that the last step was not compressed, or is not to be measured."""
        self._before = None

    @property
    def waited_s(self) -> float:
        """Seconds that the last step waited for messages."""
        return self._driver.waited_s - self._waited_s

    def read(self) -> tuple[float, float]:
        """Returns a step's seconds of encoding, decoding and copying, and bytes sent: means since the last read."""
        before, self._before = self._before or (0.0, 0.0), self._driver.spent()
        steps, self._steps = max(1, self._steps), 0
        codec_s, sent_nbytes = ((now - then) / steps for now, then in zip(self._before, before, strict=True))
        return codec_s, sent_nbytes
