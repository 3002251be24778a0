"""torch's random generators: what a training that is repeated has to begin with again, dropout above all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

HOST = "cpu"


def chance_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the states of the host's generator and of those of the GPUs that a model's parameters are on.

    Example:
        >>> list(chance_of(nn.Linear(2, 2)))
        ['cpu']
    """
    gpus = sorted({str(parameter.device) for parameter in model.parameters() if parameter.is_cuda})
    return {HOST: torch.get_rng_state(), **{gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}}


def set_chance(states: Mapping[str, torch.Tensor]) -> None:
    """Takes back what `chance_of` returned; of a GPU that is not here nothing."""
    for device, state in states.items():
        if device == HOST:
            torch.set_rng_state(state)
        elif torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
