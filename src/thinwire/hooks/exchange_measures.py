"""What a hook tells the controller of its model and gradients."""

from __future__ import annotations

import math

import torch

from thinwire.codecs import Codec
from thinwire.collective.core import Collective
from thinwire.kernels.numba.lag import norm
from thinwire.policies.autopilot.costs import Workload


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
